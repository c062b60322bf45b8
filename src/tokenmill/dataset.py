"""Reads back what a run has stored, sealed parts and open journals alike, while it goes on. Never writes.

A record's id is its key, sample and turn. Where an id was stored more than once, the newest counts: of the newest file,
and in it the last line; the others are superseded. `briefs` gives all of them, newest first, so that the first one met
counts; `current` and `records` only those that count.
"""

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from tokenmill import linefile
from tokenmill.core.records import FAILURES, NULL, Parts, Record
from tokenmill.engines.base import decode_json
from tokenmill.errors import BrokenError, StoreError
from tokenmill.store import is_whole, journals, number_of, part_of, parts, place_of, plain


class Identified(msgspec.Struct, gc=False):
    """The least that is read of a record: its id."""

    key: str
    sample: int
    turn: int


class Measured(Identified, gc=False):
    """What a verdict is made of."""

    labels: list[str]
    reasoning_tokens: int
    repetition: float
    thinking: bool


class Counted(Measured, gc=False):
    """What a run's accounts are made of."""

    cohort: int
    digest: str
    settings: str
    output_tokens: int
    finish_reason: str


class Brief(Counted, gc=False):
    """A record without its texts and ids."""

    prompt_tokens: int
    server: str
    started: float
    seconds: float


_any = msgspec.json.Decoder(Any)
_record = msgspec.json.Decoder(Record)
_id = msgspec.json.Decoder(Identified)

BATCH = 4096
"""Rows without their texts, taken out of a part at once: 2 MB."""

_WITHOUT_IDS = [name for name in Record.__struct_fields__ if name not in ("prompt_ids", "output_ids")]
"""A record's columns but for its token ids, which as Python objects are nearly all of it."""

FEW = 16
"""Whole records at once: one of 8,000 tokens takes 0.5 MB as Python objects."""

Place = tuple[int, int, int]
"""Row, sample, turn."""

Id = tuple[str, int, int]
"""Key, sample, turn."""

Wanted = Callable[[str, int, int], bool]
"""Whether an id (key, sample, turn) is."""

Kind = TypeVar("Kind", bound="Identified")
Item = TypeVar("Item")
Harmed = Callable[[StoreError], None]
"""Hears of a damaged part, whose rows are then left out."""


@dataclass(frozen=True, slots=True)
class _Journal:
    """An open journal, held open: once it is sealed and gone, it can still be read."""

    path: Path
    file: BinaryIO


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, even where its state is lost: it holds a store."""
    data = path / "data"
    return (path / "state.json").exists() or bool(journals(data) or parts(data))


class _Snapshot:
    """The files of a store at one moment: no row in two of them, none in between, however the run seals meanwhile."""

    def __init__(self, data: Path) -> None:
        self._open = ExitStack()
        held = []
        for path in journals(data):
            try:
                held.append(_Journal(path, self._open.enter_context(path.open("rb"))))
            except FileNotFoundError:
                continue  # sealed since it was listed: its part is listed below
        self.parts = parts(data)
        self.journals = [journal for journal in held if part_of(journal.path) not in self.parts]

    def __enter__(self) -> "_Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def briefs(data: Path, tell: Callable[[str], None] = lambda text: None) -> Iterator[Brief]:
    """All ended records, the newest first. `tell` hears of lines that are not whole."""
    return newest_first(data, Brief, tell)


def newest_first(data: Path, kind: type[Kind], tell: Callable[[str], None] = lambda text: None) -> Iterator[Kind]:
    """The same with the fields that are wanted."""
    with _Snapshot(data) as files:
        yield from _newest_first(files, kind, tell)


def current(data: Path, kind: type[Kind], harmed: Harmed | None = None) -> Iterator[Kind]:
    """The records that count, the newest first: without those that a newer record of their id supersedes.

    `kind` names the fields that are wanted; without `harmed` a damaged part raises StoreError.
    """
    with _Snapshot(data) as files:
        again = _stored_again(files, harmed)
        for row in _newest_first(files, kind, lambda text: None, harmed):
            identity = (row.key, row.sample, row.turn)
            if identity not in again:
                yield row
            elif again[identity]:
                again[identity] = 0
                yield row


def turns(record: Record) -> list[tuple[str, str]]:
    """A prompt's messages as role and text; what is none is one text without a role."""
    raw = bytes(record.messages)
    try:
        found, _ = decode_json(raw, _any)
    except BrokenError:
        return [("", raw.decode("utf-8", "replace"))]
    messages = [message for message in found if isinstance(message, dict)] if isinstance(found, list) else []
    return [(str(message.get("role", "")), _text(message.get("content"))) for message in messages]


def _text(content: object) -> str:
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def _newest_first(
    files: _Snapshot, kind: type[Kind], tell: Callable[[str], None], harmed: Harmed | None = None
) -> Iterator[Kind]:
    decoder = msgspec.json.Decoder(kind)
    for journal in reversed(files.journals):
        for line, number in linefile.backwards(journal.file):
            if is_whole(line):
                yield decoder.decode(plain(line))
            elif line.strip():
                tell(f"{journal.path.name}:{number()}: not a whole record; its id counts as not done")
    for part in reversed(files.parts):
        yield from _but(harmed, _columns(part, kind))


def _but(harmed: Harmed | None, rows: Iterator[Item]) -> Iterator[Item]:
    """A part's rows, up to where it is damaged."""
    try:
        yield from rows
    except StoreError as error:
        if harmed is None:
            raise
        harmed(error)


def picked(data: Path, wanted: Wanted, harmed: Harmed | None = None, *, with_ids: bool = True) -> dict[Id, Record]:
    """Whole records of the ids that are wanted: of each the one that counts. Without their token ids they take a tenth.

    A few of a whole store: of its Parquet files, the ids' columns and the row groups that hold them are read."""
    found: dict[Id, Record] = {}
    with _Snapshot(data) as files:
        for journal in reversed(files.journals):
            for line, _ in linefile.backwards(journal.file):
                if is_whole(line):
                    own = _id.decode(plain(line))
                    identity = (own.key, own.sample, own.turn)
                    if wanted(*identity) and identity not in found:
                        record = _record.decode(plain(line))
                        found[identity] = record if with_ids else replace(record, prompt_ids=NULL, output_ids=NULL)
        for part in reversed(files.parts):
            for record in _but(harmed, _of_part(part, wanted, with_ids)):
                found.setdefault((record.key, record.sample, record.turn), record)  # the newest stands first (seal.py)
    return found


def _of_part(part: Path, wanted: Wanted, with_ids: bool) -> Iterator[Record]:
    ids = enumerate(_columns(part, Identified))
    left = deque(place for place, own in ids if wanted(own.key, own.sample, own.turn))
    columns = list(Record.__struct_fields__) if with_ids else _WITHOUT_IDS
    with opened(part) as file:
        first = 0
        for group in range(file.num_row_groups if left else 0):
            end = first + file.metadata.row_group(group).num_rows
            places = []
            while left and left[0] < end:
                places.append(left.popleft() - first)
            if places:
                rows = file.read_row_group(group, columns=columns).take(places).to_pylist()
                yield from (from_row({"prompt_ids": None, "output_ids": None, **row}) for row in rows)
            first = end


def _columns(part: Path, kind: type[Any]) -> Iterator[Any]:
    """The rows of a part as structs of some of its fields, in its order."""
    names = list(kind.__struct_fields__)
    with opened(part) as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=names):
            yield from map(kind, *(batch.column(name).to_pylist() for name in names))


@contextmanager
def opened(part: Path) -> Iterator[Any]:
    """A part as pyarrow reads it; raises StoreError where it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(part) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{part} is damaged: {error}", fix=f"mv {part} {part}.bad   and run again: its rows are generated anew"
        ) from error


def records(data: Path) -> Iterator[Record]:
    """The records that count, in the prompts' order.

    A merge over files that are each sorted; only files whose rows overlap are open at once, so memory stays flat.
    """
    with _Snapshot(data) as files:
        again = _stored_again(files)
        best: dict[Id, tuple[tuple[int, int], Record]] = {}
        for age, record in _merged(files):
            identity = (record.key, record.sample, record.turn)
            if identity not in again:
                yield record
                continue
            best[identity] = max(best.get(identity, (age, record)), (age, record), key=lambda found: found[0])
            again[identity] -= 1
            if again[identity] == 0:
                yield best.pop(identity)[1]


def completion(data: Path) -> Record | None:
    """Any record that has a completion, the first at hand; None where there is none."""
    with _Snapshot(data) as files:
        lines = (line for journal in files.journals for line in _lines(journal.file) if is_whole(line))
        stored = chain((_record.decode(plain(line)) for line in lines), *map(part_records, files.parts))
        return next((record for record in stored if FAILURES.isdisjoint(record.labels)), None)


def _stored_again(files: _Snapshot, harmed: Harmed | None = None) -> Counter[Id]:
    """The ids that were stored more than once, and how often: few, if any. Eight bytes an id to find them."""
    hashes = array("Q", (id_hash(found) for found in _ids(files, harmed)))
    values, counts = np.unique(np.array(hashes, dtype=np.uint64), return_counts=True)
    several = set(values[counts > 1].tolist())
    if not several:
        return Counter()
    found = Counter((own.key, own.sample, own.turn) for own in _ids(files, harmed) if id_hash(own) in several)
    return Counter({identity: count for identity, count in found.items() if count > 1})


def ids(data: Path) -> Iterator[Identified]:
    """The ids of all ended records, superseded ones included, in no order."""
    with _Snapshot(data) as files:
        yield from _ids(files, None)


def _ids(files: _Snapshot, harmed: Harmed | None) -> Iterator[Identified]:
    for part in files.parts:
        yield from _but(harmed, _columns(part, Identified))
    for journal in files.journals:
        for line in _lines(journal.file):
            if is_whole(line):
                yield _id.decode(plain(line))


def id_hash(own: Identified) -> int:
    """64 bits that stand for an id."""
    return int(xxhash.xxh3_64_intdigest(f"{own.key}\0{own.sample}\0{own.turn}".encode("utf-8", "surrogatepass")))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    yield from file


Aged = tuple[tuple[int, int], Record]
"""A record with its age: the number of its file, and its place in it; the greater, the newer."""


def _merged(files: _Snapshot) -> Iterator[Aged]:
    starts: list[tuple[int, int, Callable[[], Iterator[Aged]]]] = []
    for part in files.parts:
        starts.append((_first_row(part), len(starts), partial(_part_stream, part)))
    for journal in files.journals:
        order = _journal_order(journal.file)
        if order:
            starts.append((order[0][0][0], len(starts), partial(_journal_stream, journal, order)))
    starts.sort(key=lambda start: start[:2])
    heap: list[tuple[Place, int, Aged, Iterator[Aged]]] = []
    while heap or starts:
        while starts and (not heap or starts[0][0] <= heap[0][0][0]):
            _, number, opened = starts.pop(0)
            _push(heap, number, opened())
        if heap:
            _, number, found, rest = heapq.heappop(heap)
            yield found
            _push(heap, number, rest)


def _push(heap: list[tuple[Place, int, Aged, Iterator[Aged]]], number: int, stream: Iterator[Aged]) -> None:
    found = next(stream, None)
    if found is not None:
        record = found[1]
        heapq.heappush(heap, ((record.row, record.sample, record.turn), number, found, stream))


def _first_row(part: Path) -> int:
    with opened(part) as file:
        column = file.schema_arrow.get_field_index("row")
        statistics = file.metadata.row_group(0).column(column).statistics
        return int(statistics.min)


def _journal_order(file: BinaryIO) -> list[tuple[Place, int, int]]:
    """Place, offset and length of each whole line, by place: a journal has 128 MB, its order 10 MB at most."""
    order, at = [], 0
    for line in _lines(file):
        if is_whole(line):
            order.append((place_of(line), at, len(line)))
        at += len(line)
    return sorted(order)


def _journal_stream(journal: _Journal, order: list[tuple[Place, int, int]]) -> Iterator[Aged]:
    for _, at, length in order:
        journal.file.seek(at)
        yield (number_of(journal.path), at), _record.decode(plain(journal.file.read(length)))


def _part_stream(part: Path) -> Iterator[Aged]:
    # Of rows with one place the newest stands first (seal.py).
    for position, record in enumerate(part_records(part)):
        yield (number_of(part), -position), record


def part_records(part: Path) -> Iterator[Record]:
    """The records of a sealed file, in its order."""
    with opened(part) as file:
        for batch in file.iter_batches(batch_size=FEW, columns=list(Record.__struct_fields__)):
            yield from map(from_row, batch.to_pylist())


def from_row(row: dict[str, Any]) -> Record:
    """A Parquet row as a record."""
    fields = {name: row[name] for name in Record.__struct_fields__}
    for name in ("prompt_ids", "output_ids"):
        fields[name] = NULL if row[name] is None else msgspec.Raw(msgspec.json.encode(row[name]))
    for name in ("messages", "tools"):
        fields[name] = NULL if row[name] is None else msgspec.Raw(row[name].encode())
    fields["parts"] = Parts(*row["parts"])
    fields["labels"] = tuple(row["labels"])
    return Record(**fields)

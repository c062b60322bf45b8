"""Reads back what a run has stored, sealed parts and open journals alike. Never writes.

Where an id was generated again, the latest attempt counts; earlier rows are superseded.
"""

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from mmap import ACCESS_READ, mmap
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.records import NULL, Parts, Record
from tokenmill.store import is_whole, journals, parts, place_of, plain


class Brief(msgspec.Struct, gc=False):
    """A record without its texts and ids: what accounts, verdicts and reports need."""

    key: str
    sample: int
    turn: int
    cohort: int
    digest: str
    settings: str
    labels: list[str]
    reasoning_tokens: int
    repetition: float
    thinking: bool
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    server: str
    started: float
    seconds: float


_brief = msgspec.json.Decoder(Brief)
_record = msgspec.json.Decoder(Record)

BATCH = 4096
FEW = 16
"""Whole records at once: one of 8,000 tokens takes 0.5 MB as Python objects."""


def briefs(data: Path, tell: Callable[[str], None] = lambda text: None) -> Iterator[Brief]:
    """All ended records, the newest first, so that of an id met again the first is the one that counts.

    `tell` hears of lines that are not whole.
    """
    for journal in reversed(journals(data)):
        for line, number in _lines_backwards(journal):
            if is_whole(line):
                yield _brief.decode(plain(line))
            elif line.strip():
                tell(f"{journal.name}:{number()}: not a whole record; its id counts as not done")
    for part in reversed(parts(data)):
        yield from _part_briefs(part)


def _part_briefs(part: Path) -> Iterator[Brief]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(part) as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=list(Brief.__struct_fields__)):
            columns = [batch.column(name).to_pylist() for name in Brief.__struct_fields__]
            yield from map(Brief, *columns)


def _lines_backwards(journal: Path) -> Iterator[tuple[bytes, Callable[[], int]]]:
    """The lines from the last to the first, each with a way to ask for its number."""
    if journal.stat().st_size == 0:
        return
    with journal.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
        end = len(text)
        while end > 0:
            start = text.rfind(b"\n", 0, end - 1) + 1
            yield text[start:end], lambda start=start: text[:start].count(b"\n") + 1  # type: ignore[misc]
            end = start


def _lines(journal: Path) -> Iterator[bytes]:
    with journal.open("rb") as file:
        yield from file


def records(data: Path) -> Iterator[Record]:
    """All records in the prompts' order, the superseded ones left out.

    A merge over files that are each sorted; only files whose rows overlap are open at once, so memory stays flat.
    """
    pending: list[Record] = []
    for record in _merged(data):
        if pending and _place(pending[-1]) == _place(record):
            pending[-1] = max(pending[-1], record, key=attrgetter("attempt"))
            continue
        yield from pending
        pending = [record]
    yield from pending


def _place(record: Record) -> tuple[int, int, int]:
    return (record.row, record.sample, record.turn)


def _merged(data: Path) -> Iterator[Record]:
    starts: list[tuple[int, int, Callable[[], Iterator[Record]]]] = []
    for part in parts(data):
        starts.append((_first_row(part), len(starts), partial(part_records, part)))
    for journal in journals(data):
        order = _journal_order(journal)
        if order:
            starts.append((order[0][0][0], len(starts), partial(_journal_records, journal, order)))
    starts.sort(key=lambda start: start[:2])
    heap: list[tuple[tuple[int, int, int], int, Record, Iterator[Record]]] = []
    while heap or starts:
        while starts and (not heap or starts[0][0] <= heap[0][0][0]):
            _, number, opened = starts.pop(0)
            _push(heap, number, opened())
        if heap:
            _, number, record, rest = heapq.heappop(heap)
            yield record
            _push(heap, number, rest)


def _push(heap: list[Any], number: int, stream: Iterator[Record]) -> None:
    record = next(stream, None)
    if record is not None:
        heapq.heappush(heap, (_place(record), number, record, stream))


def _first_row(part: Path) -> int:
    import pyarrow.parquet as pq

    with pq.ParquetFile(part) as file:
        column = file.schema_arrow.get_field_index("row")
        statistics = file.metadata.row_group(0).column(column).statistics
        return int(statistics.min)


def _journal_order(journal: Path) -> list[tuple[tuple[int, int, int], int, int]]:
    """Place, offset and length of each whole line, by place: a journal has 128 MB, its order 10 MB at most."""
    order, at = [], 0
    for line in _lines(journal):
        if is_whole(line):
            order.append((place_of(line), at, len(line)))
        at += len(line)
    return sorted(order)


def _journal_records(journal: Path, order: list[tuple[tuple[int, int, int], int, int]]) -> Iterator[Record]:
    with journal.open("rb") as file:
        for _, at, length in order:
            file.seek(at)
            yield _record.decode(plain(file.read(length)))


def part_records(part: Path) -> Iterator[Record]:
    """The records of a sealed file, in its order."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(part) as file:
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

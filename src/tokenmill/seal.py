"""Journal → Parquet: python -m tokenmill.seal JOURNAL PART [FD]. Written aside, re-read and counted, synced, renamed.

Rows are sorted by (row, sample, turn), of equal ones the newest first, so that an export in the prompts' order merges
parts instead of sorting them.
"""

import fcntl
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.core.records import Record
from tokenmill.store import is_whole, place_of, plain, sync_folder

GROUP_BYTES, GROUP_ROWS = 4 << 20, 4096
"""Of a row group, as journal lines: it takes ten times as much in memory while it is made. Short rows are many to a
group, or the file's footer would outweigh them."""

VERIFY_ROWS = 64
"""Read back at once: 8,000-token rows take 6 MB in Arrow's own form."""

NICE = 10
"""Half-way down: sealing has hours, the pump has milliseconds."""

_IDS = pa.list_(pa.int32())

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("sample", pa.int32()),
        ("turn", pa.int32()),
        ("row", pa.int64()),
        ("cohort", pa.int32()),
        ("digest", pa.string()),
        ("settings", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("prompt_ids", _IDS),
        ("output_ids", _IDS),
        ("text", pa.string()),
        ("reasoning", pa.string()),
        ("answer", pa.string()),
        ("parts", pa.list_(pa.int32(), 4)),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("reasoning_tokens", pa.int32()),
        ("repetition", pa.float64()),
        ("thinking", pa.bool_()),
        ("server", pa.string()),
        ("attempt", pa.int32()),
        ("started", pa.float64()),
        ("seconds", pa.float64()),
        ("accept_length", pa.float64()),
        ("labels", pa.list_(pa.string())),
        ("error", pa.string()),
    ]
)


Place = tuple[int, int, int, int, int]
"""Row, sample, turn of a journal line; where it begins and how long it is, in bytes."""

Row = TypeVar("Row")

_decode = msgspec.json.Decoder(Record)


def seal(journal: Path, part: Path, locked: int | None = None) -> int:
    """Returns the rows sealed. A line that is not whole goes to torn.bin beside the journal.

    `locked` is a descriptor of the journal that has its lock: nobody may write on into it meanwhile (store.recover).
    """
    with journal.open("rb") if locked is None else os.fdopen(locked, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _seal(file, journal, part)


def _seal(file: BinaryIO, journal: Path, part: Path) -> int:
    places: list[Place] = []
    bad, at = [], 0
    for line in file:
        if is_whole(line):
            places.append((*place_of(line), at, len(line)))
        elif line.strip():
            bad.append(line)
        at += len(line)
    if bad:
        with journal.with_name("torn.bin").open("ab") as torn:
            torn.writelines(bad)
    if not places:
        journal.unlink()
        return 0
    places.sort(key=lambda place: (*place[:3], -place[3]))  # of one id the newest first, as readers want it
    aside = part.with_name(f".{part.name}")
    with pq.ParquetWriter(aside, SCHEMA, compression="zstd") as writer:
        for group in groups(places, itemgetter(-1)):
            writer.write_table(to_table([_read(file.fileno(), at, size) for *_, at, size in group]))
    _verify(aside, len(places))
    with aside.open("rb") as written:
        os.fsync(written.fileno())
    aside.rename(part)
    sync_folder(part.parent)
    journal.unlink()
    return len(places)


def groups(rows: Iterable[Row], size: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Rows as they fit into row groups; `size` says a row's bytes."""
    group: list[Row] = []
    room = GROUP_BYTES
    for row in rows:
        bytes_ = size(row)
        if group and (room < bytes_ or len(group) == GROUP_ROWS):
            yield group
            group, room = [], GROUP_BYTES
        group.append(row)
        room -= bytes_
    if group:
        yield group


def _read(handle: int, at: int, size: int) -> Record:
    return _decode.decode(plain(os.pread(handle, size, at)))


def rows_of(part: Path) -> int:
    """The rows of a sealed file, as its footer has it."""
    return int(pq.read_metadata(part).num_rows)


def _verify(aside: Path, rows: int) -> None:
    """Reads every row group back: a part that cannot be read must never replace its journal."""
    with pq.ParquetFile(aside) as written:
        found = sum(batch.num_rows for batch in written.iter_batches(batch_size=VERIFY_ROWS))
    if found != rows:
        raise OSError(f"{aside} holds {found} rows of {rows}")


def to_table(records: list[Record]) -> pa.Table:
    """Records as Arrow columns; reasoning and answer are written out for readers that know nothing of `parts`."""
    columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in _PLAIN}
    for name in ("messages", "tools"):
        texts = [bytes(getattr(record, name)).decode() for record in records]
        columns[name] = [None if text == "null" else text for text in texts]
    for name in ("prompt_ids", "output_ids"):
        columns[name] = [_ids(getattr(record, name)) for record in records]
    columns["parts"] = [list(record.parts) for record in records]
    columns["labels"] = [list(record.labels) for record in records]
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in SCHEMA}, SCHEMA)


_RAW = {"messages", "tools", "prompt_ids", "output_ids", "parts", "labels"}
_PLAIN = [name for name in SCHEMA.names if name not in _RAW]


def _ids(raw: msgspec.Raw) -> "np.ndarray[Any, np.dtype[np.int32]] | None":
    data = bytes(raw)
    if data == b"null":
        return None
    # Read as int32, a greater number would become another id without a word; a row without ids is told of.
    ids = np.fromstring(data[1:-1].decode(), dtype=np.int64, sep=",")
    return ids.astype(np.int32) if ids.max(initial=0) <= np.iinfo(np.int32).max else None


def main(argv: list[str]) -> int:
    """Seals a journal at low priority."""
    os.nice(NICE)
    seal(Path(argv[0]), Path(argv[1]), *map(int, argv[2:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

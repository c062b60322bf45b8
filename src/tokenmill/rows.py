"""Rows of a data file or a folder of them, as a stream: .jsonl, .jsonl.zst, .parquet. What a row means is the reader's.

Row numbers count over all files, from 0; blank lines are no rows. A file that is damaged or cut off raises UsageError:
a shorter set, read in silence, would be a wrong one.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from tokenmill.errors import UsageError

MAX_LINE = 64 << 20
"""Bytes of one row. No model reads so much; without a limit a file without a newline would fill the memory."""

BLOCK = 1 << 16
"""Bytes read at once: larger buffers are mapped and unmapped at every turn, which takes longer than the reading."""

PARQUET_BATCH = 1024
"""Rows of a Parquet file taken out at once: a megabyte of usual prompts."""

OBJECT_BYTES = 1 << 20
"""Of such a batch, made Python objects at once: these take 10 to 20 times as much."""

Mask = npt.NDArray[np.bool_]

Block = tuple[int, int, list[bytes]]
"""The number of the first line (or record), the byte at which it begins in what is unpacked, and the lines: a generator
step a line would cost as much as its JSON."""


class Mark(NamedTuple):
    """A place in a plain file from which it can be read on: the row, the line and the byte that come first."""

    row: int
    line: int
    at: int


@dataclass
class Marks:
    """Where the blocks of a plain file begin, noted at its first reading: 24 bytes for each 64 KB. `end` is the row
    behind its last one, None while that is not known. What is appended later lies behind the last mark."""

    rows: "array[int]" = field(default_factory=lambda: array("Q"))
    lines: "array[int]" = field(default_factory=lambda: array("Q"))
    bytes: "array[int]" = field(default_factory=lambda: array("Q"))
    end: int | None = None

    def add(self, row: int, line: int, at: int) -> None:
        self.rows.append(row)
        self.lines.append(line)
        self.bytes.append(at)

    def before(self, row: int) -> Mark:
        """The last mark that is not behind this row."""
        place = bisect_right(self.rows, row) - 1
        return Mark(self.rows[place], self.lines[place], self.bytes[place])


class RawRow(NamedTuple):
    """One row as it stands: its place for messages, its bytes. A row longer than MAX_LINE is cut."""

    row: int
    place: str
    data: bytes


def files(path: Path) -> list[Path]:
    """The files of a set, in reading order; raises UsageError where there are none."""
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _reader(p) is not None)
        if not found:
            raise UsageError(f"{path} holds no .jsonl, .jsonl.zst or .parquet file")
        return found
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder")
    if _reader(path) is None:
        raise UsageError(f"{path}: not a .jsonl, .jsonl.zst or .parquet file")
    return [path]


def rows(
    path: Path, columns: tuple[str, ...], wanted: Mask | None = None, marks: Mapping[Path, Marks] | None = None
) -> Iterator[RawRow]:
    """All rows in order, or those where `wanted` is true; `columns` are the fields to read of a file with columns.

    With the `marks` of files, what lies between the rows that are wanted is not read."""
    number, end = 0, None if wanted is None else last(wanted) + 1
    for file in files(path):
        own = (marks or {}).get(file)
        place: Mark | None = Mark(number, 1, 0)
        while place is not None:
            number, line, at = place
            place = None
            for first, _, block in blocks(file, columns, line, at):
                if number == end:
                    return
                if wanted is not None and not wanted[number : number + len(block)].any():
                    number += sum(1 for data in block if data and not data.isspace())
                    if own is not None and (further := _further(own, wanted, number)) is not None:
                        number, place = further.row, further if further.row != own.end else None
                        break
                    continue
                for row_line, data in enumerate(block, first):
                    if number == end:
                        return
                    if data and not data.isspace():
                        if wanted is None or wanted[number]:
                            yield RawRow(number, f"{file.name}:{row_line}", data)
                        number += 1


def _further(marks: Marks, wanted: Mask, number: int) -> Mark | None:
    """The last mark before the next row that is wanted, the file's end where none of it is; None where that is not
    further on."""
    ahead = wanted[number:]
    row = number + int(ahead.argmax()) if len(ahead) else number
    if not len(ahead) or not wanted[row] or (marks.end is not None and row >= marks.end):
        return None if marks.end is None else Mark(marks.end, 0, 0)
    found = marks.before(row)
    return found if found.row > number else None


def marked(
    path: Path, columns: tuple[str, ...], marks: dict[Path, Marks], rows_so_far: Callable[[], int]
) -> Iterator[list[bytes]]:
    """The lines of all files by blocks, blank ones included; plain files get their marks meanwhile."""
    for file in files(path):
        own = Marks()
        if file.suffix == ".jsonl":
            marks[file] = own
        for line, at, block in blocks(file, columns):
            own.add(rows_so_far(), line, at)
            if len(block[0]) > MAX_LINE:
                marks.pop(file, None)  # it was cut: the next block may begin within it
            yield block
        own.end = rows_so_far()


def last(mask: Mask) -> int:
    """The last place at which it is true, -1 where none is."""
    found = mask.nonzero()[0]
    return int(found[-1]) if len(found) else -1


def blocks(file: Path, columns: tuple[str, ...], line: int = 1, at: int = 0) -> Iterator[Block]:
    """One file's lines by blocks, blank ones included; raises UsageError where it is damaged or cannot be read.

    A plain file may be read from this byte on, which begins this line."""
    reader = _reader(file)
    assert reader is not None, "files() lets only readable kinds through"
    try:
        yield from _read_jsonl(file, columns, line, at) if at else reader(file, columns)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error


def _reader(path: Path) -> Callable[[Path, tuple[str, ...]], Iterator[Block]] | None:
    if path.name.endswith(".jsonl"):
        return _read_jsonl
    if path.name.endswith((".jsonl.zst", ".jsonl.zstd")):
        return _read_zst
    return _read_parquet if path.suffix == ".parquet" else None


def _read_jsonl(path: Path, columns: tuple[str, ...], line: int = 1, at: int = 0) -> Iterator[Block]:
    with path.open("rb", buffering=0) as stream:
        stream.seek(max(at - 1, 0))
        if at and stream.read(1) != b"\n":
            raise UsageError(f"{path} was changed while it was being read: line {line} does not begin where it did")
        yield from _lines(iter(lambda: stream.read(BLOCK), b""), line, at)


def _read_zst(path: Path, columns: tuple[str, ...]) -> Iterator[Block]:
    try:
        yield from _lines(_unpack(path))
    except zstandard.ZstdError as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def _unpack(path: Path) -> Iterator[bytes]:
    """The bytes of all frames; a frame that does not end was not written or downloaded to its end."""
    frame = None
    with path.open("rb", buffering=0) as packed:
        while data := packed.read(BLOCK):
            while data:
                if frame is None:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                if not frame.eof:
                    break
                data, frame = frame.unused_data, None
    if frame is not None:
        raise UsageError(f"{path} is cut off: its last frame does not end")


def _lines(stream: Iterator[bytes], number: int = 1, at: int = 0) -> Iterator[Block]:
    """Whole lines, of which the first has this number and begins at this byte. A line that spans many blocks is put
    together once, not at every block."""
    begun, size, skipping, behind = list[bytes](), 0, False, at
    for block in stream:
        data = block.removeprefix(b"\xef\xbb\xbf") if behind == 0 else block
        behind += len(block)
        head, newline, tail = data.partition(b"\n")
        if not skipping:
            begun.append(head)
            size += len(head)
        if not newline:
            if size > MAX_LINE:
                yield number, at, [b"".join(begun)]
                begun, size, skipping = [], 0, True
            continue
        *whole, rest = tail.split(b"\n")
        yield number, at, [b"".join(begun), *whole]
        number += 1 + len(whole)
        begun, size, skipping, at = [rest], len(rest), False, behind - len(rest)
    if begun and not skipping:
        yield number, at, [b"".join(begun)]


def _read_parquet(path: Path, columns: tuple[str, ...]) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 1
    try:
        with pq.ParquetFile(path) as table:
            there = [name for name in table.schema_arrow.names if name in columns]
            for batch in table.iter_batches(batch_size=PARQUET_BATCH, columns=there):
                few = max(1, batch.num_rows * OBJECT_BYTES // max(OBJECT_BYTES, batch.nbytes))
                for at in range(0, batch.num_rows, few):
                    records = batch.slice(at, few).to_pylist()
                    yield (
                        number,
                        0,
                        [msgspec.json.encode({k: v for k, v in r.items() if v is not None}) for r in records],
                    )
                    number += len(records)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error

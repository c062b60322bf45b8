"""Rows of a data file or a folder of them, as a stream: .jsonl, .jsonl.zst, .parquet. What a row means is the reader's.

Row numbers count over all files, from 0; blank lines are no rows. A file that is damaged or cut off raises UsageError:
a shorter set, read in silence, would be a wrong one.
"""

from collections.abc import Callable, Iterator
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

Block = tuple[int, list[bytes]]
"""The number of the first line (or record), and the lines: a generator step a line would cost as much as its JSON."""


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


def rows(path: Path, columns: tuple[str, ...], wanted: Mask | None = None) -> Iterator[RawRow]:
    """All rows in order, or those where `wanted` is true; `columns` are the fields to read of a file with columns."""
    number, end = 0, None if wanted is None else last(wanted) + 1
    for file in files(path):
        for first, block in blocks(file, columns):
            if number == end:
                return
            if wanted is not None and not wanted[number : number + len(block)].any():
                number += sum(1 for data in block if data and not data.isspace())
                continue
            for line, data in enumerate(block, first):
                if number == end:
                    return
                if data and not data.isspace():
                    if wanted is None or wanted[number]:
                        yield RawRow(number, f"{file.name}:{line}", data)
                    number += 1


def last(mask: Mask) -> int:
    """The last place at which it is true, -1 where none is."""
    found = mask.nonzero()[0]
    return int(found[-1]) if len(found) else -1


def blocks(file: Path, columns: tuple[str, ...]) -> Iterator[Block]:
    """One file's lines by blocks, blank ones included; raises UsageError where it is damaged or cannot be read."""
    reader = _reader(file)
    assert reader is not None, "files() lets only readable kinds through"
    try:
        yield from reader(file, columns)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error


def _reader(path: Path) -> Callable[[Path, tuple[str, ...]], Iterator[Block]] | None:
    if path.name.endswith(".jsonl"):
        return _read_jsonl
    if path.name.endswith((".jsonl.zst", ".jsonl.zstd")):
        return _read_zst
    return _read_parquet if path.suffix == ".parquet" else None


def _read_jsonl(path: Path, columns: tuple[str, ...]) -> Iterator[Block]:
    with path.open("rb", buffering=0) as stream:
        yield from _lines(iter(lambda: stream.read(BLOCK), b""))


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


def _lines(stream: Iterator[bytes]) -> Iterator[Block]:
    """Whole lines. A line that spans many blocks is put together once, not at every block."""
    number, begun, size, skipping = 1, list[bytes](), 0, False
    for position, block in enumerate(stream):
        data = block.removeprefix(b"\xef\xbb\xbf") if position == 0 else block
        head, newline, tail = data.partition(b"\n")
        if not skipping:
            begun.append(head)
            size += len(head)
        if not newline:
            if size > MAX_LINE:
                yield number, [b"".join(begun)]
                begun, size, skipping = [], 0, True
            continue
        *whole, rest = tail.split(b"\n")
        yield number, [b"".join(begun), *whole]
        number += 1 + len(whole)
        begun, size, skipping = [rest], len(rest), False
    if begun and not skipping:
        yield number, [b"".join(begun)]


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
                    yield number, [msgspec.json.encode({k: v for k, v in r.items() if v is not None}) for r in records]
                    number += len(records)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error

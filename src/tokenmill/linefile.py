"""Files of lines that only grow: whole lines are appended and read, whatever death tore the last one."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

BLOCK = 1 << 18
"""Bytes read at once from the end backwards: a dozen long records, a thousand events."""

Row = TypeVar("Row")


def append(path: Path, line: bytes) -> None:
    """Adds a line; half a one that a death left at the end is not glued to it. Raises OSError."""
    with path.open("ab+") as out:
        out.write(b"\n" * _ends_torn(out) + line + b"\n")


def _ends_torn(file: BinaryIO) -> bool:
    if file.seek(0, 2) == 0:
        return False
    file.seek(-1, 2)
    return file.read(1) != b"\n"


def read(path: Path, decoder: "msgspec.json.Decoder[Row]", start: int = 0) -> Iterator[tuple[Row, int]]:
    """Whole rows from a byte offset on, each with the offset behind it; none where there is no file.

    What was torn is passed over, and a line that is being written is left for later.
    """
    try:
        data = path.open("rb")
    except OSError:
        return
    with data:
        data.seek(start)
        for line in data:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                yield decoder.decode(line), start
            except msgspec.DecodeError:
                continue


def backwards(file: BinaryIO, end: int | None = None) -> Iterator[tuple[bytes, Callable[[], int]]]:
    """The lines before byte `end`, or all, from the last to the first, each with a way to ask for its number.

    The last one may have no end. Not by mmap: a file that is cut meanwhile would end this process.
    """
    handle = file.fileno()
    at = os.fstat(handle).st_size if end is None else end
    read, stop = b"", 0  # from `at` on, and where the line ends that comes next
    while True:
        start = read.rfind(b"\n", 0, max(stop - 1, 0)) + 1
        if start == 0 and at > 0:
            size = min(BLOCK, at)
            at -= size
            block = os.pread(handle, size, at)
            read, stop = block + read[:stop], len(block) + stop
        elif stop == 0:
            return
        else:
            yield read[start:stop], partial(_number, handle, at + start)
            stop = start


def _number(handle: int, at: int) -> int:
    """Of the line that begins at a byte."""
    blocks = (os.pread(handle, min(BLOCK, at - begin), begin) for begin in range(0, at, BLOCK))
    return 1 + sum(block.count(b"\n") for block in blocks)

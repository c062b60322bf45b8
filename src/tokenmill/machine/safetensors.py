"""One safetensors file: what its header says, and whether its bytes bear that out. Reads the header, never the data.

The format: 8 bytes with the header's length, the header as JSON, then the tensors without a gap. So a whole file has
8 + header + the last tensor's end bytes, exactly. A file that was given its size first and never filled has the right
size, too: only the disk knows of the hole in it.
"""

import errno
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""

POINTER = b"version https://git-lfs"
"""How a git-lfs pointer begins: the text that stands for a file until it is fetched."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A weights file: its tensors' shapes by name, and what is wrong with it, empty where it is whole."""

    file: Path
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problem: str = ""


def read(file: Path) -> Shard:
    """A shard as its header tells of it; never raises."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if POINTER.startswith(start) and start:
                return Shard(file, problem="is a git-lfs pointer, not the weights")
            length = int.from_bytes(start, "little")
            if size < 8 or length > size:
                return Shard(file, problem=f"is cut off: {size} bytes")
            if length > LONGEST_HEADER:
                return Shard(file, problem=f"has no readable header: it would be {length} bytes long")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except FileNotFoundError:
        return Shard(file, problem="is missing" + (" (a dangling link)" if file.is_symlink() else ""))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return Shard(file, problem=f"has no readable header: {error}")
    if size != expected:
        return Shard(file, shapes, f"has {size} bytes, its header says {expected}")
    return Shard(file, shapes, hole_told(file))


def hole_told(file: Path) -> str:
    """What a hole in a file means, empty where it has none."""
    place = hole(file)
    return (
        ""
        if place is None
        else (
            f"has a hole from byte {place} on: room was made for it, and it was never written "
            "(or it is a sparse copy: cp --sparse=never makes a whole one)"
        )
    )


def hole(file: Path) -> int | None:
    """Where a file has its first hole; None where it has none or its file system does not tell.

    Fewer blocks than bytes may also be compression, so the file system is asked for the hole itself.
    """
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_blocks * 512 >= status.st_size:
                return None
            place = os.lseek(stream.fileno(), 0, os.SEEK_HOLE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO, errno.EOPNOTSUPP, errno.ENOSYS):
            return None
        raise
    return place if place < status.st_size else None

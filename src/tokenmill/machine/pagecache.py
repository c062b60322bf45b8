"""Whether a file's pages are in memory: what a download has just written is better read from there than again."""

import ctypes
import mmap
import os
from pathlib import Path

SHARE = 0.5
"""Of a file in memory, from which on it is read through the page cache."""

SAMPLES = 64
"""Stretches of a file that are asked about: one call over 4 GB would fill a megabyte of answers."""

STRETCH_PAGES = 16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def holds(path: Path) -> bool:
    """Whether half of a file or more is in memory; of a file that is not ours the kernel says yes. Reads nothing."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        size = os.fstat(handle).st_size
        with mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
            return _share(view, size) >= SHARE
    except (OSError, ValueError):
        return False  # empty, or a mount that cannot be mapped, which keeps nothing
    finally:
        os.close(handle)


def _share(view: mmap.mmap, size: int) -> float:
    pages = -(-size // mmap.PAGESIZE)
    anchor = ctypes.c_char.from_buffer(view)  # private and writable only because ctypes wants it so
    start = ctypes.addressof(anchor)
    answer = (ctypes.c_ubyte * STRETCH_PAGES)()
    seen = resident = 0
    for sample in range(min(SAMPLES, pages)):
        first = pages * sample // min(SAMPLES, pages)
        count = min(STRETCH_PAGES, pages - first)
        if _libc.mincore(start + first * mmap.PAGESIZE, count * mmap.PAGESIZE, ctypes.addressof(answer)) == 0:
            seen += count
            resident += sum(value & 1 for value in answer[:count])
    del anchor  # else the view could not be closed
    return resident / seen if seen else 0.0

"""A file system's speed, measured in at most three seconds on a path's own files; it reads, and changes nothing."""

import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK = 1 << 20
STREAMS = 16
"""Reads at once: enough to see whether they help, few enough for a local disk."""

MOST_FILES = 50
AGAIN_BYTES = 4 << 20
CACHED_TIMES = 4.0
"""A second read so many times as fast comes from the page cache: memory is 10 to 100 times as fast as a mount."""


@dataclass(frozen=True, slots=True)
class Probe:
    """`stat_ms` the median of a stat; MB/s of one cold stream and of several; `cached`: opened again, a file is read
    from memory. What could not be measured in time is 0.0 or, for stat_ms, infinite."""

    stat_ms: float = float("inf")
    read_mb_s: float = 0.0
    parallel_mb_s: float = 0.0
    cached: bool = False


def probe(path: Path, deadline_s: float = 3.0) -> Probe:
    """Measures on the largest file of a folder, or on the file; a mount that hangs costs the deadline, no more."""
    found = [Probe()]
    thread = threading.Thread(target=_measure, args=(path, deadline_s, found), daemon=True)
    thread.start()
    thread.join(deadline_s)
    return found[-1]


def _measure(path: Path, deadline_s: float, found: list[Probe]) -> None:
    try:
        files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if file.is_file()][:MOST_FILES]
        times = sorted(_stat_s(file) for file in files)
        if not times:
            return
        found.append(replace(found[-1], stat_ms=1000 * times[len(times) // 2]))
        largest = max(files, key=lambda file: file.stat().st_size)
        third = largest.stat().st_size // 3 // BLOCK * BLOCK
        speed, read = _read(largest, 0, max(third, BLOCK), deadline_s / 4)
        found.append(replace(found[-1], read_mb_s=speed))
        again, _ = _read(largest, 0, min(read, AGAIN_BYTES), deadline_s / 4, cold=False)
        found.append(replace(found[-1], cached=again > CACHED_TIMES * speed))
        found.append(replace(found[-1], parallel_mb_s=_parallel(largest, third, deadline_s / 4)))
    except OSError:
        pass  # whoever asked sees what was measured until then


def _stat_s(file: Path) -> float:
    began = time.perf_counter()
    file.stat()
    return time.perf_counter() - began


def _read(path: Path, start: int, size: int, budget_s: float, *, cold: bool = True) -> tuple[float, int]:
    """MB/s of one stream, and the bytes that it read."""
    handle = os.open(path, os.O_RDONLY)
    room = bytearray(BLOCK)
    done = 0
    try:
        if cold:
            os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while done < size and time.perf_counter() - began < budget_s:
            got = os.preadv(handle, [room], start + done)
            if not got:
                break
            done += got
        return done / 1e6 / max(time.perf_counter() - began, 1e-9), done
    finally:
        os.close(handle)


def _parallel(path: Path, start: int, budget_s: float) -> float:
    size = max(start * 2 // STREAMS // BLOCK, 1) * BLOCK
    done = [0] * STREAMS

    def stream(number: int) -> None:
        try:
            done[number] = _read(path, start + number * size, size, budget_s)[1]
        except OSError:
            pass

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(STREAMS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * budget_s)
    return sum(done) / 1e6 / max(time.perf_counter() - began, 1e-9)

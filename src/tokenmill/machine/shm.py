"""Segments of shared memory that dead processes left behind: named files in /dev/shm that nobody has open."""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenmill.machine import processes

SHM = Path("/dev/shm")

_OF_ENGINES = re.compile(r"psm_|sem\.|torch_|nccl-|vllm|sglang|sgl_|cuda\.shm|__KMP|mp-|loky|wnsm_|pymp-|shm_")
"""How Python's multiprocessing, torch, NCCL and the engines begin their names."""

_PID = re.compile(r"(?<![0-9A-Za-z])(\d{2,7})(?![0-9A-Za-z])")
"""The first number is the pid: torch_PID_random_count."""

_NAMED_BY_PID = re.compile(r"[A-Za-z_.-]*\d{2,7}(?:[_.-]\d+)*")


@dataclass(frozen=True, slots=True)
class Segment:
    """A leaked file: its size in bytes, the user that it belongs to, the pid in its name if there is one."""

    path: Path
    size: int
    owner: int
    pid: int | None = None


def leaked(root: Path = SHM) -> list[Segment]:
    """Files of ours that nobody has open or mapped, named as engines name theirs, or after a process that is dead.

    Never another user's, never one with a living process's number in its name, and never folders: staged models lie
    in folders. Processes of other containers cannot be seen.
    """
    candidates = {}
    for entry in os.scandir(root) if root.is_dir() else ():
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # it went meanwhile
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not ours or not (_OF_ENGINES.match(entry.name) or _NAMED_BY_PID.fullmatch(entry.name)):
            continue
        named = _PID.search(entry.name)
        pid = int(named[1]) if named else None
        if pid is None or processes.stat(pid) is None:
            segment = Segment(Path(entry.path), status.st_blocks * 512, status.st_uid, pid)
            candidates[status.st_dev, status.st_ino] = segment
    used = _in_use(root) if candidates else frozenset()
    return [segment for identity, segment in candidates.items() if identity not in used]


def _in_use(root: Path) -> frozenset[tuple[int, int]]:
    """Files below a folder that a process has open or mapped, as far as we may look."""
    prefix = os.fsencode(f"{root}/")
    found: set[tuple[int, int]] = set()
    for pid in processes.pids():
        found |= _identified(_mapped(pid, prefix) | _opened(pid, prefix))
    return frozenset(found)


def _mapped(pid: int, prefix: bytes) -> set[bytes]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return set()
    names = (line.partition(b"/")[2] for line in lines if b"/" in line)
    return {b"/" + name for name in names if (b"/" + name).startswith(prefix)}


def _opened(pid: int, prefix: bytes) -> set[bytes]:
    folder = f"/proc/{pid}/fd"
    found = set()
    try:
        for name in os.listdir(folder):  # noqa: PTH208  (pathlib would make an object of each)
            target = os.fsencode(os.readlink(f"{folder}/{name}"))  # noqa: PTH115
            if target.startswith(prefix):
                found.add(target)
    except OSError:
        pass  # it ended, or is another user's
    return found


def _identified(names: Iterable[bytes]) -> set[tuple[int, int]]:
    found = set()
    for name in names:
        try:
            status = os.stat(name)  # noqa: PTH116  (bytes)
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return found

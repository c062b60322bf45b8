"""Segments of shared memory: named files in /dev/shm, which outlive whoever made them.

`leaked` finds what looks like a dead process's; `remove` takes away what is provably one server's: what its processes
were seen to have open or mapped, or what bears the number of one of them. Never what anybody has open, never another
user's, never a folder: staged models lie in folders.
"""

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokenmill.machine import processes
from tokenmill.machine.processes import ProcessId

SHM = Path("/dev/shm")

_OF_ENGINES = re.compile(r"psm_|sem\.|torch_|nccl-|vllm|sglang|sgl_|cuda\.shm|__KMP|mp-|loky|wnsm_|pymp-|shm_")
"""How Python's multiprocessing, torch, NCCL and the engines begin their names."""

LEAST_FREE = 64 << 20
"""Bytes: what docker gives by itself, and what NCCL, torch and the engines' messages have been seen to die of."""

_PID = re.compile(r"(?<![0-9A-Za-z])(\d{2,7})(?![0-9A-Za-z])")
"""The first number is the pid: torch_PID_random_count."""

_NAMED_BY_PID = re.compile(r"[A-Za-z_.-]*\d{2,7}(?:[_.-]\d+)*")


ASKED = 3
"""Looks that ask who has a new segment, before it is somebody else's: it is made first and mapped then."""


class Claim(msgspec.Struct, frozen=True):
    """A segment that a server's process had open or mapped: by device, inode and name."""

    device: int
    inode: int
    name: str


@dataclass(frozen=True, slots=True)
class Claims:
    """What one server's processes have of the segments there are; `asked` counts the looks at those of nobody we know.
    Segments of before the server's start are no candidates."""

    mine: frozenset[Claim] = frozenset()
    before: frozenset[Claim] = frozenset()
    asked: Mapping[Claim, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """A file: its size in bytes, the user that it belongs to, the pid in its name if there is one."""

    path: Path
    size: int
    owner: int
    pid: int | None = None


def present(root: Path = SHM) -> frozenset[Claim]:
    """This user's segments."""
    return frozenset(Claim(status.st_dev, status.st_ino, path.name) for path, status in _files(root))


def claim(claims: Claims, pids: Iterable[int], root: Path = SHM) -> Claims:
    """What has come since the last look, and is open or mapped in one of these processes. Cheap where nothing is new:
    the maps of an engine's process have thousands of lines."""
    there = present(root)
    asked = {each: count for each, count in claims.asked.items() if each in there}
    fresh = {each for each in there - claims.before - claims.mine if asked.get(each, 0) < ASKED}
    if not fresh:
        return Claims(claims.mine & there, claims.before & there, asked)
    prefix = os.fsencode(f"{root}/")
    used: set[tuple[int, int]] = set()
    for pid in pids:
        used |= _identified(_mapped(pid, prefix) | _opened(pid, prefix))
    mine = {each for each in fresh if (each.device, each.inode) in used}
    asked |= {each: asked.get(each, 0) + 1 for each in fresh - mine}
    return Claims((claims.mine & there) | mine, claims.before & there, asked)


def remove(claims: Collection[Claim], dead: Iterable[ProcessId], root: Path = SHM) -> tuple[Segment, ...]:
    """Removes what a server that is gone left: its claims, and what bears the number of one of its dead processes and
    is no older than it. Returns what was removed."""
    born = {process.pid: process.start for process in dead if not processes.alive(process)}
    wanted = []
    for path, status in _files(root):
        pid = _pid_of(path.name)
        named = pid in born and processes.stat(pid) is None and status.st_ctime >= _moment(born[pid])
        if named or Claim(status.st_dev, status.st_ino, path.name) in claims:
            wanted.append((Segment(path, status.st_blocks * 512, status.st_uid, pid), (status.st_dev, status.st_ino)))
    used = _in_use(root) if wanted else frozenset()
    removed = []
    for segment, identity in wanted:
        if identity not in used:
            segment.path.unlink(missing_ok=True)
            removed.append(segment)
    return tuple(removed)


def _moment(ticks: int) -> float:
    """Ticks since boot as seconds since 1970, of which the kernel tells the boot's in whole seconds."""
    lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    booted = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return booted + ticks / os.sysconf("SC_CLK_TCK") - 1.0


def _files(root: Path) -> Iterable[tuple[Path, os.stat_result]]:
    """This user's plain files directly in the folder."""
    for entry in os.scandir(root) if root.is_dir() else ():
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # it went meanwhile
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            yield Path(entry.path), status


def _pid_of(name: str) -> int | None:
    """The number that an engine's segment bears, if it does."""
    named = _PID.search(name) if _OF_ENGINES.match(name) or _NAMED_BY_PID.fullmatch(name) else None
    return int(named[1]) if named else None


def short(root: Path = SHM) -> str:
    """In words, where too little is free for a server to start; empty where there is enough, or nothing is known."""
    try:
        status = os.statvfs(root)
    except OSError:
        return ""
    free = status.f_bavail * status.f_frsize
    return f"only {free >> 20} MB of {root} are free: a server may die of that" if free < LEAST_FREE else ""


def leaked(root: Path = SHM) -> list[Segment]:
    """Files of ours that nobody has open or mapped, named as engines name theirs, or after a process that is dead.

    Never another user's, never one with a living process's number in its name, and never folders: staged models lie
    in folders. Processes of other containers cannot be seen.
    """
    candidates = {}
    for path, status in _files(root):
        if not (_OF_ENGINES.match(path.name) or _NAMED_BY_PID.fullmatch(path.name)):
            continue
        pid = _pid_of(path.name)
        if pid is None or processes.stat(pid) is None:
            segment = Segment(path, status.st_blocks * 512, status.st_uid, pid)
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

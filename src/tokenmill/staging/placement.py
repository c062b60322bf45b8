"""Where a model is loaded from: where it lies, or a copy in RAM or on a local disk. `decide` is pure.

A copy pays only where the source is slow: a network or FUSE mount, unless a probe shows it to be as fast as a disk and
its pages to stay in memory, which seven servers then share.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from tokenmill.machine import copies, filesystems, memory
from tokenmill.machine.filesystems import Mount
from tokenmill.machine.probe import Probe
from tokenmill.plain import gigabytes

RAM_DISK = Path("/dev/shm")
RAM_RESERVE, RAM_RESERVE_PER_SERVER = 16 * 10**9, 8 * 10**9
"""Bytes of memory left for the servers' host side: 5 to 10 GB each while they load, and NCCL's and torch's own segments
in the same RAM disk."""

DISK_RESERVE = 10 * 10**9
ASKED_RESERVE = 10**9
"""Where the user names the folder, who knows what else needs room there."""

FAST_MB_S = 1000.0
"""One cold stream of a local NVMe disk reads 1 to 3 GB/s: 54 GB within a minute, which no copy would better."""

FAST_STAT_MS = 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where the model lies, and how fast that is; no probe where its kind says enough."""

    mount: Mount
    size: int
    probe: Probe | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A root for copies: `free` bytes may be filled, unused copies of ours counted in; `reserve` of them stay free."""

    root: Path
    what: str
    free: int
    reserve: int
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """`place` None: the model is loaded from where it lies."""

    place: Place | None
    why: str


def decide(source: Source, places: tuple[Place, ...]) -> Plan:
    """The rule of stage.to = "auto": only from a slow source, to the first place that has room."""
    kind, probe = source.mount.kind, source.probe
    if not source.mount.is_network:
        return Plan(None, f"{kind} is {'memory' if source.mount.is_ram else 'a local file system'}")
    if probe is not None and probe.read_mb_s >= FAST_MB_S and probe.stat_ms <= FAST_STAT_MS and probe.cached:
        return Plan(None, f"{kind} is a network mount, but reads {probe.read_mb_s:,.0f} MB/s and is kept in memory")
    why = f"{kind} is a network mount"
    if probe is not None and probe.read_mb_s:
        why += f" that reads {probe.read_mb_s:,.0f} MB/s, {probe.parallel_mb_s:,.0f} with several at once"
    found = roomy(source.size, places)
    if found is not None:
        return Plan(found, f"{why}; the {found.what} has room")
    return Plan(None, f"{why}, but there is no room: {rooms(source.size, places)}")


def roomy(size: int, places: tuple[Place, ...]) -> Place | None:
    """The first place that takes so many bytes and keeps its reserve."""
    return next((place for place in places if not place.slow and place.free - place.reserve >= size), None)


def rooms(size: int, places: tuple[Place, ...]) -> str:
    """Why no place will do, with values."""
    words = [
        f"the {place.what} {place.root} is a network mount itself"
        if place.slow
        else f"the {place.what} has {gigabytes(place.free)}, of which {gigabytes(place.reserve)} stay free"
        for place in places
    ]
    return f"{gigabytes(size)} are needed; " + ("; ".join(words) or "there is neither a RAM disk nor a local disk")


# -- readings ----------------------------------------------------------------------------------------------------------
def roots() -> tuple[Path, ...]:
    """Where copies go by themselves: the RAM disk, then the local cache."""
    disk = platformdirs.user_cache_path("tokenmill") / "models"
    return (RAM_DISK / f"tokenmill-{os.getuid()}", disk)


def places(servers: int, keep: str = "") -> tuple[Place, ...]:
    """The RAM disk where there is one, and the local disk. `keep` names the copy that is about to be made."""
    ram, disk = roots()
    found = []
    if filesystems.mount_of(RAM_DISK).is_ram:
        reserve = max(RAM_RESERVE, servers * RAM_RESERVE_PER_SERVER)
        found.append(Place(ram, "RAM disk", free(ram) + copies.evictable(ram, keep), reserve))
    slow = filesystems.mount_of(disk).is_network
    found.append(Place(disk, "local disk", free(disk) + copies.evictable(disk, keep), DISK_RESERVE, slow))
    return tuple(found)


def asked(root: Path, keep: str = "") -> Place:
    """The folder that the user names."""
    return Place(root, f"folder {root}", free(root) + copies.evictable(root, keep), ASKED_RESERVE)


def free(root: Path) -> int:
    """Bytes that may be written there; on a RAM disk, what memory and our control groups allow as well."""
    room = filesystems.free_bytes(root)
    return min(room, memory.available()) if filesystems.mount_of(filesystems.existing(root)).is_ram else room

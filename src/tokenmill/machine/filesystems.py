"""File systems: what a path really lies on, and whether it is local. From /proc/self/mountinfo and statvfs."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "gpfs", "wekafs"),
        *("9p", "virtiofs", "afs", "glusterfs", "orangefs", "pvfs2", "panfs", "coda"),
    }
)
LOCAL_FUSE = frozenset(["fuse.fuse-overlayfs", "fuse.ntfs", "fuseblk", "fuse.lxcfs", "fuse.snapfuse", "fuse.ntfs-3g"])
RAM = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: where it is mounted, its type, what is mounted there, its options (ro, noexec …)."""

    point: str
    kind: str
    source: str
    options: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def is_network(self) -> bool:
        """Network and FUSE file systems, but for the FUSE ones that are local by nature."""
        fuse = self.kind == "fuse" or self.kind.startswith("fuse.")
        return self.kind in NETWORK or (fuse and self.kind not in LOCAL_FUSE)

    @property
    def is_ram(self) -> bool:
        return self.kind in RAM


def parse(mountinfo: str) -> list[Mount]:
    """The mounts in a text in the form of /proc/self/mountinfo, in its order."""
    mounts = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if separator and len(fields) >= 5 and len(tail) >= 2:
            options = frozenset(fields[5].split(",")) if len(fields) > 5 else frozenset[str]()
            mounts.append(Mount(_decode(fields[4]), tail[0], _decode(tail[1]), options))
    return mounts


def _decode(text: str) -> str:
    """mountinfo writes spaces and such as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_mounts() -> str:
    """The kernel's own table of what is mounted where, for this process."""
    return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")


def mount_of(path: Path, mountinfo: str | None = None) -> Mount:
    """The mount that holds a path, its links resolved: the longest mount point that fits, the later one of equals."""
    text = read_mounts() if mountinfo is None else mountinfo
    real = os.path.realpath(path)
    best = Mount("/", "unknown", "")
    for mount in parse(text):
        inside = mount.point == "/" or real == mount.point or real.startswith(mount.point + "/")
        if inside and len(mount.point) >= len(best.point):
            best = mount
    return best


def free_bytes(path: Path) -> int:
    """Room that an ordinary user may fill on the file system of a path, or of its nearest existing parent."""
    place = existing(path)
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def existing(path: Path) -> Path:
    """The path itself or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder, links followed."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

"""Memory that may still be used: the least of what the kernel and every cgroup above us allow."""

from pathlib import Path

import psutil


def available() -> int:
    """Bytes of memory that can be taken without pushing anything out that is in use."""
    return max(0, min([int(psutil.virtual_memory().available), *_cgroup_room()]))


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Room under the limits of our control groups, v1 and v2; unreadable ones are passed over."""
    room = []
    for line in _read(membership).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            for folder in _up(root, path):
                room += _room(folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _up(root / "memory", path):
                files = (folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", folder / "memory.stat")
                room += _room(*files, "total_inactive_file")
    return room


def _up(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]


def _room(limit: Path, usage: Path, stat: Path, reclaimable: str) -> list[int]:
    limit_text, usage_text = _read(limit).strip(), _read(usage).strip()
    if not limit_text.isdigit() or not usage_text.isdigit():
        return []
    cached = next((int(line.split()[1]) for line in _read(stat).splitlines() if line.startswith(reclaimable + " ")), 0)
    return [int(limit_text) - int(usage_text) + cached]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

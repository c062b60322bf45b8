"""What room a machine has now: shared memory, memory, open files, and what takes shared memory away."""

import configparser
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from tokenmill.machine import memory, shm
from tokenmill.machine.shm import Segment

WANTED_FILES = 4096
"""16 servers with 256 requests each."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes: /dev/shm's size and what is free of it, memory that may be taken, memory of the machine; the highest
    allowed number of open files; the segments that dead processes left; what logind does with an ordinary user's
    shared memory at logout."""

    shm_total: int
    shm_free: int
    memory: int
    machine: int
    files: int
    leaked: list[Segment]
    removes_ipc: bool


def read() -> Room:
    """This machine's room now."""
    status = os.statvfs(shm.SHM)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Room(
        shm_total=status.f_blocks * status.f_frsize,
        shm_free=status.f_bavail * status.f_frsize,
        memory=memory.available(),
        machine=int(psutil.virtual_memory().total),
        files=WANTED_FILES if hard == resource.RLIM_INFINITY else hard,
        leaked=shm.leaked(),
        removes_ipc=removes_ipc(),
    )


def removes_ipc(root: Path = Path("/etc/systemd")) -> bool:
    """Whether systemd-logind removes an ordinary user's shared memory when they log out: it does unless told not to.

    Servers that outlive a login lose their segments then. Root's and system users' are spared.
    """
    if not root.is_dir() or os.getuid() < 1000 or not Path("/run/systemd/seats").exists():
        return False
    value = "yes"
    for file in (root / "logind.conf", *sorted((root / "logind.conf.d").glob("*.conf"))):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(file, encoding="utf-8")
            value = parser.get("Login", "RemoveIPC", fallback=value)
        except (configparser.Error, UnicodeDecodeError):
            continue
    return value.strip().lower() in ("yes", "true", "on", "1")

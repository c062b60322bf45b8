"""A file system's type by its magic number, as statfs(2) tells it: where mountinfo does not name it."""

import ctypes
import os
from pathlib import Path

MAGIC = {
    0x6969: "nfs",
    0x517B: "smbfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    0x01021997: "9p",
    0x73757245: "coda",
    0x47504653: "gpfs",
    0xAAD7AAEA: "panfs",
    0x0BD00BD0: "lustre",
    0x794C7630: "overlay",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
}
"""From include/uapi/linux/magic.h and the file systems' own sources."""

_ROOM = 256
"""Bytes for a struct statfs: 120 on 64-bit Linux, the type first."""


def kind_of(path: Path) -> str:
    """The type's name, "" for one that is not known or cannot be asked. Mounts what autofs promises."""
    libc = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(_ROOM)
    if libc.statfs(os.fsencode(path), room) != 0:
        return ""
    return MAGIC.get(int.from_bytes(room.raw[:8], "little") & 0xFFFFFFFF, "")

"""The run folder: can it be written, on a local disk, with room?"""

import os
from collections.abc import Iterator

from tokenmill.checks.base import Context, Finding
from tokenmill.machine import filesystems

MIN_ROOM = 2 * 10**9
"""Bytes free below which a run is not begun: it would stop within the hour, and a full disk harms other work, too."""


def check_output(context: Context) -> Iterator[Finding]:
    """The run folder can be written, lies on a local disk, and has room."""
    path = context.folder.path
    place = filesystems.existing(path)
    mount = context.mount_of(place)
    if not os.access(place, os.W_OK):
        yield Finding("output", "fail", str(path), f"{place} cannot be written", "correct output.dir")
    if mount.is_network:
        words = f"{place} lies on {mount.kind}: an append, a sync and a lock do not mean there what they say"
        yield Finding("output", "fail", str(path), words, "set output.dir to a local disk")
    room = filesystems.free_bytes(path)
    if room < MIN_ROOM:
        yield Finding(
            "output", "fail", str(path), f"only {room / 1e9:.1f} GB free", "set output.dir to a disk with room"
        )
    else:
        yield Finding("output", "ok", str(path), f"{room / 1e9:.0f} GB free on {mount.kind}")

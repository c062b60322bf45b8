"""The run folder: can it be written, on a local disk, with room?"""

import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.checks.base import Context, Finding
from tokenmill.machine import filesystems

MIN_ROOM = 2 * 10**9
"""Bytes free below which a run is not begun: it would stop within the hour, and a full disk harms other work, too."""


def check_output(context: Context) -> Iterator[Finding]:
    """The run folder can be written, lies on a local disk, and has room; so can its copy, on another disk."""
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
    if context.config.output.copy_to:
        yield from _check_copy(path, Path(context.config.output.copy_to))


def _check_copy(path: Path, target: Path) -> Iterator[Finding]:
    """A copy can be made. A missing folder fails: it may be a mount that is not there, with the run's copy in it."""
    if not target.is_dir():
        words = f"output.copy_to = {target} is no folder: is its mount there?"
        yield Finding("output", "fail", str(target), words, f"mount it, or: mkdir -p {target}")
        return
    if not os.access(target, os.W_OK):
        yield Finding("output", "fail", str(target), f"{target} cannot be written", "correct output.copy_to")
    if target.stat().st_dev == filesystems.existing(path).stat().st_dev:
        words = f"output.copy_to = {target} lies on the disk of the run folder: both are lost with it"
        yield Finding("output", "warn", str(target), words, "set output.copy_to to a mount that outlives this machine")
    status = os.statvfs(target)
    room = status.f_bavail * status.f_frsize
    if status.f_blocks and room < MIN_ROOM:  # a bucket has no size, and says 0
        yield Finding("output", "warn", str(target), f"only {room / 1e9:.1f} GB free for the copy", f"df -h {target}")

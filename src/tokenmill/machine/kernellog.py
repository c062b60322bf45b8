"""What the kernel said of GPUs since it booted: NVIDIA's Xid messages. /dev/kmsg keeps them until its ring is full."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEANINGS = {
    48: "a double-bit memory error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error: what used it was ended",
    95: "an uncontained memory error: all that ran on it was ended",
    154: "the driver asks for a recovery",
}
"""Xids that speak of the card and not of the program that ran on it (NVIDIA's Xid catalogue)."""

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")

MOST = 1 << 22
"""Bytes of log that are read: the ring is 128 KiB to a few MiB."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One message: the card's PCI address as domain:bus:device in lower case, the number, the rest of the line."""

    bus: str
    number: int
    words: str


def read(source: Path = Path("/dev/kmsg")) -> str | None:
    """The kernel's log; None where we may not read it (kernel.dmesg_restrict, a container)."""
    try:
        handle = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return b"".join(_records(handle)).decode("utf-8", "replace")
    finally:
        os.close(handle)


def _records(handle: int) -> Iterator[bytes]:
    """/dev/kmsg gives one record a read and EAGAIN at its end; a record that was overwritten meanwhile is EPIPE."""
    total = 0
    while total < MOST:
        try:
            record = os.read(handle, 8192)
        except BrokenPipeError:
            continue
        except OSError:
            return  # EAGAIN: that was the last one
        if not record:
            return
        total += len(record)
        yield record


def xids(log: str) -> list[Xid]:
    """The Xids that speak of a card's own trouble, in the log's order."""
    found = (Xid(address(match[1]), int(match[2]), match[3] or "") for match in _XID.finditer(log))
    return [xid for xid in found if xid.number in MEANINGS]


def address(bus: str) -> str:
    """A PCI address in one form: NVML writes 00000000:17:00.0, the kernel 0000:17:00."""
    domain, _, rest = bus.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest.partition('.')[0]}" if rest else bus.lower()

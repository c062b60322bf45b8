"""Processes by numbers and marks alone, with no proof of whose they are: by this the product's own proof is judged."""

import os
import signal
from collections.abc import Sequence

from tokenmill.machine.processes import MARK, dead, environment, pids, stat


def members(group: int, mark: str = "") -> list[int]:
    """The living processes of a group, and those that carry the mark in their environment: by numbers alone, with no
    proof of whose group it is."""
    needle = f"{MARK}={mark}\0".encode() if mark else b""
    found = []
    for pid in pids():
        status = stat(pid)
        if status is None or dead(pid, status.state):
            continue
        if status.group == group or (needle and needle in environment(pid)):
            found.append(pid)
    return found


def signal_all(targets: Sequence[int], number: signal.Signals) -> None:
    """Sends a signal to each pid; those that are gone by now are no error."""
    for pid in targets:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass

"""Processes: which are ours, which live, and how to end a whole group. Linux only (/proc).

A process is known by pid, start time (clock ticks since boot, field 22 of /proc/PID/stat) and boot id: a reused pid is
never taken for ours. A zombie counts as dead once its last thread has ended, since nobody may ever reap it. Which
processes belong to a server, and their end, is group.py's.
"""

import asyncio
import ctypes
import os
import resource
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

MARK = "TOKENMILL_SERVER"
"""In every server's environment: the server's nonce."""

NO_GROUP = -1
"""No group: its number is not known, as of a server that was only announced."""

KEEP_ENVIRONMENT = "SPT_NOENV"
"""Set, setproctitle leaves the environment alone. Engines name their processes with it, and it would write the name
over what /proc shows of their environment: the mark with it."""

_PR_SET_PDEATHSIG = 1

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessId(msgspec.Struct, frozen=True):
    pid: int
    start: int
    boot: str


class Stat(NamedTuple):
    """Fields of /proc/PID/stat: state is one letter, `start` in ticks since boot, `cpu_s` in seconds.

    `waited_s` is the processor time of children that it has reaped, `faults` are major ones, `resident` is in bytes,
    `status` is a zombie's as wait(2) gives it, 0 where we may not know.
    """

    state: str
    parent: int
    group: int
    start: int
    cpu_s: float
    waited_s: float
    faults: int
    resident: int
    status: int


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def content(path: str) -> bytes:
    """A small file of /proc, at most 4 KiB; empty where it is gone or not for us. Thousands are read: pathlib and text
    would take three times as long."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(handle, 4096)
    except OSError:  # it ended meanwhile
        return b""
    finally:
        os.close(handle)


def stat(pid: int) -> Stat | None:
    """None where there is no such process."""
    text = content(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text.rpartition(b")")[2].split()  # the name before it may hold anything
    return Stat(
        state=fields[0].decode("ascii"),
        parent=int(fields[1]),
        group=int(fields[2]),
        start=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        waited_s=(int(fields[13]) + int(fields[14])) / _TICKS,
        faults=int(fields[9]),
        resident=int(fields[21]) * _PAGE,
        status=int(fields[49]),
    )


def identify(pid: int) -> ProcessId | None:
    """A living process by what sets it apart from every other; None where there is none."""
    found = stat(pid)
    return ProcessId(pid, found.start, boot_id()) if found else None


def alive(process: ProcessId) -> bool:
    """Whether this very process lives: not a zombie, not a reused pid, not one of before the last boot."""
    found = stat(process.pid)
    same = found is not None and found.start == process.start and process.boot == boot_id()
    return found is not None and same and not dead(process.pid, found.state)


def lives(pid: int) -> bool:
    """Whether a process with that number lives here, whichever it is."""
    found = stat(pid)
    return found is not None and not dead(pid, found.state)


def dead(pid: int, state: str) -> bool:
    """Whether nothing of it runs any more. A zombie with threads is on its way out: it still holds its GPU's memory."""
    if state != "Z":
        return state == "X"
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1  # noqa: PTH208
    except OSError:
        return True


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  (os.listdir is 5 × faster)


def environment(pid: int) -> bytes:
    """NAME=value, each with a zero byte behind it; empty where it has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""


def describe(pid: int) -> str:
    """A process for a person: pid, its command, its user where /proc tells."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        words = ""
    return f"pid {pid} ({words[:120] or 'unknown command'})"


def spawn(
    argv: Sequence[str], env: Mapping[str, str], log: Path, mark: str, inherits: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a server in a session and group of its own, so that it can outlive us and be ended whole.

    `inherits` are descriptors that stay open in it, such as the lease of the model's copy.

    Its output goes to a file, never to a pipe: a full pipe blocks the server, a closed one kills it.
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={KEEP_ENVIRONMENT: "1", **env, MARK: mark},
            start_new_session=True,
            close_fds=True,
            pass_fds=inherits,
        )


class Pulse:
    """Whether one process lives, asked thousands of times a second: 1 µs, by its pidfd. Close it."""

    def __init__(self, process: ProcessId) -> None:
        self._poll = select.poll()
        try:
            self._handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._handle = -1
            return
        if alive(process):
            self._poll.register(self._handle, select.POLLIN)
        else:
            self.close()

    def beats(self) -> bool:
        return self._handle >= 0 and not self._poll.poll(0)

    def close(self) -> None:
        """From now on it does not beat."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


async def ended(process: ProcessId) -> None:
    """Returns when the process has ended, child or not; at once where it is gone already."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    try:
        if not alive(process):
            return
        readable = asyncio.Event()
        loop.add_reader(handle, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(handle)
    finally:
        os.close(handle)


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Sends a signal to this very process, never to another that has its pid by now; whether there was one."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # The handle is of whoever had the pid when it was opened: the start time, read after that, says who that was.
        found = stat(process.pid)
        if found is None or found.start != process.start:
            return False
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def die_with_parent() -> None:
    """Ends this process when the one that started it dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before that


def raise_open_files(wanted: int) -> int:
    """Raises the soft limit of open files to what is wanted or allowed; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = wanted if hard == unlimited else min(wanted, hard)
    if soft != unlimited and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return wanted if soft == unlimited else soft

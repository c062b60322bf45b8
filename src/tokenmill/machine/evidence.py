"""What a server's processes did between two moments: the evidence that a silent server is at work, or that it is not.

`between` is pure; `read` and `look_closer` read /proc. Nothing here decides: whether silence is a hang
is core/lifecycle's.

Weights that are mapped into memory come as growing resident memory and as threads in state D, with no read bytes,
hardly any processor time and, thanks to read-ahead, hardly a major fault. A thread that waits for a FUSE server in
read(2), open(2) or stat(2) is in state S like an idle one: only what it waits in tells.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.machine import processes
from tokenmill.machine.cards import CardUse
from tokenmill.machine.group import Members
from tokenmill.machine.processes import ProcessId, Stat

BURNING = 0.2
"""Share of a core that says that a server is at work: idle ones were seen at 0.02, compiling ones at 1 and more."""

SLEEPING = 0.05
"""Share of a core below which nothing is done: a poll of a parent that waits takes less, an import takes all of one."""

MOVING_MB_S = 1.0
"""Read, mapped or put on a card: idle servers read a few kilobytes a second, of pipes and pages."""

FAULTING = 1.0
"""Major faults a second: an idle server has none."""

CARD_BUSY = 5
"""Percent of the time in which some kernel ran: 0 on an idle card."""

_MOUNT_WAITS = (b"request_wait_answer", b"fuse_", b"__fuse_")
"""Where in the kernel a thread sleeps that waits for a FUSE server."""


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has used since its birth: processor time with that of its reaped children, major faults, bytes
    read through read(2) or from a disk; and its resident memory. Bytes and seconds."""

    cpu_s: float
    faults: int
    read: int
    resident: int


@dataclass(frozen=True, slots=True)
class Closer:
    """A closer look, which is dear: `waiting` are the threads that wait for a file system, by thread id, `lasting`
    those of them that do so for longer than a moment; `asleep` says that all threads sleep; `stopped`, that a signal
    has stopped some process. `runnable` are those that have a processor or wait for one, `starved` those found so twice
    though the server got next to nothing: others use the processors."""

    waiting: frozenset[int]
    asleep: bool
    stopped: bool = False
    lasting: frozenset[int] = frozenset()
    runnable: frozenset[int] = frozenset()
    starved: frozenset[int] = frozenset()

    @property
    def is_sure(self) -> bool:
        """Whether what was found was found twice: another look so soon would say the same."""
        return self.waiting == self.lasting and self.runnable == self.starved


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment. `cards` is None where they cannot be read or are not this server's alone."""

    at: float
    used: Mapping[ProcessId, Used]
    cards: CardUse | None = None
    closer: Closer | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What was done between two readings. `waiting` are threads that waited for a file system all the while, `starved`
    those that waited for a processor."""

    seconds: float
    cores: float
    faults_s: float = 0.0
    read_mb_s: float = 0.0
    grown_mb_s: float = 0.0
    waiting: int = 0
    starved: int = 0
    card_percent: int | None = None
    card_mb_s: float = 0.0

    @property
    def computes(self) -> bool:
        return self.cores > BURNING or (self.card_percent or 0) >= CARD_BUSY or self.card_mb_s >= MOVING_MB_S

    @property
    def loads(self) -> bool:
        """It reads files, or waits for them."""
        return self.waiting > 0 or self.faults_s >= FAULTING or self.mb_s >= MOVING_MB_S

    @property
    def is_idle(self) -> bool:
        return not self.computes and not self.loads and not self.starved

    @property
    def mb_s(self) -> float:
        """Megabytes a second that came from files. Mapped ones show as memory, others as bytes read and as memory."""
        return max(self.read_mb_s, self.grown_mb_s)

    def words(self, source: str = "the disk") -> str:
        """For a person; `source` is where the model is loaded from. Empty where nothing was done."""
        if self.is_idle:
            return ""
        if not self.computes and not self.loads:
            return f"waiting for a processor: it got {self.cores:.2f} cores, others use the rest"
        if not self.computes:
            return f"waiting for {source}: {self.mb_s:.0f} MB/s"
        parts = [f"{self.cores:.1f} cores"]
        if self.card_percent is not None:
            parts.append(f"GPU {self.card_percent} %")
        if self.mb_s >= MOVING_MB_S:
            parts.append(f"{self.mb_s:.0f} MB/s")
        return f"quiet but working: {', '.join(parts)}"


def between(before: Reading, after: Reading) -> Work:
    """What was done from one reading to the other; the two must not be of the same moment."""
    seconds = after.at - before.at
    kept = [(before.used[process], now) for process, now in after.used.items() if process in before.used]
    fresh = [now for process, now in after.used.items() if process not in before.used]
    # Once reaped, a child's time is its parent's as well: what was counted as the child's own is taken off again.
    gone = sum(used.cpu_s for process, used in before.used.items() if process not in after.used)
    cpu = sum(now.cpu_s - then.cpu_s for then, now in kept) - gone
    faults = sum(now.faults - then.faults for then, now in kept)
    read = sum(now.read - then.read for then, now in kept)
    # A new process has its parent's pages, and may be a copy of it: they are no growth.
    grown = sum(now.resident - then.resident for then, now in kept)
    cpu += sum(min(now.cpu_s, seconds) for now in fresh)
    cards = (before.cards, after.cards)
    moved = 0 if cards[0] is None or cards[1] is None else cards[1].memory - cards[0].memory
    return Work(
        seconds=seconds,
        cores=max(0.0, cpu) / seconds,
        faults_s=max(0, faults) / seconds,
        read_mb_s=max(0, read) / seconds / 1e6,
        grown_mb_s=max(0, grown) / seconds / 1e6,
        waiting=len(after.closer.lasting) if after.closer else 0,
        starved=len(after.closer.starved) if after.closer else 0,
        card_percent=after.cards.percent if after.cards else None,
        card_mb_s=max(0, moved) / seconds / 1e6,
    )


def confirmed(before: Closer | None, now: Closer, work: Work) -> Closer:
    """A closer look after an earlier one. One look may meet a thread in a moment's write to a log: it waits for longer
    where it is found again, or where something came meanwhile. So for a poll's moment on a processor."""
    now = replace(now, starved=now.runnable & before.runnable if before else frozenset())
    if work.faults_s > 0 or work.grown_mb_s > 0:
        return replace(now, lasting=now.waiting)
    return replace(now, lasting=now.waiting & before.waiting if before else frozenset())


# -- /proc -----------------------------------------------------------------------------------------------------------
def read(living: Sequence[ProcessId]) -> Mapping[ProcessId, Used]:
    """What each of these has used; those that are gone are left out."""
    found = {}
    for process in living:
        now = processes.stat(process.pid)
        if now is not None and now.start == process.start and not processes.dead(process.pid, now.state):
            found[process] = Used(now.cpu_s + now.waited_s, now.faults, _bytes_read(process.pid), now.resident)
    return found


def _bytes_read(pid: int) -> int:
    fields = dict(line.split(b": ") for line in processes.content(f"/proc/{pid}/io").splitlines())
    return max(int(fields.get(b"rchar", 0)), int(fields.get(b"read_bytes", 0)))  # nothing where we may not know


def look_closer(living: Sequence[ProcessId]) -> Closer:
    """Looks at every thread of these processes; some have hundreds."""
    waiting, runnable, asleep, stopped = set(), set(), True, False
    for process in living:
        for thread in _threads(process.pid):
            of_thread = f"/proc/{process.pid}/task/{thread}"
            state = processes.content(f"{of_thread}/stat").rpartition(b")")[2][1:2]
            if state == b"D" or (state == b"S" and processes.content(f"{of_thread}/wchan").startswith(_MOUNT_WAITS)):
                waiting.add(thread)
            elif state not in b"SIZX":  # empty where it has just ended
                asleep = False
                if state == b"R":
                    runnable.add(thread)
            stopped = stopped or state in (b"T", b"t")
    return Closer(frozenset(waiting), asleep and not waiting, stopped, runnable=frozenset(runnable))


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        return []


# -- children that died -----------------------------------------------------------------------------------------------
def abandoned(members: Members) -> tuple[tuple[ProcessId, Stat], ...]:
    """The dead children of a launcher that waits for them in vain; none as long as any other process is alive.

    Alive may only be ancestors of the dead, and the helper that Python's multiprocessing keeps beside every parent.
    """
    by_pid = {process.pid: found for process, found in (*members.living.items(), *members.zombies.items())}
    ancestors: set[int] = set()
    for found in members.zombies.values():
        parent = found.parent
        while parent in by_pid and parent not in ancestors:
            ancestors.add(parent)
            parent = by_pid[parent].parent
    orphaned = not ancestors & {process.pid for process in members.living}
    others = [process.pid for process in members.living if process.pid not in ancestors]
    if not members.zombies or orphaned or not all(map(_is_tracker, others)):
        return ()
    return tuple(members.zombies.items())


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # it has just ended


def ending_of(status: int) -> str:
    """How a child ended, from its status as wait(2) gives it."""
    code = os.waitstatus_to_exitcode(status & 0xFFFF) if status & 0x7F != 0x7F else 0
    return f"signal {-code}" if code < 0 else f"exit code {code}"

"""A server's processes: which are provably its own, and their end.

Ours is a process
- that is the server's main one, or was recorded as a member of it, by pid, start time and boot;
- that carries its mark in its environment;
- that descends from one of these, as long as they are there;
- that is in its group, as long as one of these is: a group's number is not given to another while anybody is in it.

So a number that was used again by somebody else is never taken for ours, and a child that left the group, or wrote over
its environment, is still found.
"""

import asyncio
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic

import msgspec

from tokenmill.machine import processes, threads
from tokenmill.machine.processes import MARK, NO_GROUP, ProcessId, Stat

FRESH_S = 5.0
"""Age of a reading of /proc that is good enough where nothing is ended: one serves many servers."""

POLL_S = 0.05
"""Between two looks at processes that are about to end."""

AGAIN_S = 1.0
"""Between two SIGKILLs: members may fork while they are ended."""


class Group(msgspec.Struct, frozen=True):
    """By what a server's processes are known. `seen` are those that were proved to be its own at an earlier look."""

    main: ProcessId
    number: int
    mark: str
    seen: tuple[ProcessId, ...] = ()


@dataclass(frozen=True, slots=True)
class Members:
    """A server's processes at one moment: `zombies` have no thread left, and wait to be reaped."""

    living: Mapping[ProcessId, Stat]
    zombies: Mapping[ProcessId, Stat]

    @property
    def all(self) -> tuple[ProcessId, ...]:
        return (*self.living, *self.zombies)


class Table:
    """All processes of this machine; read at most once in a while, for all servers alike. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stats: dict[int, Stat] = {}
        self._read_at = float("-inf")
        self._marks: dict[tuple[int, int], bytes] = {}

    def stats(self, fresh_s: float = 0.0) -> Mapping[int, Stat]:
        """Every process by pid, at most `fresh_s` seconds old."""
        with self._lock:
            if monotonic() - self._read_at > fresh_s:
                self._stats = {pid: found for pid in processes.pids() if (found := processes.stat(pid))}
                self._read_at = monotonic()
                alive = {(pid, found.start) for pid, found in self._stats.items()}
                self._marks = {key: mark for key, mark in self._marks.items() if key in alive}
            return self._stats

    def mark(self, pid: int, found: Stat) -> bytes:
        """A process's mark, empty where it has none. Read once: it is born with it, and may lose it."""
        key = (pid, found.start)
        if key not in self._marks:
            variables = processes.environment(pid).split(b"\0")
            name = f"{MARK}=".encode()
            self._marks[key] = next((each.removeprefix(name) for each in variables if each.startswith(name)), b"")
        return self._marks[key]


def look(group: Group, table: Table | None = None, fresh_s: float = 0.0) -> Members:
    """Its processes, now or at most `fresh_s` ago."""
    table = table or Table()
    stats = table.stats(fresh_s)
    boot = processes.boot_id()
    recorded = [each for each in (group.main, *group.seen) if each.boot == boot and each.pid in stats]
    known = {each.pid for each in recorded if stats[each.pid].start == each.start}
    mark = group.mark.encode()
    ours = known | {pid for pid, found in stats.items() if mark and pid not in known and table.mark(pid, found) == mark}
    ours |= _descendants(ours, stats)
    if group.number != NO_GROUP and any(stats[pid].group == group.number for pid in ours):
        ours |= {pid for pid, found in stats.items() if found.group == group.number}
        ours |= _descendants(ours, stats)
    identified = {ProcessId(pid, stats[pid].start, boot): stats[pid] for pid in sorted(ours)}
    zombies = {each: found for each, found in identified.items() if processes.dead(each.pid, found.state)}
    return Members({each: found for each, found in identified.items() if each not in zombies}, zombies)


def _descendants(ancestors: Iterable[int], stats: Mapping[int, Stat]) -> set[int]:
    children = defaultdict(list)
    for pid, found in stats.items():
        children[found.parent].append(pid)
    result: set[int] = set()
    todo = list(ancestors)
    while todo:
        fresh = [pid for pid in children[todo.pop()] if pid not in result]
        result.update(fresh)
        todo += fresh
    return result


async def end(group: Group, *, grace_s: float, verify_s: float) -> tuple[ProcessId, ...]:
    """Ends all its processes: SIGTERM, `grace_s` later SIGKILL, then waits until none lives.

    Returns those that live on after `verify_s` (stuck in a driver), none where all is well.
    """
    loop = asyncio.get_running_loop()
    left = await _living(group)
    if grace_s > 0 and left:
        for process in left:
            processes.send(process, signal.SIGTERM)
            processes.send(process, signal.SIGCONT)  # a stopped process cannot end in good order
        group, left = await _wait_gone(group, left, loop.time() + grace_s)
    deadline = loop.time() + verify_s
    while left and loop.time() < deadline:
        kill(left)
        group, left = await _wait_gone(group, left, min(deadline, loop.time() + AGAIN_S))
    return left


def kill(targets: Sequence[ProcessId]) -> None:
    """SIGKILL to each; those that are gone by now are no error."""
    for process in targets:
        processes.send(process, signal.SIGKILL)


async def _living(group: Group) -> tuple[ProcessId, ...]:
    """The environment of a process that hangs in a mount may not come: then those that are known already."""
    found = await threads.reading(lambda: look(group), None)
    return tuple(filter(processes.alive, (group.main, *group.seen)) if found is None else found.living)


async def _wait_gone(group: Group, left: tuple[ProcessId, ...], deadline: float) -> tuple[Group, tuple[ProcessId, ...]]:
    """Until all are gone, and nobody new is found; what was found is remembered, whatever becomes of its parents."""
    loop = asyncio.get_running_loop()
    while True:
        if any(map(processes.alive, left)) and loop.time() < deadline:
            await asyncio.sleep(POLL_S)
            continue
        group = msgspec.structs.replace(group, seen=(*group.seen, *(each for each in left if each not in group.seen)))
        left = await _living(group)
        if not left or loop.time() >= deadline:
            return group, left

"""The end of a server, and its proof: no process of it lives, its ports are free, its cards hold what they held before,
its segments of shared memory are gone. What did not come back is told, and left to whoever decides.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill import launch
from tokenmill.folder import ServerEntry
from tokenmill.machine import group, ports, processes, shm
from tokenmill.machine.cards import Cards, Held
from tokenmill.machine.processes import ProcessId
from tokenmill.machine.shm import Segment
from tokenmill.machine.threads import reading

VERIFY_S = 60.0
"""SIGKILL to given up: the driver tears a process down in seconds, not at once."""

MEMORY_POLL_S = 0.5
"""Between two looks at a card's memory."""


@dataclass(frozen=True, slots=True)
class HeldPort:
    """A port of the server that somebody listens on after its end; `holder` in words."""

    port: int
    holder: str

    def __str__(self) -> str:
        return f"port {self.port} is held by {self.holder}"


@dataclass(frozen=True, slots=True)
class Ending:
    """What is left of a server after its end: processes that cannot be ended, ports, cards' memory; `left` says it in
    words, empty where all came back. `removed` are the segments of shared memory that its dead processes had left.
    `others` says, in words, what strangers have taken of its cards meanwhile."""

    left: str = ""
    others: str = ""
    pids: tuple[ProcessId, ...] = ()
    ports: tuple[HeldPort, ...] = ()
    memory: tuple[Held, ...] = ()
    removed: tuple[Segment, ...] = ()

    @property
    def cleaned(self) -> str:
        """What was taken away, in words; empty where nothing was there."""
        if not self.removed:
            return ""
        size = sum(segment.size for segment in self.removed)
        amount = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
        segments = "segment" if len(self.removed) == 1 else "segments"
        return f"removed {len(self.removed)} shared memory {segments} ({amount}) that its dead processes left"


@dataclass(frozen=True)
class Sensors:
    """How the machine is read, for all servers of a node; a test hands in others."""

    table: group.Table = field(default_factory=group.Table)
    cards: Cards = field(default_factory=Cards)
    shm: Path = shm.SHM


async def end_server(
    entry: ServerEntry, run: Path, sensors: Sensors, *, grace_s: float, verify_s: float = VERIFY_S
) -> Ending:
    """Ends all processes of a server, removes what they left, and says what did not come back within `verify_s`."""
    loop = asyncio.get_running_loop()
    members = await reading(lambda: group.look(entry.processes).all, ())
    left = await group.end(entry.processes, grace_s=grace_s, verify_s=verify_s)
    if left:
        return Ending(await _words(pids=left), pids=left)
    deadline = loop.time() + verify_s
    await reading(lambda: remove_tmp(run, entry.index), None)
    dead = {*entry.members, *members, entry.process}
    removed = await reading(lambda: shm.remove(entry.segments, dead, sensors.shm), ())
    held = await reading(lambda: held_ports(entry), ())
    found = await _memory(entry, sensors.cards, deadline)
    memory = tuple(each for each in found if not each.others)
    others = await _words(memory=[each for each in found if each.others])
    return Ending(await _words(held=held, memory=memory), others, (), held, memory, removed)


async def _words(*, pids: Sequence[ProcessId] = (), held: Sequence[HeldPort] = (), memory: Sequence[Held] = ()) -> str:
    """The command line of a process that hangs in a driver may not come."""

    def words(describe: Callable[[int], str]) -> str:
        told = [f"cannot be ended: {', '.join(describe(each.pid) for each in pids)}"] if pids else []
        told += map(str, held)
        for each in memory:
            holders = ", ".join(map(describe, each.pids))
            told.append(f"{each}{f', held by {holders}' if holders else ''}")
        return "; ".join(told)

    return await reading(lambda: words(processes.describe), words("pid {}".format))


def remove_tmp(run: Path, index: int) -> None:
    """A server's TMPDIR, and the folder of all once it is empty."""
    folder = launch.tmp_folder(run, index)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        pass  # another server has its own there


async def _memory(entry: ServerEntry, cards: Cards, deadline: float) -> tuple[Held, ...]:
    """What its cards still hold, once nothing of it can be the server's own or the time is over."""
    loop = asyncio.get_running_loop()
    while held := await reading(lambda: cards.unreturned(entry.cards, entry.index, entry.gpu_bases), ()):
        if all(each.others for each in held) or loop.time() >= deadline:
            break
        await asyncio.sleep(MEMORY_POLL_S)
    cards.leave(entry.cards, entry.index)
    return held


def held_ports(entry: ServerEntry) -> tuple[HeldPort, ...]:
    """The ports of a server that cannot be bound, and who listens there."""
    block = range(entry.internal_port, entry.internal_port + ports.BLOCK) if entry.internal_port else ()
    held = []
    for port in (entry.port, *block):
        if port and not ports.is_free(port):
            holder = ports.listener(port)
            words = "a process that cannot be seen" if holder is None else processes.describe(holder)
            held.append(HeldPort(port, words))
    return tuple(held)

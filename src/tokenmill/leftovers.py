"""Servers of an earlier tokenmill on a run folder: which of them still live, and their end."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from tokenmill import launch
from tokenmill.ending import Ending, Sensors, end_server, remove_tmp
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.machine import group, processes
from tokenmill.supervise import STOP_GRACE_S


def survivors(folder: RunFolder) -> list[ServerEntry]:
    """The servers of a run folder of which any process still lives, whether state.json knows them or not."""
    table, known = group.Table(), folder.state().servers
    recorded = [entry for entry in known if is_alive(entry, table)]
    return recorded + _unrecorded(folder, {entry.nonce for entry in known}, table)


def _unrecorded(folder: RunFolder, known: Collection[str], table: group.Table) -> list[ServerEntry]:
    """Those that a damaged or deleted state.json does not tell: their mark and their TMPDIR say whose they are."""
    home, found = launch.tmp_folder(folder.path, 0).parent, dict[str, ServerEntry]()
    for pid, stat in sorted(table.stats(group.FRESH_S).items(), key=lambda each: each[1].start):
        nonce = table.mark(pid, stat).decode()
        if not nonce or nonce in known or nonce in found or processes.dead(pid, stat.state):
            continue
        variables = processes.environment(pid).split(b"\0")
        tmp = Path(os.fsdecode(next((each[7:] for each in variables if each.startswith(b"TMPDIR=")), b"")))
        main = processes.identify(pid)
        if tmp.parent == home and tmp.name.isdigit() and main is not None:
            own = stat.group if stat.group == pid else processes.NO_GROUP
            found[nonce] = ServerEntry("", int(tmp.name), main, own, 0, 0, "", nonce, {})
    return list(found.values())


def sweep(folder: RunFolder) -> None:
    """Removes the TMPDIR of servers that are gone: whoever ended them may have been killed before it came to that."""
    living = {entry.index for entry in survivors(folder)}
    for entry in folder.state().servers:
        if entry.index not in living:
            remove_tmp(folder.path, entry.index)


async def end_survivor(folder: RunFolder, entry: ServerEntry, *, grace_s: float = STOP_GRACE_S) -> Ending:
    """Ends what lives of a server of an earlier tokenmill."""
    others = (other for other in survivors(folder) if other.index != entry.index)
    shared = {card for other in others for card in other.cards}
    bases = tuple(None if card in shared else base for card, base in zip(entry.cards, entry.gpu_bases, strict=False))
    alone = replace(entry, gpu_bases=bases)
    return await end_server(alone, folder.path, Sensors(), grace_s=grace_s)


def is_alive(entry: ServerEntry, table: group.Table) -> bool:
    """Whether any process of a launched server still lives, its main one or one it left behind."""
    same_boot = entry.process.boot == processes.boot_id()
    return same_boot and bool(group.look(entry.processes, table, group.FRESH_S).living)


async def end(
    folder: RunFolder, entries: Sequence[ServerEntry], log: EventLog, *, grace_s: float = STOP_GRACE_S
) -> int:
    """Ends servers, all at once, and says of each what it was; returns how many have processes that cannot be ended.

    The folder must be owned: it forgets those that are gone, and only those.
    """

    async def one(entry: ServerEntry) -> bool:
        was = place(entry, [each.pid for each in group.look(entry.processes).living])
        ending = await end_survivor(folder, entry, grace_s=grace_s)
        if ending.pids:
            log.say("down", f"server {entry.name} {ending.left}", "error")
        else:
            words = "; ".join(filter(None, (f"server {entry.name} ended: {was}", ending.left, ending.others)))
            log.say("down", words, "warn" if ending.left else "info")
        return bool(ending.pids)

    stuck = await asyncio.gather(*map(one, entries))
    folder.write_servers(tuple(survivors(folder)), keep=folder.state().keep)
    return sum(stuck)


async def end_unadopted(
    folder: RunFolder, entries: Sequence[ServerEntry], say: Callable[[str, str, str], None], grace_s: float | None
) -> list[ServerEntry]:
    """Ends servers of an earlier tokenmill that this one was stopped before adopting; returns those that live on."""
    grace_s = STOP_GRACE_S if grace_s is None else grace_s
    endings = await asyncio.gather(*(end_survivor(folder, entry, grace_s=grace_s) for entry in entries))
    for entry, ending in zip(entries, endings, strict=True):
        say(
            "stop",
            f"server {entry.name} {ending.left or 'of an earlier start ended'}",
            "error" if ending.pids else "info",
        )
    return [entry for entry, ending in zip(entries, endings, strict=True) if ending.pids]


def kill(entries: Iterable[ServerEntry]) -> None:
    """SIGKILL to all that lives of these servers, at once; `end` verifies."""
    for entry in entries:
        group.kill(tuple(group.look(entry.processes).living))


def place(entry: ServerEntry, pids: Iterable[int]) -> str:
    """Where a server is, in words."""
    words = [f"pid {', '.join(map(str, pids))}", f"port {entry.port}" if entry.port else ""]
    return ", ".join(filter(None, words if entry.gpu in ("none", "") else [*words, f"GPU {entry.gpu}"]))

"""A run's servers, seen and ended from outside: `status` and `watch` look at them, `down` ends exactly them."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from tokenmill import configfile, events
from tokenmill.cluster import left
from tokenmill.config import rules_of
from tokenmill.core.efficiency import words as efficiency_words
from tokenmill.core.judge import Rules
from tokenmill.core.roll import found
from tokenmill.core.server import SERVING, State
from tokenmill.core.status import ENDED, NodeRow, PromptCounts, RunStatus, ServerStatus
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.events import EventLog
from tokenmill.folder import Owner, RunFolder, ServerEntry
from tokenmill.leftovers import end, kill, place, survivors, sweep
from tokenmill.machine import processes
from tokenmill.plain import duration, start_of, to_go
from tokenmill.steps import step_words
from tokenmill.supervise import STOP_GRACE_S
from tokenmill.untrusted import harmless
from tokenmill.view import KEPT, LINE_EVERY_S, View

LOOK_S = 0.5
"""Between two looks at a file or at a state, for a person who waits."""

APART_S = 0.2
"""Between two signals: two at once arrive as one."""

SILENT_S = 15.0
"""A living tokenmill renews status.json every second; older than this it is stopped, or its disk is."""


# -- which run ---------------------------------------------------------------------------------------------------------
def folder_of(path: Path | None) -> RunFolder:
    """The run folder that a person means: itself, its config, or, without any word, the one that is here.

    Raises UsageError where there is none or more than one, ConfigError.
    """
    if path is None:
        return _the_one_here(Path())
    if path.is_file() and not (path.name == "config.toml" and RunFolder(path.parent).state_file.exists()):
        folder = RunFolder(configfile.load(path).folder)
        if not folder.exists:
            raise UsageError(f"the run of {path} has not been started: there is no {folder.path}")
        return folder
    folder = RunFolder(path.parent if path.is_file() else path)
    if not folder.exists:
        raise UsageError(f"{path} is no run folder: it has no state.json", fix="ls runs   shows yours")
    return folder


def judge_of(path: Path, folder: RunFolder) -> Rules:
    """By which [judge] the records of a run that is named so are read: the config's that a person names, else that of
    the run's last start."""
    return rules_of(configfile.load(path if path.suffix == ".toml" else folder.config))


def _the_one_here(here: Path) -> RunFolder:
    """This folder, or the only run (else the only one that goes on) below runs/."""
    if RunFolder(here).exists:
        return RunFolder(here.resolve())
    found = [folder for path in sorted((here / "runs").glob("*")) if (folder := RunFolder(path)).exists]
    if not found:
        raise UsageError("which run? There is none in runs/ here", fix="name a run folder or its config")
    alive = [folder for folder in found if folder.owner() is not None or survivors(folder)]
    chosen = found if len(found) == 1 else alive
    if len(chosen) != 1:
        raise UsageError(f"which run? There are {', '.join(str(folder.path) for folder in found)}")
    return chosen[0]


# -- how it is ---------------------------------------------------------------------------------------------------------
def status_of(folder: RunFolder) -> RunStatus:
    """The live status of a run that has an owner; else what it left, with the servers that still live."""
    last = folder.status()
    owner = folder.owner()
    if owner is not None and last is not None:
        silent = time.time() - last.updated
        words = f"tokenmill {owner.command}, pid {owner.process.pid}, has not said anything for {duration(silent)}"
        return replace(last, message=last.message or words) if silent > SILENT_S else last
    entries = folder.state().servers
    living = {(entry.node, entry.index): entry for entry in (*survivors(folder), *left.servers(folder))}
    if last is None:
        servers = tuple(_left(entry, None) for entry in living.values())
        return RunStatus(folder.path.name, "stopped", PromptCounts(), servers, 0.0, None, None)
    known = {(server.node, server.index): server for server in last.servers}
    shown = [_left(entry, known.get(key)) for key, entry in living.items()]
    state = last.state if last.state in (*ENDED, "up") else "killed"
    if state == "up" and not entries:
        state = "stopped"  # by `down`
    if state == "up" or (state == "failed" and not entries):
        shown += [_lost(server) for key, server in known.items() if key not in living]
    shown.sort(key=lambda server: (server.node, server.index))
    nodes = left.rows(folder, last)
    return replace(last, state=state, servers=tuple(shown), tokens_per_s=0.0, eta_s=None, step=None, nodes=nodes)


def _left(entry: ServerEntry, known: ServerStatus | None) -> ServerStatus:
    """A server that lives on without its tokenmill, as it was last known."""
    return ServerStatus(
        node=entry.node,
        index=entry.index,
        gpu=entry.gpu,
        port=entry.port,
        pid=entry.process.pid,
        state=entry.state,
        phase=entry.phase,
        percent=known.percent if known and known.pid == entry.process.pid and entry.phase else 0.0,
        in_flight=0,
        capacity=known.capacity if known else 0,
        tokens_per_s=0.0,
        accept_length=known.accept_length if known else None,
        restarts=known.restarts if known else 0,
        last_error="",
    )


def _lost(server: ServerStatus) -> ServerStatus:
    """One that `up` left, or could not start."""
    error = "it has ended since" if server.state in SERVING else server.last_error
    state = State.FAILED.value if error else State.STOPPED.value
    return replace(server, state=state, pid=None, phase="", in_flight=0, tokens_per_s=0.0, last_error=error)


def status_lines(status: RunStatus) -> Iterator[str]:
    """As the reference scripts had it: n/N ready, then a line per server, what is wrong with it below."""
    counts = status.prompts
    ready = sum(server.state in SERVING for server in status.servers)
    servers = f", {ready}/{len(status.servers)} servers ready" if status.servers else ", no servers"
    nodes = f", {sum(node.state == 'ready' for node in status.nodes)}/{len(status.nodes)} nodes" if status.nodes else ""
    yield f"{status.run}: {status.state}{'' if status.state in ENDED else nodes}{servers}"
    if counts.total:
        more = f", {words}" if (words := to_go(status)) else ""
        yield f"  {counts.done:,}/{counts.total:,} done: {counts.verdicts}{more}"
    if words := efficiency_words(status.efficiency):
        yield f"  {words}"
    if status.copied:
        yield f"  the last whole copy is {duration(time.time() - status.copied)} old"
    if status.nodes:
        yield from _aligned([_node_row(node) for node in status.nodes], [_node_below(node) for node in status.nodes])
    below = [(words,) if (words := server.last_error or server.doing) else () for server in status.servers]
    yield from _aligned([_row(server) for server in status.servers], below)
    for whose, finding in found(status.nodes):
        yield f"  {whose}: {finding.kind}: {harmless(finding.text)}"
        if finding.fix:
            yield f"    fix: {finding.fix}"
    for finding in status.findings:
        yield f"  server {finding.server}: {harmless(finding.text)}"
        if finding.fix:
            yield f"    fix: {finding.fix}"
    if status.message:
        yield f"  {harmless(status.message, lines=True)}"


def _aligned(rows: Sequence[tuple[str, ...]], below: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns, each with its lines below it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, lines in zip(rows, below, strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield f"  {'  '.join(cells)}".rstrip()
        yield from (f"      {harmless(line)}" for line in lines)


def _node_row(node: NodeRow) -> tuple[str, ...]:
    return (
        f"node {node.node}",
        node.state,
        f"at {node.at}" if node.at else "",
        f"{node.ready}/{node.servers} servers" if node.servers else "",
        f"{node.in_flight}/{node.capacity} in flight, {node.tokens_per_s:,.0f} tok/s" if node.capacity else "",
        f"{node.records:,} records" if node.records else "",
        node.made_of,
    )


def _node_below(node: NodeRow) -> list[str]:
    """Why it is so, what it stages."""
    return [line for line in (node.note, step_words(node.step) if node.step else "") if line]


def _row(server: ServerStatus) -> tuple[str, ...]:
    doing = start_of(server)
    if server.in_flight or server.tokens_per_s:
        doing = f"{server.in_flight}/{server.capacity} in flight, {server.tokens_per_s:,.0f} tok/s"
    return (
        f"server {server.name}",
        server.state,
        f"port {server.port}" if server.port else "",
        f"pid {server.pid}" if server.pid else "",
        "" if server.gpu in ("none", "") else f"GPU {server.gpu}",
        doing,
        f"{server.restarts} restart{'s' * (server.restarts > 1)}" if server.restarts else "",
    )


def watch(folder: RunFolder, view: View, *, poll_s: float = 1.0) -> RunStatus:
    """Follows a run until it ends: its events as they come and how it is; returns the last status."""
    at = folder.events.stat().st_size if folder.events.exists() else 0
    view.recall(events.last(folder.events, KEPT, at))
    while True:
        for event, behind in events.read(folder.events, at):
            view.event(event)
            at = behind
        status = status_of(folder)
        view.show(status)
        if folder.owner() is None:
            return status
        time.sleep(poll_s)


# -- its end -----------------------------------------------------------------------------------------------------------
def down(folder: RunFolder, view: View, *, now: bool = False) -> int:
    """Asks a living owner to drain and exit (`now`: to cut), then ends the servers left, on a cluster's nodes, too,
    where it can be reached; returns how many have ended.

    Raises UsageError where the owner is stopped and cannot end, TokenmillError where a process cannot be ended.
    """
    known = survivors(folder)
    of_nodes = {entry.nonce for entry in left.servers(folder)}
    if (owner := folder.owner()) is not None:
        _ask(folder, owner, view, now=now)
        _wait_for(folder, owner, view)
    log = EventLog(folder.events, view.event)
    still = survivors(folder)
    nonces = {entry.nonce for entry in still}
    for entry in known:
        if entry.nonce not in nonces:
            log.say("down", f"server {entry.index} has ended with it: {place(entry, [entry.process.pid])}")
    if owner is None:
        left.end(folder, log)
    if folder.state().servers or still:
        _end_here(folder, folder, still, log, now=now)
    for own in left.nodes_here(folder).values():
        if own.owner() is None and (orphans := survivors(own)):
            _end_here(own, folder, orphans, log, now=now)
    of_nodes -= {entry.nonce for entry in left.servers(folder)}
    return len({entry.nonce for entry in known} | nonces | of_nodes)


def _end_here(own: RunFolder, run: RunFolder, entries: list[ServerEntry], log: EventLog, *, now: bool) -> None:
    """Ends servers that nobody watches; `own` is the folder that knows them."""
    with own.own("down"):
        sweep(own)
        stuck = asyncio.run(_end(own, entries, log, 0.0 if now else STOP_GRACE_S))
    if stuck:
        raise TokenmillError(f"{stuck} of {len(entries)} servers cannot be ended", fix="ps -o pid,stat,wchan:32,args")


def _ask(folder: RunFolder, owner: Owner, view: View, *, now: bool) -> None:
    if owner.command == "down":
        return view.say(f"tokenmill down, pid {owner.process.pid}, is at it")
    status = folder.status()
    is_draining = status is not None and status.state == "draining" and status.updated >= owner.since
    if is_draining and not now:
        return view.say(f"tokenmill {owner.command}, pid {owner.process.pid}, is draining; {_in_flight(folder)}")
    if owner.command == "up":
        view.say(f"asks tokenmill up, pid {owner.process.pid}, to exit")
    else:
        how = "cut what is in flight" if now else "end what is in flight"
        view.say(f"asks tokenmill {owner.command}, pid {owner.process.pid}, to {how} and exit")
        if not now:
            view.say(_in_flight(folder))
    os.kill(owner.process.pid, signal.SIGTERM)
    if now:
        time.sleep(APART_S)
        if processes.alive(owner.process):
            os.kill(owner.process.pid, signal.SIGTERM)
    return None


def _in_flight(folder: RunFolder) -> str:
    """What a drain waits for, and how long it may take."""
    status = folder.status()
    servers = status.servers if status else ()
    count = sum(server.in_flight for server in servers)
    rates = [server.tokens_per_s / server.in_flight for server in servers if server.in_flight and server.tokens_per_s]
    words = f"{count} completions in flight"
    if not count or not rates or not folder.config.exists():
        return words
    most = configfile.load(folder.config).generation.max_tokens
    return f"{words}; one of full length ({most:,} tokens) takes {duration(most / min(rates))}; --now cuts them"


def _wait_for(folder: RunFolder, owner: Owner, view: View) -> None:
    """Until the owner has ended. Ctrl-C ends the waiting, not the drain."""
    pid, began = owner.process.pid, time.monotonic()
    said = began
    try:
        while processes.alive(owner.process):
            status = processes.stat(pid)
            if status is not None and status.state in "Tt":
                words = f"tokenmill {owner.command}, pid {pid}, is stopped and cannot end"
                raise UsageError(words, fix=f"kill -CONT {pid}   lets it go on")
            if time.monotonic() - said >= LINE_EVERY_S:
                said = time.monotonic()
                view.say(f"after {duration(said - began)}: {_in_flight(folder)}")
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        view.say(f"tokenmill {owner.command}, pid {pid}, goes on to its end; tokenmill down --now {folder.path}   cuts")
        raise


async def _end(folder: RunFolder, entries: Sequence[ServerEntry], log: EventLog, grace_s: float) -> int:
    """As leftovers.end; Ctrl-C ends them without grace."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, kill, entries)
    try:
        return await end(folder, entries, log, grace_s=grace_s)
    finally:
        loop.remove_signal_handler(signal.SIGINT)

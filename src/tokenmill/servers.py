"""The servers alone: `up` starts them and leaves them, `status` and `logs` look at them, `down` ends exactly them."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from tokenmill import events
from tokenmill.config import Config
from tokenmill.core.server import SERVING
from tokenmill.core.status import PromptCounts, RunStatus, ServerStatus
from tokenmill.doctor import preflight
from tokenmill.errors import NoServerError, TokenmillError, UsageError
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.leftovers import end_servers, survivors
from tokenmill.machine import processes
from tokenmill.machine.logtail import LogTail
from tokenmill.node import LocalNode
from tokenmill.progress import Progress
from tokenmill.view import View, duration

LOOK_S = 0.5
"""Between two looks at a file or at a state, for a person who waits."""

APART_S = 0.2
"""Between two signals: two at once arrive as one."""


async def up(config: Config, view: View) -> int:
    """Starts the servers (adopting those that live), returns the number that are ready; they outlive it."""
    folder = RunFolder(config.folder)
    with folder.own("up"):
        log = EventLog(folder.events, view.event)
        progress = Progress(folder, view)
        living = survivors(folder)
        await preflight(config, folder, living, log, ("prompts",))
        node = LocalNode(config, folder, "", living)
        progress.state = "starting"
        trouble: list[TokenmillError] = []

        async def run_node() -> None:
            try:
                await node.run()
            except TokenmillError as error:
                trouble.append(error)

        running = asyncio.create_task(run_node())
        try:
            while not running.done() and not _settled(node):
                for event in (await node.results()).events:
                    log.add(event)
                progress.look(await node.status())
                progress.publish()
        finally:
            ready = sum(supervisor.server.state in SERVING for supervisor in node.supervisors)
            await node.stop(0.0, keep=True)
            await running
        progress.state = "up" if ready else "failed"
        progress.publish()
    if trouble:
        raise trouble[0]
    if ready < min(config.fleet.min_ready, len(node.supervisors)):
        raise NoServerError(
            f"only {ready} of {len(node.supervisors)} servers are ready", fix=f"tokenmill logs {folder.path}"
        )
    return ready


def _settled(node: LocalNode) -> bool:
    """Whether every server is ready or has failed for good."""
    states = [supervisor.server.state for supervisor in node.supervisors]
    return bool(states) and all(state in SERVING or state.value in ("failed", "quarantined") for state in states)


def folder_of(path: Path) -> RunFolder:
    """The run folder at a path; raises UsageError where there is none."""
    folder = RunFolder(path)
    if not folder.state_file.exists():
        raise UsageError(f"{path} is no run folder: it has no state.json", fix="ls runs   shows yours")
    return folder


def status_of(folder: RunFolder) -> RunStatus:
    """The live status of a run that has an owner; else what it left, with the servers that still live."""
    last = folder.status()
    if folder.owner() is not None and last is not None:
        return last
    servers = tuple(_left_server(entry) for entry in survivors(folder))
    if last is None:
        return RunStatus(folder.path.name, "stopped", PromptCounts(), servers, 0.0, None, None)
    known = last.state if last.state in ("done", "failed", "stopped", "up") else "killed"
    return replace(last, state=known, servers=servers, tokens_per_s=0.0, eta_s=None)


def _left_server(entry: ServerEntry) -> ServerStatus:
    return ServerStatus(
        node=entry.node,
        index=entry.index,
        gpu=entry.gpu,
        port=entry.port,
        pid=entry.process.pid,
        state=entry.state,
        phase=entry.phase,
        percent=0.0,
        in_flight=0,
        capacity=0,
        tokens_per_s=0.0,
        accept_length=None,
        restarts=0,
        last_error="",
    )


def status_lines(status: RunStatus) -> Iterator[str]:
    """As the reference scripts had it: n/N ready, then a line per server."""
    counts = status.prompts
    ready = sum(server.state in SERVING for server in status.servers)
    yield f"{status.run}: {status.state}, {ready}/{len(status.servers)} servers ready"
    if counts.total:
        done = counts.total - counts.pending
        verdicts = f"{counts.accepted:,} accepted, {counts.rejected:,} rejected, {counts.failed:,} failed"
        yield f"  {done:,}/{counts.total:,} done: {verdicts}"
    if status.copied:
        yield f"  the last whole copy is {duration(time.time() - status.copied)} old"
    for server in status.servers:
        words = [
            f"  server {server.index}",
            f"GPU {server.gpu}",
            f"port {server.port}",
            f"pid {server.pid}",
            server.state,
        ]
        if server.phase:
            words.append(f"{server.phase} {server.percent:.0f}%")
        if server.capacity:
            words.append(f"{server.in_flight}/{server.capacity} in flight, {server.tokens_per_s:,.0f} tok/s")
        if server.last_error:
            words.append(server.last_error)
        yield "  ".join(words)
    for finding in status.findings:
        yield f"  server {finding.server}: {finding.text}"
        if finding.fix:
            yield f"    fix: {finding.fix}"
    if status.message:
        yield f"  {status.message}"


def down(folder: RunFolder, view: View, *, now: bool = False) -> int:
    """Asks a living owner to drain and exit (`now`: to cut), then ends the servers left; returns their number."""
    owner = folder.owner()
    if owner is not None:
        how = "cut" if now else "drain"
        view.say(f"asks tokenmill {owner.command}, pid {owner.process.pid}, to {how} and exit")
        os.kill(owner.process.pid, signal.SIGTERM)
        if now:
            time.sleep(APART_S)
            if processes.alive(owner.process):
                os.kill(owner.process.pid, signal.SIGTERM)
        while processes.alive(owner.process):
            status = processes.stat(owner.process.pid)
            if status is not None and status.state in "Tt":
                words = f"tokenmill {owner.command}, pid {owner.process.pid}, is stopped and cannot end"
                raise UsageError(words, fix=f"kill -CONT {owner.process.pid}   lets it go on")
            time.sleep(LOOK_S)
    living = survivors(folder)
    if living:
        with folder.own("down"):
            asyncio.run(end_servers(folder, living, EventLog(folder.events, view.event)))
    return len(living)


def logs(folder: RunFolder, server: int | None, *, follow: bool, lines: int = 50) -> Iterator[str]:
    """The last lines of one server's log or of all, each with its server's number in front; then what comes."""
    paths = [folder.log(server)] if server is not None else sorted(folder.logs.glob("server-*.log"))
    paths = [path for path in paths if path.exists()]
    if not paths:
        raise UsageError(f"{folder.logs} holds no such log")
    tails = {path.stem.removeprefix("server-"): LogTail(path) for path in paths}
    for number, tail in tails.items():
        found = tail.read() if follow else [*tail.read(), *tail.rest]
        yield from (f"[{number}] {line}" for line in found[-lines:])
    while follow:
        time.sleep(LOOK_S)
        for number, tail in tails.items():
            yield from (f"[{number}] {line}" for line in tail.read())


def watch(folder: RunFolder, view: View, *, poll_s: float = 1.0) -> RunStatus:
    """Follows a run until it ends: its events as they come and its table; returns the last status."""
    at = folder.events.stat().st_size if folder.events.exists() else 0
    while True:
        for event, behind in events.read(folder.events, at):
            view.event(event)
            at = behind
        status = status_of(folder)
        view.show(status)
        if folder.owner() is None:
            return status
        time.sleep(poll_s)

"""`tokenmill up`: starts the servers alone, says what happens to them, and leaves them when they are ready.

What is left alone when it returns: servers that are ready, and those that ran before. Everything else it started ends
with it, since nobody would watch it.
"""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenmill.config import Config
from tokenmill.core.server import SERVING, State
from tokenmill.doctor import preflight
from tokenmill.errors import NoServerError, StoppedError, TokenmillError, UsageError
from tokenmill.events import EventLog, from_thread
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.leftovers import end, kill, survivors
from tokenmill.node import LocalNode
from tokenmill.progress import Progress, published
from tokenmill.steps import Told
from tokenmill.supervise import STOP_GRACE_S, Supervisor
from tokenmill.view import View

UP, INTERRUPTED = 0, 130

ENOUGH_RESTARTS = 2
"""Once min_ready servers are ready, `up` waits for another one no longer than to the end of its third life."""


class _Interrupts:
    """Ctrl-C and SIGTERM. The first ends `up`; the second does not wait for servers to end in good order: `ending`."""

    def __init__(self, log: EventLog, view: View) -> None:
        self.count = 0
        self.node: LocalNode | None = None
        self.ending: Sequence[ServerEntry] = ()
        self._log = log
        self._view = view

    def asked(self) -> bool:
        """Whether anybody wants it to end."""
        return self.count > 0

    def interrupt(self, number: signal.Signals) -> None:
        self.count += 1
        if self.node is None and self.count > 1:
            os._exit(INTERRUPTED)  # nothing runs yet that it started
        if self.count > 1:
            kill(self.ending)
        words = "" if self.node is None else ": servers that are ready go on, the others are ended"
        self._log.say("run", f"{number.name}{words}", "warn")

    def hang_up(self) -> None:
        self._view.detach()
        self._log.say("run", "SIGHUP: the terminal is gone; carrying on, output in run.log")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Takes the signals for the scope."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.interrupt, signal.SIGINT)
        loop.add_signal_handler(signal.SIGTERM, self.interrupt, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGHUP, self.hang_up)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)


def check_local(config: Config) -> None:
    """Raises UsageError for a cluster: whoever launches servers on other machines must stay to watch them."""
    if config.fleet.cluster != "local":
        words = f'up starts servers on this machine alone, and fleet.cluster = "{config.fleet.cluster}"'
        fix = "tokenmill run CONFIG   starts them on every machine; up CONFIG --set fleet.cluster=local   here alone"
        raise UsageError(words, fix=fix)


async def up(config: Config, view: View) -> int:
    """Starts the servers, adopting those that live; returns 0 or 130, raises NoServerError below min_ready."""
    folder = RunFolder(config.folder)
    with folder.own("up"):
        log = EventLog(folder.events, view.event)
        interrupts = _Interrupts(log, view)
        with interrupts.heard():
            return await _up(config, folder, log, Progress(folder, view), interrupts)


async def _up(config: Config, folder: RunFolder, log: EventLog, progress: Progress, interrupts: _Interrupts) -> int:
    living = survivors(folder)
    told = progress.told = Told(from_thread(lambda text: log.say("stage", text)))
    async with published(progress):
        await preflight(config, folder, living, log, ("prompts",), told)
    if interrupts.asked():
        return INTERRUPTED
    node = interrupts.node = LocalNode(config, folder, "", living)
    trouble: list[TokenmillError] = []

    async def run_node() -> None:
        try:
            await node.run()
        except TokenmillError as error:
            trouble.append(error)

    progress.state = "starting"
    running = asyncio.create_task(run_node())
    while not running.done() and not interrupts.asked() and not _settled(node):
        await _look(node, log, progress)
    await node.stop(0.0, keep=True)
    while not running.done():
        await _look(node, log, progress)
    await running  # a bug is raised here
    await _look(node, log, progress)
    ready = [supervisor for supervisor in node.supervisors if supervisor.server.state in SERVING]
    kept = {supervisor.entry.nonce for supervisor in ready if supervisor.entry} | {entry.nonce for entry in living}
    if unready := [entry for entry in survivors(folder) if entry.nonce not in kept]:
        interrupts.ending = unready
        await end(folder, unready, log, grace_s=0.0 if interrupts.count > 1 else STOP_GRACE_S)
    progress.state = "up" if ready else "stopped" if interrupts.asked() else "failed"
    if interrupts.asked() or any(isinstance(error, StoppedError) for error in trouble):
        failure = None
    else:
        failure = trouble[0] if trouble else _judge(config, folder, log, node.supervisors, len(ready))
    progress.message = "" if node.supervisors else str(failure or "")  # else the servers' own lines say it
    progress.look([await node.status()])
    progress.publish()
    if failure is not None or interrupts.asked():
        _say_kept(folder, log)
    if failure is not None:
        raise failure
    return INTERRUPTED if interrupts.asked() else UP


async def _look(node: LocalNode, log: EventLog, progress: Progress) -> None:
    for event in (await node.results()).events:
        log.add(event)
    progress.look([await node.status()])
    progress.publish()


def _settled(node: LocalNode) -> bool:
    """Whether every server is ready or lost; with min_ready of them ready, one that failed again and again is lost."""
    servers = [supervisor.server for supervisor in node.supervisors]
    enough = sum(server.state in SERVING for server in servers) >= _wanted(node.config, node.supervisors)
    return bool(servers) and all(
        server.state in SERVING
        or server.state in (State.FAILED, State.QUARANTINED)
        or (enough and server.state is State.BACKOFF and server.restarts >= ENOUGH_RESTARTS)
        for server in servers
    )


def _wanted(config: Config, supervisors: Sequence[Supervisor]) -> int:
    return max(1, min(config.fleet.min_ready, len(supervisors)))


def _say_kept(folder: RunFolder, log: EventLog) -> None:
    if left := survivors(folder):
        numbers = ", ".join(str(entry.index) for entry in left)
        log.say("run", f"server {numbers} goes on", fix=f"tokenmill down {folder.path}   ends what goes on")


def _judge(
    config: Config, folder: RunFolder, log: EventLog, supervisors: Sequence[Supervisor], ready: int
) -> NoServerError | None:
    """What is missing: an error below min_ready, else a warning."""
    missing = [supervisor for supervisor in supervisors if supervisor.server.state not in SERVING]
    if not missing:
        return None
    failures: dict[str, list[str]] = {}
    for supervisor in missing:
        failures.setdefault(str(supervisor.server.failure or "not ready"), []).append(supervisor.name)
    why = "; ".join(f"server {', '.join(names)}: {words}" for words, names in failures.items())
    known = (supervisor.server.failure.fix for supervisor in missing if supervisor.server.failure)
    fix = next(filter(None, known), f"tokenmill logs {folder.path} {missing[0].place.index}")
    words = f"{ready} of {len(supervisors)} servers are ready; {why}"
    if ready < _wanted(config, supervisors):
        return NoServerError(words if config.fleet.min_ready <= 1 else f"{words}; min_ready is not reached", fix=fix)
    log.say("run", words, "warn", fix)
    return None

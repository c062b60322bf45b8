"""The whole job, readable top to bottom: lock, what lives, doctor, accounts, node, gate, report.

A run is its folder: killed at any moment it loses at most the completions in flight, and started again it goes on. This
module owns the shutdown: whatever ends a run, its servers end with it, but for those that are to be kept.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tomli_w

from tokenmill import dataset, report, retry, settings
from tokenmill.backup import keeper
from tokenmill.cluster.base import Cluster, needs_ray
from tokenmill.cluster.local import Alone
from tokenmill.collect import Collector
from tokenmill.config import Config, shown
from tokenmill.configfile import load
from tokenmill.core.status import ENDED
from tokenmill.doctor import preflight
from tokenmill.environment import Census
from tokenmill.errors import ConfigError, GateError, TokenmillError, UsageError, boundary
from tokenmill.events import EventLog, from_thread
from tokenmill.explain import UNKNOWN, explain
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.leftovers import end, survivors, sweep
from tokenmill.node import LocalNode
from tokenmill.notify import notifying
from tokenmill.progress import STATUS_S, Progress, published
from tokenmill.resume import Accounts, resume
from tokenmill.shelf import STORE_PATIENCE_S
from tokenmill.steps import Told
from tokenmill.store import Store
from tokenmill.view import View
from tokenmill.web.exporter import exposed

DONE, INTERRUPTED = 0, 130


class Interrupts:
    """Ctrl-C and SIGTERM: the first lets what is in flight end, as `drain` says; the second cuts."""

    def __init__(self, config: Config, log: EventLog, progress: Progress) -> None:
        self.count = 0
        self.stop: Callable[[float | None], Awaitable[None]] | None = None
        self.finishing = False
        self._drain = config.fleet.drain
        self._log = log
        self._progress = progress
        self._tasks: set[asyncio.Future[None]] = set()

    def interrupt(self, number: signal.Signals) -> None:
        """What a signal does: drain at the first, cut at the second."""
        self.count += 1
        if self.finishing:
            self._hasten(number)
            return
        if self.stop is None:
            self._log.say("run", f"{number.name}: the run ends before generation has begun", "warn")
            if self.count > 1:
                os._exit(INTERRUPTED)  # nothing that this process started runs yet
            return
        if self.count == 1:
            words = f"{number.name}: {self._progress.in_flight} completions in flight may end; once more cuts them"
            grace_s = None if self._drain == "auto" else float(self._drain)
        else:
            words, grace_s = f"{number.name} again: cutting what is in flight, ending servers at once", 0.0
        self._progress.state = "draining"
        self._progress.publish()  # a second `down` must see that there is nothing to ask for
        self._log.say("run", words, "warn")
        task = asyncio.ensure_future(self.stop(grace_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hasten(self, number: signal.Signals) -> None:
        """Nothing is in flight any more: sealing and the report are short, the last copy may be left."""
        copying = self._progress.state in ENDED
        if not copying:
            words = "all that came is stored; sealing and the report take a moment"
        else:
            words = "leaves without the last copy" if self.count > 1 else "once more leaves without the last copy"
        self._log.say("run", f"{number.name}: {words}", "warn")
        if copying and self.count > 1:
            os._exit(INTERRUPTED)  # the copying process dies with this one


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be run. `command` is how a person would start it again, `skip` are doctor checks to leave out,
    `patience_s` how long answers are kept for a store that cannot be written, `retry` the words of --retry,
    `metrics_port` where Prometheus may look, None for nowhere."""

    config: Config
    command: str
    skip: tuple[str, ...] = ()
    patience_s: float = STORE_PATIENCE_S
    retry: tuple[str, ...] = ()
    metrics_port: int | None = None


@dataclass(frozen=True, slots=True)
class Desk:
    """What every step of a run reads from and writes to."""

    config: Config
    folder: RunFolder
    log: EventLog
    progress: Progress
    interrupts: Interrupts
    told: Told
    skip: tuple[str, ...] = ()


async def run(order: Order, view: View) -> int:
    """Runs a config to its end; returns 0 or 130, raises TokenmillError for everything else."""
    folder = RunFolder(order.config.folder)
    with folder.own("run"):
        log, progress = EventLog(folder.events, view.event), Progress(folder, view)
        told = progress.told = Told(from_thread(lambda text: log.say("stage", text)))
        desk = Desk(order.config, folder, log, progress, Interrupts(order.config, log, progress), told, order.skip)
        with exposed(order.metrics_port, lambda: progress.last), _signals(desk.interrupts, view, log):
            try:
                async with notifying(order.config, folder, log, progress) as notifier:
                    return await notifier.of(_run(desk, order), progress)
            except TokenmillError as error:
                progress.state, progress.message = "failed", str(error)
                if left := survivors(folder):
                    words = f"{len(left)} servers go on"
                    log.say("run", words, "warn", f"tokenmill down {folder.path}   ends them")
                raise
            finally:
                progress.publish()


async def _run(desk: Desk, order: Order) -> int:
    config, folder, log, progress = desk.config, desk.folder, desk.log, desk.progress
    sweep(folder)
    living = survivors(folder)
    async with published(progress):
        await preflight(config, folder, living, log, order.skip, desk.told)
        own = config
        if order.retry and folder.config.exists():  # what a retry is given is its own, and in settings.jsonl
            own = retry.of_run(_recorded(folder), config)
        folder.write_config(tomli_w.dumps(shown(own)))
        async with keeper.kept(config, folder, log, progress):
            return await _produce(desk, order, living)


def _recorded(folder: RunFolder) -> Config:
    """The run's own config, as the last start without --retry left it."""
    try:
        return load(folder.config)
    except ConfigError as error:
        raise UsageError(str(error), fix="`run` without --retry writes it anew") from error


async def _produce(desk: Desk, order: Order, living: list[ServerEntry]) -> int:
    """From the accounts to the report; returns 0 or 130."""
    config, folder, log, progress = desk.config, desk.folder, desk.log, desk.progress
    accounts = await resume(config, folder, log, desk.told, order.retry)
    census = Census(folder, log)
    await census.note_head(config, accounts.row.engine_version)
    progress.ledger, progress.gate = accounts.ledger, accounts.gate
    store = Store(folder.data, config.output.segment, lambda text, level: log.say("store", text, level))
    progress.store = store
    collector = Collector(accounts, store, folder, log, patience_s=order.patience_s)
    trouble: TokenmillError | None = None
    try:
        collector.check_cohorts()
        if collector.finished:
            log.say("run", "nothing to do" if accounts.retry else "every prompt has a record already")
            await _end_unneeded(desk, living, stopped=False)
        elif collector.alarm is not None or desk.interrupts.count:
            await _end_unneeded(desk, living, stopped=True)
        else:
            trouble = await _generate(desk, collector, accounts, living, census)
    finally:
        desk.interrupts.finishing = True
        finished = collector.finished
        progress.state = "sealing" if finished else "stopping"
        progress.publish()
        await store.close(seal=finished, tell=desk.told)
    collector.check_cohorts()  # the last cohort's size is known by now
    trouble = trouble or collector.failure or await _gate_error(collector, accounts, desk, order.command)
    if trouble is None and not finished and not desk.interrupts.count:
        trouble = _prompts_gone(config, accounts)
    await _settle(desk, accounts, collector)
    counts = accounts.ledger.counts()
    progress.state = "failed" if trouble else "done" if finished and not counts.pending else "stopped"
    progress.publish()  # the report and the copy tell of the end, too
    await _report(desk, accounts, trouble, order.command)
    if trouble is not None:
        raise trouble
    log.say("run", f"{progress.state}: {counts.verdicts}")
    return DONE if finished else INTERRUPTED


async def _settle(desk: Desk, accounts: Accounts, collector: Collector) -> None:
    """After the gate has judged: what a retry has not made counts as it was, and its end is noted if it is one."""
    retry, ledger, log = accounts.retry, accounts.ledger, desk.log
    if retry is None:
        return
    left = ledger.left
    if collector.finished:
        await asyncio.to_thread(settings.end_retry, desk.folder.data, retry.number)
    if left:
        stored = dataset.briefs(desk.folder.data)
        await asyncio.to_thread(ledger.settle, stored, accounts.rules, accounts.gate)
        words = f"retry {retry.number}: {left:,} completions were not made again; their older records go on counting"
        log.say("retry", words, "warn", "" if collector.finished else "start it again: it goes on where it is")
    if pending := ledger.counts().pending:
        log.say("retry", f"{pending:,} completions have no record yet: `run` without --retry makes them", "warn")


async def _report(desk: Desk, accounts: Accounts, trouble: TokenmillError | None, command: str) -> None:
    """A report that cannot be written is a pity, no more: the records are safe, and it can be written anew."""
    folder, total = desk.folder, accounts.ledger.counts().total
    ending = report.Ending(desk.progress.state, total, str(trouble or ""), command)
    try:
        with boundary("report"):
            await asyncio.to_thread(report.write, folder, ending, desk.told)
    except TokenmillError as error:
        desk.log.say("report", str(error), "warn", f"tokenmill report {folder.path}")


async def _generate(
    desk: Desk, collector: Collector, accounts: Accounts, living: list[ServerEntry], census: Census
) -> TokenmillError | None:
    """Runs the nodes until every prompt has its record or something ends them; returns their own trouble, if any."""
    cluster = _cluster(desk, accounts.row.id, living)

    async def stop(grace_s: float | None) -> None:
        cut_short = desk.interrupts.count or collector.failure is not None or collector.alarm is not None
        wanted = desk.config.fleet.keep_servers
        collector.draining = True
        await cluster.stop(grace_s, keep=wanted == "always" or (wanted == "stopped" and bool(cut_short)))

    collector.stop = desk.interrupts.stop = stop
    desk.progress.state = "starting"
    trouble: TokenmillError | None = None

    async def run_nodes() -> None:
        nonlocal trouble
        try:
            await cluster.run()
        except TokenmillError as error:
            trouble = error

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_nodes())
        collecting = tasks.create_task(collector.run(cluster))
        watching = tasks.create_task(_watch(cluster, desk.progress, census))
        await asyncio.wait([running, collecting])
        watching.cancel()
    desk.progress.look(await cluster.status())
    desk.interrupts.stop = None
    accounts.feed.close()
    return trouble


def _cluster(desk: Desk, settings: str, living: list[ServerEntry]) -> Cluster:
    """As fleet.cluster says."""
    if desk.config.fleet.cluster == "local":
        node = LocalNode(desk.config, desk.folder, settings, living)
        return Alone(node, node.run)
    with needs_ray():
        from tokenmill.cluster.ray import RayCluster
    return RayCluster(desk.config, settings, desk.log, desk.skip)


async def _watch(cluster: Cluster, progress: Progress, census: Census) -> None:
    while True:
        nodes = await cluster.status()
        census.note(nodes)
        if progress.state == "starting" and any(node.in_flight for node in nodes):
            progress.state = "generating"
        progress.look(nodes)
        progress.publish()
        await asyncio.sleep(STATUS_S)


def _prompts_gone(config: Config, accounts: Accounts) -> UsageError:
    words = (
        f"{accounts.ledger.left:,} prompts were not found again in {config.prompts.path}: it changed while it was read"
    )
    return UsageError(words, fix="start it again: it goes on where it is")


async def _gate_error(collector: Collector, accounts: Accounts, desk: Desk, command: str) -> GateError | None:
    if collector.alarm is None:
        return None
    if not collector.examples.by_label:
        await asyncio.to_thread(collector.examples.fill, desk.folder.data, accounts.rules)
    rows = settings.read(desk.folder.data)
    known = rows[-1].rendering if rows else UNKNOWN
    return GateError(explain(collector.alarm, collector.examples, desk.config, command, known))


async def _end_unneeded(desk: Desk, living: list[ServerEntry], *, stopped: bool) -> None:
    """Servers of an earlier start that this one has no use for, unless they are to be kept."""
    keep = desk.config.fleet.keep_servers
    if keep == "no" or (keep == "stopped" and not stopped):
        await end(desk.folder, living, desk.log)


@contextmanager
def _signals(interrupts: Interrupts, view: View, log: EventLog) -> Iterator[None]:
    """SIGINT and SIGTERM drain, then cut; SIGHUP means that the terminal is gone, and nothing else."""

    def hang_up() -> None:
        view.detach()
        log.say("run", "SIGHUP: the terminal is gone; carrying on, output in run.log")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupts.interrupt, signal.SIGINT)
    loop.add_signal_handler(signal.SIGTERM, interrupts.interrupt, signal.SIGTERM)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)

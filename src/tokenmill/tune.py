"""`tokenmill tune`: which speculation, how many at once, how much memory is fastest on this machine and these prompts.

One server at a time, each launched and supervised as a run does it, measured in a closed loop on the same prompts with
the run's own settings. Rounds: all setups once, then the better half again, in turn, until they are told apart or the
time is over. A setup that does not come up is a result with its cause. Nothing is written but to `…-tune`.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tokenmill import launch, plugins, prompts
from tokenmill.config import Config
from tokenmill.core import trials, variants
from tokenmill.core.speculation import has_head
from tokenmill.core.trials import Standing, Trial
from tokenmill.core.variants import ASPECTS, Setup
from tokenmill.doctor import preflight
from tokenmill.engines.base import Engine, normal
from tokenmill.errors import BadPromptError, NoServerError, PreflightError, StoppedError, TokenmillError, UsageError
from tokenmill.events import EventLog, from_thread
from tokenmill.folder import RunFolder
from tokenmill.leftovers import survivors
from tokenmill.machine import gpus, modelfiles, nvml, wholeness
from tokenmill.plain import duration
from tokenmill.planning import forecast as foretelling
from tokenmill.planning import lengths
from tokenmill.stage import stage
from tokenmill.steps import Tell
from tokenmill.trying import notes as noting
from tokenmill.trying import page
from tokenmill.trying.bench import Bench, Plan, Watch, serving
from tokenmill.trying.notes import Notes

DONE, INTERRUPTED = 0, 130

ROUNDS = 3
"""Each setup that stays in is started so often at most: the spread of three lives tells what a life is worth."""

FIRST_SHARE = 0.65
"""Of the time, for speculation, where concurrency is tried after it."""

PATIENCE = 8.0
"""Times the longest answer so far, that answers are waited for: speculation was seen six times slower than none."""

LEAST_PATIENCE_S = 10.0
"""Where answers take no time, a server may still hold its breath."""

OUT_OF_REACH = 0.5
"""Of the leader's slowest window: what is slower than that is told, and not measured any longer than the least."""

UNASKED = ("output", "room", "notify", "prompts", "capacity")
"""Checks of doctor that are a run's: tune stores nothing."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for. `only` are aspects; `write` is a file that is not there yet."""

    config: Config
    minutes: float = 15.0
    only: tuple[str, ...] = ASPECTS
    prompts: int = 256
    gpus: tuple[str, ...] = ()
    write: Path | None = None


@dataclass
class _Desk:
    """What the steps share: `notes` is kept after each trial."""

    order: Order
    config: Config
    engine: Engine
    folder: RunFolder
    log: EventLog
    tell: Tell
    watch: Watch
    messages: list[tuple[msgspec.Raw, msgspec.Raw]]
    notes: Notes
    seconds: float

    def keep(self, *fresh: Trial, setups: Sequence[Setup] = ()) -> None:
        """Raises PreflightError where the disk does not take it."""
        known = {setup.name for setup in self.notes.setups}
        more = tuple(setup for setup in setups if setup.name not in known)
        spent = self.order.minutes * 60 - self.watch.left_s
        self.notes = replace(
            self.notes, setups=self.notes.setups + more, trials=self.notes.trials + fresh, seconds=round(spent, 1)
        )
        try:
            noting.write(self.folder, self.notes)
        except OSError as error:
            raise PreflightError(f"{self.folder.path} cannot be written: {error.strerror}", fix="df -h") from error

    def found(self) -> list[Standing]:
        return trials.standings(self.notes.setups, self.notes.trials)


async def tune(order: Order, tell: Tell) -> page.Answer:
    """The whole of it. Raises StoppedError after Ctrl-C, NoServerError where no setup could be measured."""
    config = _one_server(order)
    _check_written(order.write)
    folder = noting.folder_of(config)
    engine: Engine = plugins.load("engines", config.engine.kind)()
    messages = await asyncio.to_thread(_messages, config, order.prompts)
    budget_s = order.minutes * 60
    with folder.own("tune"), page.spending(tell, budget_s) as spent:
        watch = Watch(lambda doing: spent(budget_s - watch.left_s, doing))
        with _signals(watch, tell):
            log = EventLog(folder.events)
            await preflight(config, folder, survivors(folder), log, UNASKED)
            staged = await asyncio.to_thread(stage, config, from_thread(tell), lambda: watch.stopping)
            try:  # its copy is in use from here on, so that each start finds it
                setups = await asyncio.to_thread(_first, config, engine, order.only)
                known = noting.read(folder, noting.asked(config, order.only, len(messages)))
                seconds = trials.measured_s(budget_s, 2 * len(setups))
                desk = _Desk(order, config, engine, folder, log, tell, watch, messages, known, seconds)
                _say_plan(desk, setups)
                watch.deadline = time.monotonic() + max(budget_s - known.seconds, 0.0)
                await _all(desk, setups)
            finally:
                staged.close()
        return _ended(desk)


def _check_written(file: Path | None) -> None:
    """Before the time is spent. Raises UsageError."""
    if file is None:
        return
    if file.exists() or file.is_symlink():
        raise UsageError(f"{file} is there already", fix="--write: another name")
    if not os.access(file.parent, os.W_OK):
        why = "cannot be written to" if file.parent.is_dir() else "is no folder"
        raise UsageError(f"{file}: {file.parent} {why}", fix="--write: a name in another folder")


def _say_plan(desk: _Desk, setups: Sequence[Setup]) -> None:
    order, known = desk.order, desk.notes
    if RunFolder(desk.config.folder).owner() is not None:
        desk.tell(f"{desk.config.folder} is going on: what its servers use is not there for what is measured")
    for line in page.plan(setups, order.minutes, desk.seconds, len(desk.messages), order.only):
        desk.tell(line)
    if known.trials:
        left = duration(max(order.minutes * 60 - known.seconds, 0.0))
        desk.tell(f"goes on where it was: {len(known.trials)} trials are known, {left} are left")


async def _all(desk: _Desk, setups: list[Setup]) -> None:
    later = set(desk.order.only) - {"speculation"}
    await _rounds(desk, setups, desk.watch.left_s * (1 - FIRST_SHARE) if later else 0.0)
    best = trials.winner(desk.found())
    if later and best is not None:
        more = await asyncio.to_thread(_wider, desk, best)
        fewer = variants.narrower(best.setup, best.width) if "concurrency" in desk.order.only else []
        await _rounds(desk, [best.setup, *more], 0.0, fewer)


def _ended(desk: _Desk) -> page.Answer:
    found = desk.found()
    best = trials.winner(found)
    if best is None:
        told = next((each for each in found if each.failure), None)
        try:
            noting.write(desk.folder, Notes(desk.notes.asked))  # the next start tries all of it again
        except OSError as error:
            desk.tell(f"{desk.folder.path} cannot be written: {error.strerror}; the next start knows these trials")
        raise NoServerError(
            f"no setup could be measured: {told.failure if told else 'the time was over'}",
            fix=told.fix or f"tokenmill logs {desk.folder.path}" if told else "--minutes: more",
        )
    verdict = (*trials.verdict(found), *_remarks(desk.notes))
    lines = page.lines(desk.config, best)
    desk.notes = replace(desk.notes, verdict=verdict, winner=best.setup.name, lines=lines)
    desk.keep()
    if desk.order.write is not None:
        try:
            desk.order.write.write_text(page.whole(desk.order.config, best), encoding="utf-8")
        except OSError as error:
            words = "; ".join(verdict)
            raise UsageError(
                f"{desk.order.write} cannot be written: {error.strerror}; {words}",
                fix=f"{desk.folder.path}/tune.json has the winner's lines",
            ) from error
    shown = tuple(replace(each, setup=noting.without_secrets(each.setup)) for each in found)
    return page.Answer(best.setup.name, verdict, lines, shown, desk.notes.seconds, str(desk.folder.path))


def _remarks(notes: Notes) -> Iterator[str]:
    """What the verdict cannot know: setups without a trial, and those that ran in one life and died in another."""
    tried = {trial.setup for trial in notes.trials}
    measured = {trial.setup for trial in notes.trials if trial.rates}
    yield from (
        f"{each.setup} also failed: {each.failure}" for each in notes.trials if each.failure and each.setup in measured
    )
    if left := [setup.name for setup in notes.setups if setup.name not in tried]:
        yield f"not tried, for want of time (--minutes: more): {', '.join(left)}"


# -- what is tried -----------------------------------------------------------------------------------------------------
def _one_server(order: Order) -> Config:
    config = order.config
    if config.engine.addresses:
        words = "tune starts servers itself, and engine.addresses names some that run already"
        raise UsageError(words, fix='engine.command, or another kind than "openai"')
    if config.fleet.cluster != "local":
        raise UsageError("tune measures one server, on this machine", fix='--set fleet.cluster="local"')
    args = {normal(name): value for name, value in config.engine.args.items()}
    fleet = config.fleet.model_copy(
        update={
            "servers": 1,
            "min_ready": 1,
            "restarts_per_hour": 0,
            "keep_servers": "no",
            "stagger": "off",
            **({"gpus": [int(card) if card.isdigit() else card for card in order.gpus]} if order.gpus else {}),
        }
    )
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"args": args}),
            "fleet": fleet,
            "generation": config.generation.model_copy(update={"samples": 1}),
        }
    )


def _first(config: Config, engine: Engine, only: Sequence[str]) -> list[Setup]:
    """The config as it is, then what is to be tried in its place."""
    args = config.engine.args
    here = variants.own(engine.kind, args)
    more = variants.speculative(engine.kind, args, own_head=_own_head(config)) if "speculation" in only else []
    return [here, *more]


def _own_head(config: Config) -> bool:
    model = Path(config.model.path)
    if not model.is_dir():
        return False
    try:
        told = modelfiles.read_json(model / "config.json")
        files = wholeness.read(model)
    except PreflightError:
        return False
    layers = {**told, **(told.get("text_config") or {})}.get("num_hidden_layers")
    return has_head({*files.index, *files.shapes}, layers)


def _wider(desk: _Desk, best: Standing) -> list[Setup]:
    """More at once or more memory, where the engine's own rule says that it helps."""
    config = _with(desk.config, best.setup)
    cards = gpus.choose(nvml.read(), config.fleet.gpus) if config.fleet.gpus != "none" else None
    version = launch.engine_version(config, desk.engine)
    told = foretelling.forecast(desk.engine, foretelling.given(config, cards, version))
    setup = best.setup
    if desk.engine.kind == "llamacpp" and "parallel" not in setup.args and "np" not in setup.args:
        setup = replace(setup, args={**setup.args, "parallel": best.width})
    return [each for each in variants.wider(desk.engine.kind, setup, told.levers) if each.aspect in desk.order.only]


def _messages(config: Config, count: int) -> list[tuple[msgspec.Raw, msgspec.Raw]]:
    """Evenly spread over the run's prompts, so that short and long ones come as in the run; raises UsageError."""
    rows = lengths.sample(Path(config.prompts.path), config.prompts.limit).rows
    found = []
    for row in rows[:: max(1, len(rows) // max(1, count))]:
        try:
            found.append(prompts.messages(row))
        except BadPromptError:
            continue  # doctor tells of them
    if not found:
        raise UsageError(f"{config.prompts.path}: no prompt of it can be used", fix="tokenmill doctor CONFIG")
    return found[:count]


def _with(config: Config, setup: Setup) -> Config:
    """The config with a setup's arguments; one that is to take more is not held back by the config's concurrency."""
    engine = config.engine.model_copy(update={"args": setup.args})
    changes: dict[str, object] = {"engine": engine}
    if setup.aspect in ("concurrency", "memory") and setup.share == 1.0:
        changes["generation"] = config.generation.model_copy(update={"concurrency": "auto"})
    return config.model_copy(update=changes)


# -- rounds ------------------------------------------------------------------------------------------------------------
async def _rounds(desk: _Desk, setups: Sequence[Setup], reserve_s: float, fewer: Sequence[Setup] = ()) -> None:
    """Measures all once, and those that stay in again. `fewer` are measured on the first one's server, after it;
    `reserve_s` of the time are left to others."""
    desk.keep(setups=[*setups, *fewer])
    names = {setup.name for setup in (*setups, *fewer)}
    going = list(setups)
    for number in range(1, ROUNDS + 1):
        for setup in going if number % 2 else reversed(going):
            done = [trial for trial in desk.notes.trials if trial.setup == setup.name]
            beside = fewer if setup == setups[0] and number == 1 else ()
            due = [each for each in (setup, *beside) if not _is_known(desk, each, number)]
            if not due:
                continue
            if beside and setup not in due:
                due.insert(0, setup)  # once more, in the same life as those that are held against it
            if not trials.is_affordable(setup.name, desk.notes.trials, desk.watch.left_s - reserve_s):
                if not done:
                    desk.tell(f"{setup.name}: not tried, no time is left")
                continue
            await _trial(desk, due, number)
        found = [each for each in desk.found() if each.setup.name in names]
        kept = {each.setup.name for each in trials.survivors(found)}
        again = {setup.name for setup in going if _deserves_another(desk, setup)}
        going = [setup for setup in going if setup.name in kept | again]
        if trials.settled(found) and not again:
            return


def _is_known(desk: _Desk, setup: Setup, number: int) -> bool:
    told = [trial for trial in desk.notes.trials if trial.setup == setup.name]
    return len(told) >= number or (any(trial.failure for trial in told) and not _deserves_another(desk, setup))


def _deserves_another(desk: _Desk, setup: Setup) -> bool:
    """The config as it is, which all are held against, where its only life ended after it had been ready: by bad luck,
    perhaps."""
    told = [trial for trial in desk.notes.trials if trial.setup == setup.name]
    return setup.as_is and len(told) == 1 and bool(told[0].failure) and told[0].start_s > 0


async def _trial(desk: _Desk, due: Sequence[Setup], number: int) -> None:
    """One life of a server: the setups in it differ by the requests in flight alone."""
    began = time.monotonic()
    first = due[0]
    bench = Bench(_with(desk.config, first), desk.folder, desk.messages, desk.watch)
    longest = max((trial.answer_s for trial in desk.notes.trials if trial.rates), default=0.0)
    best = trials.leader(desk.found())
    plan = Plan(
        desk.seconds,
        max(LEAST_PATIENCE_S, PATIENCE * longest) if longest else desk.watch.left_s,
        OUT_OF_REACH * best.low if best is not None else 0.0,
    )
    desk.watch.doing = f"{first.name}: starting"
    told: list[Trial] = []
    name = first.name
    try:
        async with serving(bench, first.name, desk.watch):
            for setup in sorted(due, key=lambda setup: setup.share):  # a slot more is filled at once, one less waits
                name, width = setup.name, max(1, round(bench.width * setup.share))
                desk.watch.doing = f"{name}: {width} at once"
                told.append(await bench.measure(name, number, width, plan))
    except StoppedError:
        raise
    except TokenmillError as error:
        why = bench.why()
        if desk.watch.left_s <= 0 and why is None:
            desk.tell(f"{name}: the time was over before it was measured")
        else:
            cause, fix = why or (str(error), error.fix)
            told.append(Trial(name, number, start_s=round(bench.start_s, 1), failure=cause, fix=fix))
    finally:
        for event in bench.events:
            desk.log.add(event)
        took = round((time.monotonic() - began) / max(1, len(told)), 1)
        desk.keep(*(replace(trial, seconds=took) for trial in told))  # what was measured before Ctrl-C, too
    for trial in told:
        desk.tell(_words(trial))


def _words(trial: Trial) -> str:
    if not trial.rates:
        return f"{trial.setup}: {trial.failure}"
    low, high = page.rate(min(trial.rates)), page.rate(max(trial.rates))
    accept = f", accept length {trial.accept:.2f}" if trial.accept else ""
    return f"{trial.setup}: {low} to {high} tok/s at {trial.width} at once{accept} (ready after {trial.start_s:.0f} s)"


@contextmanager
def _signals(watch: Watch, tell: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the server and then tune; the second does not wait for good order. A lost terminal is none
    of its business."""
    loop = asyncio.get_running_loop()
    ending: set[asyncio.Task[None]] = set()

    def stop(number: signal.Signals) -> None:
        if watch.stopping and watch.bench is not None:
            ending.add(asyncio.ensure_future(watch.bench.stop()))
        watch.stopping = True
        tell(f"{number.name}: ending the server; the same command goes on")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)

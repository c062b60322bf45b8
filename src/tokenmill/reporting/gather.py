"""Reads a run folder for its report: each file that can be read, and a sentence for each that cannot.

A report is asked for of runs that go on, that were killed and that were damaged: nothing here raises for what it finds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tokenmill import configfile, dataset, environment, events, history, settings
from tokenmill.config import Config, rules_of
from tokenmill.core.environment import Environment
from tokenmill.core.judge import Rules
from tokenmill.core.server import LIVE, SERVING
from tokenmill.core.status import ENDED
from tokenmill.errors import StoreError, TokenmillError
from tokenmill.events import Event
from tokenmill.folder import RunFolder
from tokenmill.history import Moment
from tokenmill.reporting import columns
from tokenmill.reporting.clock import Clock, clock
from tokenmill.reporting.columns import Columns, Floats, Row
from tokenmill.reporting.course import stays
from tokenmill.reporting.notices import Notices
from tokenmill.settings import Settings
from tokenmill.steps import Tell, counted

KINDS = frozenset({"state", "ready", "server"})
"""Events that say what servers did."""

STARTING_MOST_S = 3600.0
"""A start that took longer was none: its tokenmill had died, and the next event is of another day."""

STILL = 2 * history.EVERY_S
"""The run was on for so long after a line of history.jsonl, unless that says otherwise."""


@dataclass
class Gathered:
    """What a run folder holds. `unknown` are sentences, `happened` the events of servers; `moments` are time, state and
    whether any server had been started, of history.jsonl's lines."""

    folder: RunFolder
    config: Config | None
    config_text: str
    rules: Rules
    columns: Columns
    settings: list[Settings]
    environments: list[Environment]
    happened: list[Event]
    notices: Notices
    unknown: dict[str, None] = field(default_factory=dict)
    moments: list[tuple[float, str, bool]] = field(default_factory=list)

    def harmed(self, error: StoreError) -> None:
        """Takes down that a part cannot be read."""
        words = str(error).splitlines()[0].removesuffix(".")
        self.unknown[f"{words}: its rows are not in this report. The way out: {error.fix}"] = None

    def history(self) -> Iterator[Moment]:
        """The run's moments, read anew each time: of a run of weeks they are many."""
        return (moment for moment, _ in history.read(self.folder.history))

    def signs(self) -> Floats:
        """When servers are known to have been watched, in order: an answer was stored, or a moment told of them."""
        watched = [t for t, _, working in self.moments if working]
        return np.sort(np.concatenate([self.columns.ended, np.array(watched, dtype=np.float64)]))

    def clock(self) -> Clock:
        """When the run was on, by its records, its history and its starts."""
        found = self.columns
        timed = found.began > 0
        intervals = [(found.began[timed], found.ended[timed])]
        told = [(t, t + STILL * (state not in ENDED)) for t, state, _ in self.moments]
        while len(told) > 1 and told[-2][1] > told[-1][1]:
            told.pop(-2)  # the run was over before its last moment's time was
        moments = np.array(told, dtype=np.float64).reshape(-1, 2)
        intervals.append((moments[:, 0], moments[:, 1]))
        first = [
            (stay.began, stay.ended)
            for stay in stays(self.happened, 0.0, self.signs())
            if stay.state in LIVE - SERVING and stay.ended - stay.began < STARTING_MOST_S
        ]
        begun: Floats = np.array(first, dtype=np.float64).reshape(-1, 2)
        return clock([*intervals, (begun[:, 0], begun[:, 1])])


def gather(folder: RunFolder, tell: Tell) -> Gathered:
    """Everything that a report is made of, but for the texts of its examples. `tell` hears how far it is."""
    unknown: dict[str, None] = {}
    config = _config(folder, unknown)
    rules = rules_of(config) if config is not None else Rules()
    found = Gathered(
        folder=folder,
        config=config,
        config_text=_text(folder),
        rules=rules,
        columns=columns.read((), rules),
        settings=_settings(folder, unknown),
        environments=environment.read(folder.environment),
        happened=[],
        notices=Notices(),
        unknown=unknown,
    )
    for event, _ in events.read(folder.events):
        found.notices.add(event)
        if event.kind in KINDS:
            found.happened.append(event)
    stored = dataset.current(folder.data, Row, found.harmed)
    found.columns = columns.read(counted(stored, tell, "reading for the report:"), rules)
    found.moments = [
        (moment.t, moment.state, any(server.state != "pending" for server in moment.servers))
        for moment in found.history()
    ]
    _missing(found)
    return found


def _config(folder: RunFolder, unknown: dict[str, None]) -> Config | None:
    if not folder.config.exists():
        unknown["config.toml is missing: verdicts are those of the default [judge]"] = None
        return None
    try:
        return configfile.load(folder.config)
    except (TokenmillError, OSError, UnicodeDecodeError) as error:
        words = str(error).splitlines()[0]
        unknown[f"config.toml cannot be read ({words}): verdicts are those of the default [judge]"] = None
        return None


def _text(folder: RunFolder) -> str:
    try:
        return folder.config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _settings(folder: RunFolder, unknown: dict[str, None]) -> list[Settings]:
    try:
        return settings.read(folder.data)
    except (OSError, msgspec.DecodeError) as error:
        unknown[f"data/settings.jsonl cannot be read: {error}"] = None
        return []


def _missing(found: Gathered) -> None:
    """What the run folder does not hold, and what is therefore not told."""
    folder, unknown = found.folder, found.unknown
    if not folder.history.exists():
        unknown["history.jsonl is missing: how many slots were busy is not known"] = None
    if not folder.events.exists():
        unknown["events.jsonl is missing: nothing is known of servers' starts and losses, nor of warnings"] = None
    if found.columns.verdict.size and not found.settings:
        unknown["data/settings.jsonl holds no row: model, sampling and template are not known"] = None
    if found.columns.verdict.size and not found.environments:
        unknown["environment.jsonl is missing: what it ran on is not known"] = None
    if (folder.data / "torn.bin").exists():
        unknown["data/torn.bin holds lines that a death cut off: those completions were asked for again"] = None

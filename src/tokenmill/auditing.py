"""A node's eye on what its servers write: findings for a person, and the end of a server that has gone bad.

Such a server is given no more prompts; what is in flight may end for half a minute; then its supervisor is told, and
restarts it. Its rejected answers of the last 200 are generated anew, by whichever server is free: the old record counts
until the new one is stored, and if tokenmill is killed in between it simply stays. What still comes from it and is bad
is no record at all: the prompt goes to another server, uncharged.

Whether a server has gone bad is core/drift's and core/audit's to say.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from tokenmill.attempt import Lane
from tokenmill.config import Config, rules_of
from tokenmill.core import judge, speculation
from tokenmill.core import server as core
from tokenmill.core.audit import Audit, Expected, FindingKind
from tokenmill.core.drift import WINDOW, Judged, Rejects
from tokenmill.core.records import FAILURES, NULL, Again, Prompt, Record
from tokenmill.core.server import Failure, FailureKind
from tokenmill.core.status import Finding
from tokenmill.engines.base import normal
from tokenmill.errors import PreflightError
from tokenmill.events import Event, now
from tokenmill.generate import Pump
from tokenmill.machine import modelfiles

DRAIN_S = 30.0
"""What a sick server has in flight is mostly sick: it is not worth a long answer's minutes."""

FIX = "nvidia-smi -q   if it happens again: is the card sound? The second time, it is quarantined"

LOOK_S = 1.0
"""Between two looks at all findings."""

OVER = "no longer so"
"""Begins the text of the event by which a finding ends; what it was stands behind it."""


class Supervised(Protocol):
    """What is asked of a server's supervisor."""

    name: str

    def accept_reports(self) -> list[float]: ...
    def post(self, event: core.Event) -> None: ...


@dataclass(slots=True)
class _Life:
    """A server's time with prompts, from one lane to the next. `suspects`: bad records without their texts, each with
    its number among the life's answers. `failure` is set once it has gone bad, and told to its supervisor later."""

    lane: Lane
    answers: int = 0
    suspects: deque[tuple[int, Record]] = field(default_factory=deque)
    failure: Failure | None = None
    deadline: float = 0.0
    told: bool = False

    def suspect(self, record: Record) -> None:
        self.suspects.append((self.answers, replace(record, text="", prompt_ids=NULL, output_ids=NULL)))

    def recent(self) -> list[Record]:
        """The suspects among the last answers: those before were fine, or no worse than the others'."""
        while self.suspects and self.suspects[0][0] <= self.answers - WINDOW:
            self.suspects.popleft()
        return [record for _, record in self.suspects]


class Auditor:
    """`supervisors` may grow. `tell` takes events; `clock` is any growing time in seconds."""

    def __init__(
        self,
        config: Config,
        pump: Pump,
        supervisors: Sequence[Supervised],
        tell: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._pump = pump
        self._supervisors = supervisors
        self._tell = tell
        self._clock = clock
        self._attempts = config.generation.attempts
        self._sick = judge.BROKEN & rules_of(config).reject
        self._audit = Audit(expected(config.engine.args))
        self._rejects = Rejects()
        self._lives: dict[int, _Life] = {}
        self._gone_bad: dict[int, Finding] = {}
        self._again: list[Again] = []
        self._looked_at = 0.0

    def keep(self, record: Record) -> bool:
        """Takes in a record; whether it is one. A bad answer of a server that has gone bad is none."""
        lane = next((lane for lane in self._pump.lanes.values() if lane.name == record.server), None)
        if lane is None or not FAILURES.isdisjoint(record.labels):
            return True
        life = self._life(lane)
        bad = not self._sick.isdisjoint(record.labels)
        if life.failure is None:
            self._observe(life, record, bad)
        if bad and life.failure is not None:
            self._pump.offer([_prompt(record, record.attempt)])
            return False
        if bad:
            life.suspect(record)
            life.recent()
        return True

    def take_again(self) -> tuple[Again, ...]:
        """The records that are generated anew since the last call."""
        taken, self._again = tuple(self._again), []
        return taken

    def tick(self) -> None:
        """To be called a few times a second: ends servers that are drained, renews the findings."""
        moment = self._clock()
        for index in self._lives.keys() - self._pump.lanes.keys():
            del self._lives[index]
            self._audit.end(index)
        for life in self._lives.values():
            drained = not life.lane.in_flight or moment >= life.deadline
            if life.failure is not None and not life.told and drained:
                life.told = True
                self._supervisor(life.lane).post(core.Failed(life.failure))
        if moment - self._looked_at >= LOOK_S:
            self._looked_at = moment
            self._look(moment)

    def _look(self, moment: float) -> None:
        for lane in self._pump.lanes.values():
            self._life(lane)
            self._audit.report(lane.index, self._supervisor(lane).accept_reports())
        for server, cause in self._audit.fallen(moment):
            self._retire(self._lives[server], cause)
        self._renew((*self._gone_bad.values(), *self._audit.findings()))

    def _supervisor(self, lane: Lane) -> Supervised:
        """A lane's own: not by its index, since a card may be left out."""
        return next(supervisor for supervisor in self._supervisors if supervisor.name == lane.name)

    def _life(self, lane: Lane) -> _Life:
        life = self._lives.get(lane.index)
        if life is None or life.lane is not lane:
            life = self._lives[lane.index] = _Life(lane)
            self._gone_bad.pop(lane.index, None)
            self._rejects.begin(lane.index)
            self._audit.begin(lane.index, lane.name, tells=bool(lane.engine.probes(lane.spec).metrics))
        return life

    def _observe(self, life: _Life, record: Record, bad: bool) -> None:
        life.answers += 1
        self._audit.answer(life.lane.index, record.output_tokens, record.seconds, record.accept_length)
        answer = Judged(record.row, record.cohort, record.output_tokens, record.started, record.seconds, bad)
        drift = self._rejects.observe(life.lane.index, answer)
        if drift is not None:
            worst = Counter(label for _, old in life.suspects for label in old.labels if label in self._sick)
            labels = ", ".join(label for label, _ in worst.most_common(2))
            self._retire(life, f"{drift} ({labels})")

    # -- a server that has gone bad ----------------------------------------------------------------------------------
    def _retire(self, life: _Life, cause: str) -> None:
        """No new prompts for it, and its bad rows once more, elsewhere, while it drains."""
        if self._pump.draining or life.failure is not None:
            return
        lane = life.lane
        life.failure = Failure(FailureKind.DRIFT, f"it has gone bad: {cause}", FIX)
        life.deadline = self._clock() + DRAIN_S
        self._gone_bad[lane.index] = Finding(FindingKind.WENT_BAD.value, lane.name, life.failure.cause, FIX)
        self._pump.retire(lane)
        suspects = [record for record in life.recent() if record.attempt <= self._attempts]
        self._again += [_again(record) for record in suspects]
        self._pump.offer([_prompt(record, record.attempt + 1) for record in suspects])
        self._renew((*self._gone_bad.values(), *self._audit.findings()))
        if suspects:
            words = f"{len(suspects)} rejected rows of it are generated again, for the last time at attempt"
            self._tell(Event(now(), "audit", f"{words} {self._attempts + 1}", lane.name))

    def _renew(self, findings: tuple[Finding, ...]) -> None:
        """A finding is told when it begins and when it ends; its values may change meanwhile."""
        before = {(finding.kind, finding.server) for finding in self.findings}
        after = {(finding.kind, finding.server) for finding in findings}
        for finding in findings:
            if (finding.kind, finding.server) not in before:
                self._tell(Event(now(), finding.kind, finding.text, finding.server, "warn", finding.fix))
        for kind, server in sorted(before - after):
            self._tell(Event(now(), kind, f"{OVER}: {kind.replace('_', ' ')}", server))
        self.findings = findings


def expected(given: Mapping[str, Any]) -> Expected:
    """What engine.args ask for, with the draft model's class where its config.json can be read."""
    args = {normal(name): value for name, value in given.items()}
    algorithm = speculation.algorithm(args)
    draft, drafter = speculation.wanted(args), ""
    if draft is not None and draft.path:
        try:
            classes = modelfiles.read_json(Path(draft.path) / "config.json").get("architectures") or ()
        except PreflightError:
            classes = ()  # doctor has said so
        drafter = f"the drafter is a {classes[0]}, the flags say {algorithm}" if classes else f"drafter {draft.path}"
    elif draft is not None and draft.own_head:
        drafter = f"the flags say {algorithm} with the model's own head"
    return Expected(algorithm, speculation.longest(args), drafter)


def _prompt(record: Record, attempt: int) -> Prompt:
    """What was asked for, to be asked again."""
    return Prompt(
        record.key,
        record.sample,
        record.row,
        record.cohort,
        record.digest,
        record.messages,
        record.tools,
        record.turn,
        attempt,
    )


def _again(record: Record) -> Again:
    own = (record.key, record.sample, record.turn, record.cohort, record.attempt)
    return Again(*own, record.labels, record.output_tokens)

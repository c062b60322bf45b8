"""What a node does with a server that has gone bad: no prompts, an end in time, its bad rows once more."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.contract.pump_fakes import Scene, hangs, play, prompts, settle
from tests.unit.make import record
from tokenmill.auditing import DRAIN_S, OVER, Auditor
from tokenmill.configfile import validate
from tokenmill.core import server as core
from tokenmill.core.audit import LASTED_S
from tokenmill.core.records import Record
from tokenmill.core.server import FailureKind
from tokenmill.events import Event

SICK = ("repetition",)


@dataclass
class Supervised:
    """A supervisor's inbox."""

    name: str
    posted: list[core.Event] = field(default_factory=list)

    def accept_reports(self) -> list[float]:
        return []

    def post(self, event: core.Event) -> None:
        self.posted.append(event)


@dataclass
class Made:
    """An auditor on a pump with two servers, at a time that the test sets."""

    scene: Scene
    supervisors: list[Supervised] = field(default_factory=lambda: [Supervised("s1"), Supervised("s0")])
    told: list[Event] = field(default_factory=list)
    kept: list[Record] = field(default_factory=list)
    at: float = 0.0
    rows: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    def __post_init__(self) -> None:
        config = validate({"engine": {"kind": "fake"}, "prompts": {"path": "p"}}, "test")
        self.auditor = Auditor(config, self.scene.pump, self.supervisors, self.told.append, lambda: self.at)

    def supervised(self, index: int) -> Supervised:
        return next(one for one in self.supervisors if one.name == f"s{index}")

    def answer(self, server: str, *, bad: bool = False, seconds: float = 10.0, attempt: int = 1) -> bool:
        """An answer of 400 tokens on the next row; whether it is a record."""
        row = next(self.rows)
        made = record(
            f"k{row}",
            row,
            server=server,
            labels=SICK if bad else (),
            attempt=attempt,
            output_tokens=400,
            seconds=seconds,
            started=1e9 + row,
        )
        if kept := self.auditor.keep(made):
            self.kept.append(made)
        return kept

    def until_named(self, server: str = "s0", **fields: int) -> int:
        """Sound answers of both, then bad ones of one until it is named; returns how many of them are records."""
        for _ in range(60):
            assert self.answer("s0")
            assert self.answer("s1")
        count = 0
        while self.answer(server, bad=True, **fields):
            count += 1
            self.answer("s1" if server == "s0" else "s0")
            assert count < 60
        return count


def test_a_server_that_has_gone_bad_gets_no_prompts_and_is_ended_once_it_is_drained() -> None:
    async def scene() -> None:
        async with Scene() as pumped:
            lane = pumped.lane(0, hangs, capacity=2)
            made = Made(pumped)
            pumped.lane(1, hangs, capacity=2)
            pumped.pump.offer(prompts(4))
            await settle()
            count = made.until_named()
            made.auditor.tick()
            assert (lane.held, lane.in_flight, made.supervised(0).posted) == (True, 2, [])
            pumped.pump.resume(lane)
            assert lane.held, "a small generation that comes back is no excuse"
            made.at += DRAIN_S
            made.auditor.tick()
            made.auditor.tick()
            ((event),) = made.supervised(0).posted
            assert isinstance(event, core.Failed)
            assert event.failure.kind is FailureKind.DRIFT
            assert f"{count + 1} of its last" in event.failure.cause
            assert made.supervised(1).posted == []
            (finding,) = made.auditor.findings
            assert (finding.kind, finding.server) == ("server_went_bad", "s0")
            # In its next life all is forgotten.
            pumped.pump.close(0)
            made.at += 1.0
            made.auditor.tick()
            assert list(made.auditor.findings) == [finding]
            pumped.lane(0, hangs, capacity=2)
            made.at += 1.0
            made.auditor.tick()
            assert list(made.auditor.findings) == []
            assert [(e.kind, e.server) for e in made.told if e.text.startswith(OVER)] == [("server_went_bad", "s0")]
            assert made.answer("s0", bad=True)

    play(scene())


def test_its_bad_rows_are_offered_again_and_what_still_comes_from_it_is_no_record() -> None:
    async def scene() -> None:
        async with Scene() as pumped:
            pumped.lane(0, hangs, capacity=1)
            pumped.lane(1, hangs, capacity=1)
            made = Made(pumped)
            count = made.until_named()
            again = made.auditor.take_again()
            bad = [old for old in made.kept if old.labels]
            assert [(one.key, one.attempt, one.labels) for one in again] == [(old.key, 1, SICK) for old in bad]
            assert len(bad) == count
            assert made.auditor.take_again() == ()
            await settle()
            # The one that named it has no record: it is asked again as it was.
            assert pumped.pump.queued + pumped.pump.in_flight == count + 1
            assert not made.answer("s0", bad=True)
            assert made.answer("s0"), "a good answer is a good answer"
            assert made.auditor.take_again() == ()
            assert pumped.pump.queued + pumped.pump.in_flight == count + 2

    play(scene())


def test_a_row_is_not_made_anew_for_ever() -> None:
    async def scene(attempt: int, expected: bool) -> None:
        async with Scene() as pumped:
            pumped.lane(0, hangs, capacity=1)
            pumped.lane(1, hangs, capacity=1)
            made = Made(pumped)
            made.until_named(attempt=attempt)
            assert bool(made.auditor.take_again()) == expected

    play(scene(3, expected=True))
    play(scene(4, expected=False))


def test_a_run_that_is_told_to_stop_ends_no_server_for_its_answers() -> None:
    async def scene() -> None:
        async with Scene() as pumped:
            pumped.lane(0, hangs, capacity=1)
            pumped.lane(1, hangs, capacity=1)
            made = Made(pumped)
            pumped.pump.drain()
            with pytest.raises(AssertionError, match="60"):
                made.until_named()
            assert made.auditor.take_again() == ()

    play(scene())


def test_a_server_that_fell_behind_is_ended_and_its_sound_rows_stay() -> None:
    async def scene() -> None:
        async with Scene() as pumped:
            pumped.lane(0, hangs, capacity=1)
            pumped.lane(1, hangs, capacity=1)
            made = Made(pumped)
            for seconds in (10.0, 50.0):
                for _ in range(100):
                    made.answer("s0", seconds=seconds)
                    made.answer("s1")
                made.at += 2.0
                made.auditor.tick()
            assert [finding.kind for finding in made.auditor.findings] == ["server_slow"]
            made.at += LASTED_S
            made.auditor.tick()
            made.auditor.tick()
            (event,) = made.supervised(0).posted
            assert isinstance(event, core.Failed)
            assert "tokens a second: 8.00 for 10 minutes, the others' median is 40.00" in event.failure.cause
            assert made.auditor.take_again() == ()
            assert len(made.kept) == 400

    play(scene())

"""How many requests are kept in flight at one server: as many as help, and no more than were asked for."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import living
from tokenmill.canary import Passed
from tokenmill.core.capacity import Forecast, Limits, in_flight, servers_for
from tokenmill.core.judge import Reading
from tokenmill.core.server import State
from tokenmill.engines.base import ServerInfo
from tokenmill.events import Event
from tokenmill.job import Job, spec_for
from tokenmill.launch import Place
from tokenmill.life import Life
from tokenmill.machine.ports import Ports
from tokenmill.supervise import Supervisor

many = settings(derandomize=True, deadline=None)
number = st.one_of(st.none(), st.integers(1, 10_000))
limits = st.builds(
    Limits,
    running=number,
    why=st.just("running"),
    kv_tokens=st.one_of(st.none(), st.integers(1, 10**8)),
    good=number,
    good_why=st.just("good"),
)
tokens_of_one = st.integers(1, 300_000)

LONG = Limits(running=256, why="max-num-seqs", kv_tokens=298_000)
"""A model with a context of 262,144 tokens whose cache holds little more than one such request."""


# -- what is asked for -------------------------------------------------------------------------------------------------
@many
@given(limits, st.integers(1, 10_000), tokens_of_one)
def test_a_number_that_is_asked_for_is_cut_only_by_what_the_engine_runs(says: Limits, asked: int, tokens: int) -> None:
    if says.running is not None and says.running < asked:
        assert in_flight(says, asked, tokens) == (says.running, "running")
    else:
        assert in_flight(says, asked, tokens)[0] == asked


def test_the_limit_that_was_asked_for_is_named_as_the_config_names_it() -> None:
    assert in_flight(LONG, 64, 9_216) == (64, "generation.concurrency")


# -- auto --------------------------------------------------------------------------------------------------------------
@many
@given(limits, tokens_of_one)
def test_auto_keeps_within_every_limit_that_is_known_and_reaches_one_of_them(says: Limits, tokens: int) -> None:
    count, why = in_flight(says, None, tokens)
    fit = max(1, says.kv_tokens // tokens) if says.kv_tokens else None
    known = {
        name: most
        for name, most in (("running", says.running), ("KV cache", fit), ("good", says.good))
        if most is not None
    }
    assert count == min(known.values(), default=1)
    assert any(why.startswith(name) and most == count for name, most in known.items()) or not known


def test_a_request_that_the_cache_cannot_hold_whole_is_still_sent() -> None:
    assert in_flight(LONG, None, 400_000)[0] == 1


# -- a server's own ----------------------------------------------------------------------------------------------------
def job(folder: Path, **generation: Any) -> Job:
    """What a node has for its servers, with the scripted engine."""
    return living.job_of(folder, {"kind": "fake"}, generation=generation)


def kept(job: Job, info: ServerInfo) -> tuple[int, str]:
    """What is kept in flight at a server that says this of itself."""

    async def ask() -> tuple[int, str]:
        life = Life(job, spec_for(job, Place(0, ()), Ports(1, 2), "n"), None, lambda event: None, lambda: State.READY)
        life.info = info
        await life.client.close()
        return life.capacity

    return asyncio.run(ask())


def test_a_long_context_that_no_request_uses_does_not_make_a_server_work_on_one_at_a_time(tmp_path: Path) -> None:
    found = kept(job(tmp_path, max_tokens=8_192), ServerInfo(LONG, context=262_144))
    assert found == (32, "KV cache tokens ÷ tokens of a request")


def test_a_request_is_taken_to_be_no_longer_than_the_context(tmp_path: Path) -> None:
    assert kept(job(tmp_path, max_tokens=8_192), ServerInfo(LONG, context=4_096))[0] == 72


def test_a_number_in_the_config_goes_before_what_the_cache_holds_at_full_length(tmp_path: Path) -> None:
    found = kept(job(tmp_path, max_tokens=8_192, concurrency=200), ServerInfo(LONG, context=262_144))
    assert found == (200, "generation.concurrency")


def test_no_server_is_given_more_than_open_files_allow(tmp_path: Path) -> None:
    few = replace(job(tmp_path, concurrency=200), most_in_flight=60)
    assert kept(few, ServerInfo(LONG, context=262_144)) == (60, "open files")


# -- what was foretold -------------------------------------------------------------------------------------------------
def told_when_ready(job: Job, info: ServerInfo) -> list[str]:
    """The warnings of a supervisor whose server has just passed its canary."""
    told: list[Event] = []

    async def admit() -> None:
        place, where = Place(0, ()), Ports(1, 2)
        supervisor = Supervisor(replace(job, tell=told.append), place, where, lambda: where, lambda *_: False)
        supervisor._life = life = Life(
            job, spec_for(job, place, where, "n"), None, supervisor.post, lambda: State.READY
        )
        life.info, life.passed = info, Passed(Reading(True), None)
        supervisor._admit()
        supervisor._withdraw()
        await life.client.close()

    asyncio.run(admit())
    return [event.text for event in told if event.level == "warn"]


def test_a_server_that_runs_fewer_than_planned_is_told(tmp_path: Path) -> None:
    planned = replace(job(tmp_path, max_tokens=100), forecast=Forecast(replace(SAYS, running=64, why="concurrency")))
    [words] = told_when_ready(planned, ServerInfo(SAYS))
    assert words == "not as planned: it says 48 requests at once (max-running-requests), not 64 (concurrency)"


def test_a_server_with_a_smaller_cache_than_planned_is_told(tmp_path: Path) -> None:
    planned = replace(job(tmp_path, max_tokens=100), forecast=Forecast(SAYS))
    assert told_when_ready(planned, ServerInfo(replace(SAYS, kv_tokens=45_000))) == [
        "not as planned: it says 45,000 tokens in its cache, not 90,000"
    ]


@pytest.mark.parametrize("says", [LONG, Limits()])
def test_nothing_is_told_where_it_is_as_planned_or_one_of_them_does_not_tell(tmp_path: Path, says: Limits) -> None:
    planned = job(tmp_path, max_tokens=100)
    assert told_when_ready(replace(planned, forecast=Forecast(says)), ServerInfo(LONG)) == []
    assert told_when_ready(replace(planned, forecast=Forecast(LONG)), ServerInfo(says)) == []


# -- by example --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gpus", "each", "asked", "servers"), [(8, 1, 0, 8), (8, 3, 0, 2), (8, 1, 16, 16), (1, 2, 0, 1)]
)
def test_a_server_per_group_of_gpus_unless_asked_otherwise(gpus: int, each: int, asked: int, servers: int) -> None:
    assert servers_for(gpus, each, asked) == servers


SAYS = Limits(running=48, why="max-running-requests", kv_tokens=90_000, good=32, good_why="the captured batch")
NOTHING = (1, "nothing is known of the server")
FITTING = "KV cache tokens ÷ tokens of a request"


@pytest.mark.parametrize(
    ("says", "asked", "tokens", "expected"),
    [
        (SAYS, None, 1_000, (32, "the captured batch")),
        (SAYS, None, 9_000, (10, FITTING)),
        (SAYS, None, 100_000, (1, FITTING)),
        (replace(SAYS, good=None), None, 1_000, (48, "max-running-requests")),
        (Limits(good=32, good_why="the captured batch"), None, 1_000, (32, "the captured batch")),
        (SAYS, 40, 9_000, (40, "generation.concurrency")),
        (SAYS, 64, 1_000, (48, "max-running-requests")),
        (Limits(), 64, 1_000, (64, "generation.concurrency")),
        (Limits(), None, 1_000, NOTHING),
        (Limits(running=0, kv_tokens=0, good=0), None, 0, NOTHING),
    ],
)
def test_no_more_requests_than_the_engine_runs_and_its_cache_holds(
    says: Limits, asked: int | None, tokens: int, expected: tuple[int, str]
) -> None:
    assert in_flight(says, asked, tokens) == expected

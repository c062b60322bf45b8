"""What no sequence of events can break in the life of a server."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenmill.core import server as core
from tokenmill.core.lifecycle import HOUR, step
from tokenmill.core.pairs import IllegalEvent, meaning
from tokenmill.core.server import FINAL, LIVE, SERVING, Failure, FailureKind, Server, State, Timing

TIMING = Timing(restarts_per_hour=2, backoff=1)
FAILURES = [Failure(kind, "as scripted") for kind in FailureKind]
UPWARD: list[core.Event] = [core.Answered(), core.Healthy(), core.CanaryPassed(), core.Gone(), core.Tick(busy=True)]
EVENTS: list[core.Event] = [
    *UPWARD,
    core.Tick(),
    core.Tick(busy=True, blind=True),
    core.ProbePassed(),
    core.Progress(strong=True),
    core.Progress(strong=False),
    core.PhaseSeen("weights", 50.0),
    core.Hold(),
    core.Release(),
    core.Gone("its memory did not come back"),
    core.Failed(Failure(FailureKind.MEMORY_GRAPHS, "as scripted"), mended="less"),
    *(core.Failed(failure) for failure in FAILURES),
    *(core.ProbeFailed(FAILURES[0], *told) for told in product((True, False), repeat=3)),
    core.Trouble(FAILURES[0]),
]
LIVELY: list[core.Event] = [*EVENTS, *UPWARD * 3]
"""More of what leads a server on: most sequences of any events end in the first state."""

Steps = list[tuple[core.Event, float]]
STEPS = st.lists(st.tuples(st.sampled_from(LIVELY), st.sampled_from([0.0, 0.5, 30.0, 100.0, 1500.0])), max_size=30)
STARTS: st.SearchStrategy[core.Event] = st.sampled_from([core.Launch(), core.Adopt()])
MANY = settings(max_examples=100, deadline=None)


def lives(
    start: core.Event, steps: Steps, *, owned: bool = True
) -> list[tuple[Server, core.Event, Server, tuple[core.Action, ...], float]]:
    """Every step of a server's life: before, event, after, actions, time."""
    server, at, found = Server(0, TIMING, owned=owned), 0.0, []
    for event, pause in [(start, 0.0), *steps]:
        at += pause
        if meaning(server.state, type(event)) == "illegal":
            with pytest.raises(IllegalEvent):
                step(server, event, at)
            continue
        after, actions = step(server, event, at)
        found.append((server, event, after, actions, at))
        server = after
    return found


@MANY
@given(start=STARTS, steps=STEPS)
def test_no_server_serves_without_a_canary_passed_in_this_life(start: core.Event, steps: Steps) -> None:
    passed = set()
    for before, event, after, actions, _ in lives(start, steps):
        if isinstance(event, core.CanaryPassed) and before.state is State.CANARY:
            passed.add(before.life)
        if core.Admit() in actions or after.state in SERVING:
            assert after.life in passed


@MANY
@given(start=STARTS, steps=STEPS, rest=STEPS)
def test_nothing_is_done_after_stopped(start: core.Event, steps: Steps, rest: Steps) -> None:
    told = [*steps, (core.Stop(), 0.0), (core.Gone(), 0.0), *rest]
    for before, _, after, actions, _ in lives(start, told):
        if before.state is State.STOPPED:
            assert (after.state, actions) == (State.STOPPED, ())
        if before.state is State.STOPPING:
            assert actions == ()


@MANY
@given(start=STARTS, steps=STEPS, owned=st.booleans())
def test_every_state_but_the_last_ones_ends_by_ticks_alone(start: core.Event, steps: Steps, owned: bool) -> None:
    *_, (_, _, first, _, at) = lives(start, steps, owned=owned or start == core.Adopt())
    assume(first.state not in FINAL)
    longest = max(TIMING.start_timeout, TIMING.canary_timeout, TIMING.stall_timeout + TIMING.suspect_timeout, HOUR)
    server, deadline = first, at + longest + TIMING.stop_timeout + 300.0
    while (server.state, server.life) == (first.state, first.life):
        at += 100.0
        assert at < deadline
        server, _ = step(server, core.Tick(busy=True), at)
        if server.state in SERVING and first.state in SERVING:
            first = replace(first, state=server.state)  # both have the one deadline


@MANY
@given(start=STARTS, steps=STEPS)
def test_a_failed_probe_that_no_slot_was_free_for_never_ends_a_server_that_shows_tokens(
    start: core.Event, steps: Steps
) -> None:
    for before, event, after, _, at in lives(start, steps):
        if isinstance(event, core.ProbeFailed) and not event.free and before.state in SERVING:
            silent = at - before.progress_at > TIMING.stall_timeout
            assert after.state in SERVING or (event.sighted and silent and not event.burning)


@MANY
@given(start=STARTS, steps=STEPS)
def test_a_server_in_doubt_is_always_being_asked(start: core.Event, steps: Steps) -> None:
    """Every way into SUSPECT, and every probe that leaves it there, asks for the next one."""
    for before, event, after, actions, _ in lives(start, steps):
        if after.state is State.SUSPECT and (before.state is not State.SUSPECT or isinstance(event, core.ProbeFailed)):
            assert any(isinstance(action, core.ProbeGeneration) for action in actions)


@MANY
@given(start=STARTS, steps=STEPS)
def test_trouble_is_forgotten_only_after_a_small_generation(start: core.Event, steps: Steps) -> None:
    for before, event, after, _, _ in lives(start, steps):
        if before.doubt is not None and after.state is State.READY:
            assert isinstance(event, core.ProbePassed)


@MANY
@given(start=STARTS, steps=STEPS)
def test_restarts_stay_within_the_hours_budget(start: core.Event, steps: Steps) -> None:
    counted = [(event, pause) for event, pause in steps if not _is_the_surroundings(event)]
    told = [at for before, _, after, _, at in lives(start, counted) if _is_restart(before, after)]
    for at in told:
        assert sum(at - HOUR < other <= at for other in told) <= TIMING.restarts_per_hour


def _is_the_surroundings(event: core.Event) -> bool:
    return isinstance(event, core.Hold) or (
        isinstance(event, core.Failed) and event.failure.restart is core.Restart.WAIT
    )


def _is_restart(before: Server, after: Server) -> bool:
    return after.state is State.BACKOFF and before.state is not State.BACKOFF


@MANY
@given(steps=STEPS, stop=st.integers(0, 40))
def test_a_server_of_someone_elses_is_never_started_nor_killed(steps: Steps, stop: int) -> None:
    told = [*steps[:stop], (core.Stop(), 0.0), *steps[stop:]] if stop < len(steps) else steps
    for *_, actions, _ in lives(core.Launch(), told, owned=False):
        assert not any(isinstance(action, core.Spawn | core.Kill | core.Terminate) for action in actions)


@MANY
@given(start=STARTS, steps=STEPS)
def test_a_life_is_ended_before_the_next_one_begins(start: core.Event, steps: Steps) -> None:
    for before, _, after, actions, _ in lives(start, steps):
        if any(isinstance(action, core.Spawn) for action in actions):
            assert before.gone
            assert after.life == before.life + 1
        if before.state in LIVE and after.state not in LIVE:
            assert any(isinstance(action, core.Withdraw) for action in actions)


EVERY: list[core.Event] = [*EVENTS, core.Launch(), core.Adopt(), core.Stop(), core.Gone("held")]


@pytest.mark.parametrize("event", EVERY, ids=repr)
def test_every_pair_of_state_and_event_is_defined(event: core.Event) -> None:
    for state in State:
        for owned in (True, False):
            server = replace(Server(0, TIMING, owned=owned), state=state, gone=state not in LIVE)
            match meaning(state, type(event)):
                case "illegal":
                    with pytest.raises(IllegalEvent):
                        step(server, event, 10.0)
                case "late":
                    after, actions = step(server, event, 10.0)
                    assert (after.state, actions) == (state, ())
                case "taken":
                    step(server, event, 10.0)

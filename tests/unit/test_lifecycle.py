"""The life of a server as a pure function: transitions, failures and restarts, silence, the end."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.core import server as core
from tokenmill.core.lifecycle import HOUR, QUARANTINE, STORY, step, then
from tokenmill.core.pairs import IllegalEvent
from tokenmill.core.server import LIVE, Failure, FailureKind, Server, State, Timing

TIMING = Timing(
    start_timeout=1200, stall_timeout=90, suspect_timeout=900, canary_timeout=1200, restarts_per_hour=3, backoff=5
)
NEW = Server(0, TIMING)
FOREIGN = Server(0, TIMING, owned=False)
CRASH = core.Failed(Failure(FailureKind.CRASH, "it died"))
UP: tuple[core.Event, ...] = (core.Launch(), core.Answered(), core.Healthy(), core.CanaryPassed())
BUSY = core.Tick(busy=True)


def failed(kind: FailureKind) -> core.Failed:
    return core.Failed(Failure(kind, kind.value))


def play(server: Server, *events: core.Event, at: float = 0.0) -> tuple[Server, list[core.Action]]:
    """All events at one moment; the last event's actions."""
    actions: tuple[core.Action, ...] = ()
    for event in events:
        server, actions = step(server, event, at)
    return server, list(actions)


def kinds(actions: Sequence[core.Action]) -> list[type]:
    return [type(action) for action in actions if not isinstance(action, core.Tell)]


def ready(server: Server = NEW, at: float = 0.0) -> Server:
    return play(server, *UP, at=at)[0]


# -- the way up --------------------------------------------------------------------------------------------------------
def test_a_server_comes_up_step_by_step() -> None:
    seen = []
    server = NEW
    for event in UP:
        server, actions = step(server, event, 1.0)
        seen.append((server.state, kinds(actions)))
    assert seen == [
        (State.STARTING, [core.Spawn]),
        (State.ANSWERING, []),
        (State.CANARY, [core.RunCanary]),
        (State.READY, [core.Admit]),
    ]


def test_an_adopted_server_is_watched_and_takes_the_same_canary() -> None:
    server, actions = play(NEW, core.Adopt())
    assert (server.state, kinds(actions), server.restarts) == (State.STARTING, [core.Watch], 0)
    server, actions = play(server, *UP[1:])
    assert (server.state, kinds(actions)) == (State.READY, [core.Admit])


@pytest.mark.parametrize(
    ("before", "early"),
    [
        (UP[:2], core.Answered()),
        (UP, core.ProbePassed()),
        (UP, core.Healthy()),
        (UP, core.Hold()),
        ((*UP, core.Stop()), CRASH),
        ((*UP, CRASH), core.CanaryPassed()),
    ],
)
def test_what_does_not_fit_a_state_is_ignored(before: tuple[core.Event, ...], early: core.Event) -> None:
    server, _ = play(NEW, *before)
    after, actions = play(server, early)
    assert (after.state, actions) == (server.state, [])


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (UP, core.Launch()),
        (UP, core.Adopt()),
        (UP[:1], core.Healthy()),
        (UP[:1], core.CanaryPassed()),
        (UP[:2], core.CanaryPassed()),
        (UP[:2], core.ProbePassed()),
        ((), core.Answered()),
    ],
)
def test_what_cannot_happen_is_a_bug_of_ours_and_tells_the_story(
    before: tuple[core.Event, ...], event: core.Event
) -> None:
    server, _ = play(NEW, *before)
    told = "".join(rf".*{type(earlier).__name__}" for earlier in before)
    with pytest.raises(IllegalEvent, match=rf"(?s)server 0: .* in state {server.state}{told}"):
        step(server, event, 9.0)
    many = replace(server, story=tuple(f"event {number}" for number in range(50)))
    with pytest.raises(IllegalEvent) as told_last:
        step(many, event, 9.0)
    assert str(told_last.value).count("\n  ") == STORY


def test_phases_are_shown_and_count_as_progress() -> None:
    server, _ = play(NEW, core.Launch())
    server, _ = play(server, core.PhaseSeen("weights", 40.0), at=80.0)
    assert (server.phase, server.percent) == ("weights", 40.0)
    assert play(server, core.Tick(), at=160.0)[0].state is State.STARTING


def test_a_start_never_falls_back_though_a_draft_model_prints_the_same_lines_again() -> None:
    seen = (core.PhaseSeen("weights", 60.0), core.PhaseSeen("weights", 6.0), core.PhaseSeen("draft weights", 82.0))
    server, shown = play(NEW, core.Launch())[0], []
    for event in seen:
        server, _ = play(server, event)
        shown.append(server.percent)
    assert shown == [60.0, 60.0, 82.0]
    server, _ = play(server, CRASH, core.Gone())
    assert play(server, core.Tick(), seen[1], at=9.0)[0].percent == 6.0


# -- failures and restarts ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("steps", "kind"), [(1, FailureKind.CONFIG), (3, FailureKind.CONFIG), (3, FailureKind.WRONG_MODE)]
)
def test_what_a_restart_cannot_mend_is_not_restarted(steps: int, kind: FailureKind) -> None:
    server, actions = play(play(NEW, *UP[:steps])[0], failed(kind))
    assert (server.state, kinds(actions)) == (State.FAILED, [core.Withdraw, core.Kill])
    later, actions = play(server, core.Gone(), core.Tick(), at=1e6)
    assert (later.state, later.gone, actions) == (State.FAILED, True, [])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_has_worked_with_its_config_is_restarted_whatever_its_log_says(steps: int) -> None:
    server, _ = play(ready(), CRASH, core.Gone())
    server, _ = play(server, core.Tick(), *UP[1:steps], at=5.0) if steps else (ready(), [])
    server, actions = play(server, failed(FailureKind.CONFIG), at=6.0)
    assert (server.state, kinds(actions)) == (State.BACKOFF, [core.Withdraw, core.Kill])
    assert server.failure is not None
    assert (server.failure.kind, server.failure.cause) == (FailureKind.CRASH, "config")


def test_a_crash_waits_for_the_end_of_its_group_and_then_for_the_back_off() -> None:
    server, actions = play(ready(), CRASH, at=100.0)
    assert (server.state, kinds(actions)) == (State.BACKOFF, [core.Withdraw, core.Kill])
    assert play(server, core.Tick(), at=200.0)[1] == []
    gone, _ = play(server, core.Gone(), at=101.0)
    assert play(gone, core.Tick(), at=104.9)[1] == []
    again, actions = play(gone, core.Tick(), at=105.0)
    assert (again.state, actions, again.restarts) == (State.STARTING, [core.Spawn(life=2)], 1)


def waits(kind: FailureKind, count: int, *, per_hour: int = 99, every: float = 400.0) -> list[float]:
    """The seconds before each restart of a server that fails again and again."""
    server, found, at = Server(0, replace(TIMING, restarts_per_hour=per_hour)), [], 0.0
    server, _ = play(server, core.Launch())
    for _ in range(count):
        at += every
        server, _ = play(server, failed(kind), core.Gone(), at=at)
        found.append(server.retry_at - at)
        server, _ = play(server, core.Tick(), at=server.retry_at)
    return found


def test_the_back_off_doubles_to_five_minutes() -> None:
    assert waits(FailureKind.CRASH, 8) == [5, 10, 20, 40, 80, 160, 300, 300]


def test_a_port_clash_is_mended_at_once_with_other_ports() -> None:
    assert waits(FailureKind.PORT, 3) == [0, 0, 0]
    server, _ = play(NEW, core.Launch(), failed(FailureKind.PORT), core.Gone())
    server, actions = play(server, core.Tick())
    assert actions == [core.Spawn(life=2, fresh_ports=True)]
    server, _ = play(server, CRASH, core.Gone())
    assert play(server, core.Tick(), at=99.0)[1] == [core.Spawn(life=3, fresh_ports=False)]


def test_out_of_memory_is_restarted_once() -> None:
    server, _ = play(ready(), failed(FailureKind.MEMORY), core.Gone())
    assert server.state is State.BACKOFF
    server, _ = play(server, core.Tick(), failed(FailureKind.MEMORY), at=5.0)
    assert server.state is State.FAILED


def test_out_of_memory_is_forgotten_after_thirty_good_minutes() -> None:
    server, _ = play(ready(), failed(FailureKind.MEMORY), core.Gone())
    server, _ = play(server, core.Tick(), *UP[1:], at=5.0)
    assert play(server, failed(FailureKind.MEMORY), at=4000.0)[0].state is State.BACKOFF


def test_graphs_that_run_out_of_memory_are_tried_again_only_with_less() -> None:
    oom = Failure(FailureKind.MEMORY_GRAPHS, "out of memory")
    server, _ = play(NEW, core.Launch())
    again, actions = play(server, core.Failed(oom, mended="mem-fraction-static 0.90 → 0.85"), core.Gone())
    assert again.retry_at == 0.0
    _, actions = play(server, core.Failed(oom, mended="mem-fraction-static 0.90 → 0.85"))
    assert "mem-fraction-static 0.90 → 0.85 for all servers" in str(actions)
    assert play(again, core.Tick(), core.Failed(oom))[0].state is State.FAILED


def test_a_card_that_faults_twice_is_quarantined() -> None:
    server, _ = play(ready(), failed(FailureKind.DEVICE), core.Gone())
    assert server.state is State.BACKOFF
    server, _ = play(server, core.Tick(), failed(FailureKind.DEVICE), at=5.0)
    assert server.state is State.QUARANTINED


def test_a_place_that_does_not_come_back_is_quarantined() -> None:
    server, _ = play(ready(), CRASH, core.Gone("GPU 3: 61,000 MiB did not come back"), at=9.0)
    assert (server.state, server.retry_at) == (State.QUARANTINED, 9.0 + QUARANTINE)


def test_ports_that_somebody_took_meanwhile_are_left_to_him() -> None:
    server, _ = play(ready(), CRASH, core.Gone(ports_taken=True))
    assert play(server, core.Tick(), at=5.0)[1] == [core.Spawn(life=2, fresh_ports=True)]


def test_what_cannot_be_ended_holds_nobody_up() -> None:
    server, _ = play(ready(), CRASH)
    server, _ = play(server, core.Tick(), at=TIMING.stop_timeout + 1)
    assert (server.state, server.gone) == (State.QUARANTINED, True)
    server, _ = play(ready(), core.Stop())
    assert play(server, core.Tick(), at=TIMING.stop_timeout + 1)[0].state is State.STOPPED


# -- the surroundings --------------------------------------------------------------------------------------------------
def test_what_the_surroundings_did_is_not_charged_and_waits_for_its_turn() -> None:
    server, _ = play(ready(), CRASH, core.Gone(), core.Hold(), at=10.0)
    assert (server.state, server.held, server.charged) == (State.BACKOFF, True, ())
    assert play(server, core.Tick(), at=10.0 + HOUR - 1)[1] == []
    assert kinds(play(server, core.Tick(), at=10.0 + HOUR)[1]) == [core.Spawn]
    assert kinds(play(server, core.Release(), core.Tick(), at=20.0)[1]) == [core.Spawn]


def test_a_place_that_cannot_be_used_is_not_tried_because_the_others_are_well() -> None:
    server, _ = play(ready(), CRASH, core.Hold(), core.Gone("its memory did not come back"))
    assert server.state is State.QUARANTINED
    assert play(server, core.Release(), core.Tick(), at=20.0)[1] == []


def test_only_the_last_failure_is_taken_from_its_account() -> None:
    server, _ = play(ready(), CRASH, core.Gone())
    server, _ = play(server, core.Tick(), *UP[1:], at=10.0)
    server, _ = play(server, failed(FailureKind.STORAGE), core.Hold(), at=20.0)
    assert server.charged == (0.0,)


@pytest.mark.parametrize("kind", [FailureKind.STORAGE, FailureKind.DISK])
def test_a_mount_that_is_away_costs_no_restart(kind: FailureKind) -> None:
    assert waits(kind, 20)[-1] == 300
    server, _ = play(ready(), failed(kind))
    assert server.charged == ()


# -- the phases of a start ---------------------------------------------------------------------------------------------
def test_the_time_of_each_phase_is_kept() -> None:
    server, _ = play(NEW, core.Launch())
    for at, event in enumerate((core.PhaseSeen("weights", 6.0), core.PhaseSeen("weights", 60.0), *UP[1:]), 1):
        server, _ = step(server, event, at * 10.0)
    assert server.phases == (("begin", 10.0), ("weights", 30.0), ("canary", 10.0))


def test_a_phase_that_spins_ends_at_its_own_limit() -> None:
    server = Server(0, replace(TIMING, phases={"distributed": 300.0}))
    server, _ = play(server, core.Launch(), core.PhaseSeen("distributed", 5.0))
    server, _ = play(server, core.Progress(strong=False), core.Tick(), at=300.0)
    assert server.state is State.STARTING
    server, _ = play(server, core.Progress(strong=False), core.Tick(), at=301.0)
    assert server.failure is not None
    assert server.failure.cause == "longer than 300 s at distributed 5%, which never takes so long"


def test_one_try_an_hour_after_a_quarantine() -> None:
    server = replace(ready(), probation=True)
    assert play(server, CRASH)[0].state is State.QUARANTINED
    assert play(server, CRASH, at=4000.0)[0].state is State.BACKOFF


def test_thirty_good_minutes_reset_the_back_off() -> None:
    server, _ = play(ready(), CRASH, core.Gone())
    server, _ = play(server, core.Tick(), *UP[1:], at=10.0)
    short, _ = play(server, CRASH, at=1000.0)
    long, _ = play(server, CRASH, at=2000.0)
    assert (short.retry_at - 1000.0, long.retry_at - 2000.0) == (10, 5)


def test_good_hours_before_a_hang_reset_the_back_off() -> None:
    server, _ = play(ready(), CRASH, core.Gone())
    server, _ = play(server, core.Tick(), *UP[1:], at=10.0)
    server, _ = play(server, core.Progress(), at=9000.0)
    server, _ = play(server, BUSY, at=9100.0)
    hang = core.ProbeFailed(Failure(FailureKind.HANG, "hangs"), burning=False)
    server, _ = play(server, hang, at=9104.0)
    assert server.retry_at - 9104.0 == 5


def test_too_many_failures_in_an_hour_set_it_aside_for_an_hour() -> None:
    server, at = ready(), 0.0
    for _ in range(TIMING.restarts_per_hour):
        at += 500.0
        server, _ = play(server, CRASH, core.Gone(), at=at)
        server, _ = play(server, core.Tick(), at=server.retry_at)
        assert server.state is State.STARTING
    server, _ = play(server, CRASH, core.Gone(), at=at + 500.0)
    assert server.state is State.QUARANTINED
    assert play(server, core.Tick(), at=at + 500.0 + QUARANTINE - 1)[1] == []
    assert play(server, core.Tick(), at=at + 500.0 + QUARANTINE)[0].state is State.STARTING


# -- silence -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_silence_before_ready_is_a_hang(steps: int) -> None:
    server, _ = play(NEW, *UP[:steps])
    assert play(server, BUSY, at=90.0)[0].state in LIVE
    silent, _ = play(server, BUSY, at=90.5)
    assert silent.failure is not None
    assert (silent.state, silent.failure.kind) == (State.BACKOFF, FailureKind.HANG)


def test_a_canary_of_a_server_that_shows_nothing_is_waited_for() -> None:
    """Someone else's, without counters and streams: a canary of 512 tokens may well take longer than a stall."""
    server, _ = play(FOREIGN, *UP[:3])
    assert play(server, core.Tick(blind=True), at=600.0)[0].state is State.CANARY
    assert play(server, core.Tick(blind=False), at=600.0)[0].state is State.BACKOFF
    assert play(server, core.Tick(blind=True), at=TIMING.canary_timeout + 1)[0].state is State.BACKOFF


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_start_that_works_on_and_on_ends_at_its_timeout(steps: int) -> None:
    server, at = play(NEW, *UP[:steps])[0], 0.0
    while server.state in LIVE:
        at += 60.0
        server, _ = play(server, core.Progress(strong=False), BUSY, at=at)
    assert at == 1260.0


def test_an_idle_server_may_be_silent() -> None:
    assert play(ready(), core.Tick(busy=False), at=1e6)[0].state is State.READY


def test_a_silent_busy_server_is_asked_for_a_small_generation() -> None:
    server, actions = play(ready(), BUSY, at=91.0)
    assert (server.state, kinds(actions)) == (State.SUSPECT, [core.ProbeGeneration])
    assert play(server, core.ProbePassed(), at=92.0)[0].state is State.READY
    assert play(server, core.Progress(strong=True), at=92.0)[0].state is State.READY
    assert play(server, core.Progress(strong=False), at=92.0)[0].state is State.SUSPECT


def test_a_suspect_that_burns_is_asked_again_until_its_time_is_over() -> None:
    server, _ = play(ready(), BUSY, at=91.0)
    hang = Failure(FailureKind.HANG, "hangs")
    server, actions = play(server, core.ProbeFailed(hang, burning=True), at=95.0)
    assert kinds(actions) == [core.ProbeGeneration]
    assert play(server, core.ProbeFailed(hang, burning=False), at=99.0)[0].state is State.BACKOFF
    assert play(server, BUSY, at=91.0 + TIMING.suspect_timeout + 1)[0].state is State.BACKOFF


@pytest.mark.parametrize(
    ("free", "sighted", "silent_s", "state"),
    [
        (True, False, 5.0, State.BACKOFF),
        (True, True, 5.0, State.BACKOFF),
        (False, True, 95.0, State.BACKOFF),
        (False, True, 5.0, State.SUSPECT),
        (False, False, 95.0, State.SUSPECT),
    ],
)
def test_a_failed_probe_decides_where_a_slot_was_free_else_the_tokens_do(
    free: bool, sighted: bool, silent_s: float, state: State
) -> None:
    server, actions = play(ready(), TROUBLE, at=100.0)
    assert (server.state, kinds(actions)) == (State.SUSPECT, [core.ProbeGeneration])
    server, _ = play(server, core.Progress(), at=200.0)
    probe = core.ProbeFailed(Failure(FailureKind.HANG, "late"), burning=False, free=free, sighted=sighted)
    server, actions = play(server, probe, at=200.0 + silent_s)
    assert server.state is state
    assert (core.ProbeGeneration in kinds(actions)) == (state is State.SUSPECT)


TROUBLE = core.Trouble(Failure(FailureKind.CRASH, "three errors in a row"))


def test_trouble_is_cleared_by_a_small_generation_and_not_by_what_else_goes_on() -> None:
    server, _ = play(ready(), TROUBLE, core.Progress())
    assert server.state is State.SUSPECT
    assert play(server, core.ProbePassed())[0].state is State.READY
    server, _ = play(server, core.ProbeFailed(Failure(FailureKind.HANG, "HTTP 500"), burning=False))
    assert server.failure is not None
    assert server.failure.kind is FailureKind.CRASH
    assert server.failure.cause == "three errors in a row; and a small generation failed: HTTP 500"


def test_a_server_in_trouble_may_end_what_it_is_at_as_long_as_tokens_come() -> None:
    server, at = play(ready(), TROUBLE)[0], 0.0
    while at < 3 * TIMING.suspect_timeout:
        at += 60.0
        full = core.ProbeFailed(Failure(FailureKind.HANG, "late"), burning=False, free=False, sighted=True)
        server, _ = play(server, core.Progress(), full, BUSY, at=at)
    assert server.state is State.SUSPECT
    assert play(server, BUSY, at=at + TIMING.suspect_timeout + 1)[0].state is State.BACKOFF


# -- the end -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "states", "ordered"),
    [
        ((), [State.STOPPED], []),
        (UP[:1], [State.STOPPING, State.STOPPED], [core.Withdraw, core.Terminate]),
        (UP, [State.STOPPING, State.STOPPED], [core.Withdraw, core.Terminate]),
        ((*UP, CRASH), [State.STOPPING, State.STOPPED], []),
        ((*UP, CRASH, core.Gone()), [State.STOPPED], []),
        ((*UP[:3], failed(FailureKind.CONFIG)), [State.FAILED], []),
    ],
)
def test_a_stop_ends_every_state(before: tuple[core.Event, ...], states: list[State], ordered: list[type]) -> None:
    server, actions = play(play(NEW, *before)[0], core.Stop())
    assert kinds(actions) == ordered
    assert [server.state, play(server, core.Gone())[0].state][: len(states)] == states


# -- servers of someone else's -----------------------------------------------------------------------------------------
def test_a_foreign_server_is_set_aside_and_looked_at_again() -> None:
    server, actions = play(FOREIGN, core.Launch())
    assert kinds(actions) == [core.Watch]
    server, actions = play(server, *UP[1:], failed(FailureKind.UNREACHABLE), at=50.0)
    assert (server.state, kinds(actions), server.retry_at) == (State.BACKOFF, [core.Withdraw], 55.0)
    server, actions = play(server, core.Tick(), at=55.0)
    assert kinds(actions) == [core.Watch]
    server, _ = play(server, failed(FailureKind.UNREACHABLE), at=60.0)
    assert server.retry_at == 70.0


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_foreign_server_is_let_go_of_at_once_and_never_ended(steps: int) -> None:
    server, actions = play(play(FOREIGN, *UP[:steps])[0], core.Stop())
    assert (server.state, server.gone, actions) == (State.STOPPED, True, [core.Withdraw()])


def test_a_foreign_server_in_the_wrong_mode_is_not_asked_again() -> None:
    server, _ = play(FOREIGN, *UP[:3], failed(FailureKind.WRONG_MODE))
    assert (server.state, server.gone) == (State.FAILED, True)


# -- the fleet ---------------------------------------------------------------------------------------------------------
def in_state(state: State, *, ever_ready: bool = False) -> Server:
    return replace(NEW, state=state, ready_at=1.0 if ever_ready else None)


@pytest.mark.parametrize(
    ("servers", "count", "hopeless"),
    [
        ([], 0, False),
        ([in_state(State.FAILED), in_state(State.FAILED)], 0, True),
        ([in_state(State.FAILED), in_state(State.QUARANTINED)], 0, True),
        ([in_state(State.FAILED), in_state(State.QUARANTINED, ever_ready=True)], 0, False),
        ([in_state(State.FAILED), in_state(State.BACKOFF)], 0, False),
        ([in_state(State.READY), in_state(State.SUSPECT), in_state(State.CANARY)], 2, False),
    ],
)
def test_a_fleet_is_hopeless_when_no_server_ever_will(servers: list[Server], count: int, hopeless: bool) -> None:
    found = core.fleet(tuple(servers))
    assert (found.ready, found.hopeless) == (count, hopeless)


# -- a server whose answers have gone bad ------------------------------------------------------------------------------
def test_a_server_that_goes_bad_again_before_thirty_good_minutes_is_quarantined() -> None:
    for pause, state in ((1800.0, State.QUARANTINED), (2000.0, State.BACKOFF)):
        server, _ = step(ready(at=0.0), failed(FailureKind.DRIFT), 100.0)
        assert server.state is State.BACKOFF
        server = replace(server, state=State.READY, ready_at=200.0)
        server, actions = step(server, failed(FailureKind.DRIFT), 100.0 + pause)
        assert server.state is state
        assert core.Withdraw() in actions


def test_one_of_somebody_elses_that_goes_bad_twice_is_set_aside_for_an_hour() -> None:
    server = replace(Server(0, owned=False), state=State.READY, ready_at=0.0, gone=False)
    server, _ = step(server, failed(FailureKind.DRIFT), 10.0)
    assert server.retry_at < 60.0
    server, actions = step(replace(server, state=State.READY), failed(FailureKind.DRIFT), 600.0)
    assert server.retry_at == 600.0 + QUARANTINE
    assert core.Kill() not in actions


def test_every_kind_of_failure_is_in_the_docs_with_what_is_done_about_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "supervision.md").read_text(encoding="utf-8")
    assert [kind.value for kind in FailureKind if f"`{kind.value}`" not in page] == []


def test_a_start_that_hangs_says_what_its_pages_say() -> None:
    server, _ = play(play(NEW, core.Launch())[0], core.Tick(said="/v1/models: HTTP 500: internal"), at=91.0)
    assert str(server.failure) == "silent and idle for 90 s at start; /v1/models: HTTP 500: internal"


def test_a_server_of_someone_else_s_is_asked_again_never_started() -> None:
    assert then(play(ready(), CRASH)[0], 0.0) == "started again in 5 s"
    assert then(play(ready(FOREIGN), CRASH)[0], 0.0) == "asked again in 5 s"

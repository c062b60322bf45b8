"""C12: health says 200 while nothing is generated. Tokens and a small generation decide; a page never does."""

import os
import re
import signal
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.conftest import write_prompts
from tests.harness import Case, answered_prompts, assert_whole, scripted_server, wait_until
from tokenmill import events
from tokenmill.events import Event

STALL_S = 1.5
FOUND_S = 5.0
"""A server that stands still while its pages answer is found in this time: STALL_S of silence, as much for a probe."""

UNSEEN = {"no-metrics": True, "stream": "ignored"}
KEYS = {f"p{n}" for n in range(40)}


def told(case: Case, words: str, server: str | None = None) -> list[Event]:
    found = (event for event, _ in events.read(case.run_folder.events) if server in (None, event.server))
    return [event for event in found if re.search(words, event.text)]


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({}, id="counters"),
        pytest.param({"metrics-freeze": True}, id="counters that never move", marks=pytest.mark.long),
        pytest.param(UNSEEN, id="unseen, with a slot free", marks=pytest.mark.long),
    ],
)
def test_a_server_that_answers_no_more_is_found_and_started_again(case: Case, lie: dict[str, Any]) -> None:
    write_prompts(case.folder / "prompts.jsonl", 60, start=40)
    # Half a prompt set is left when it hangs; a fifth slot is free where tokens can't be seen.
    args = {"slots": 5 if lie == UNSEEN else 4, "hang-after": 60, "latency-ms": 20, **lie}
    case.write(
        engine={"args": args},
        fleet={"servers": 1, "stall_timeout": f"{STALL_S}s", "restarts_per_hour": 100},
        generation={"concurrency": 4},
    )
    assert case.run() == 0, case.output()
    assert_whole(case, KEYS | {f"p{n}" for n in range(40, 100)})
    assert {record.attempt for record in case.records()} == {1}, "a hang was charged to a prompt"
    [hang, *_] = told(case, "hangs: no answer, no token")
    last = max(record.started + record.seconds for record in case.records() if record.started < hang.t - STALL_S)
    print(f"found {hang.t - last:.2f} s after the last answer")
    assert hang.t - last < FOUND_S
    assert case.output().count(": started as pid") >= 2


@pytest.mark.parametrize(
    "args", [pytest.param({}, id="counters", marks=pytest.mark.long), pytest.param({"no-metrics": True}, id="streamed")]
)
def test_an_engine_that_stops_behind_its_pages_with_every_slot_full_is_found(case: Case, args: dict[str, Any]) -> None:
    log = case.folder / "requests.jsonl"
    case.write(
        engine={"args": {"slots": 4, "latency-ms": 1500, "quick-canary": True, "requests": str(log), **args}},
        fleet={"stall_timeout": f"{STALL_S}s", "restarts_per_hour": 100},
    )
    process = case.start()
    case.until_done(8, process)
    stopped = case.server_pids()[0]
    os.kill(stopped, signal.SIGUSR1)
    stopped_at = time.time()
    wait_until(lambda: told(case, "hangs: no answer, no token", "0"), process)
    found = told(case, "hangs: no answer, no token", "0")[0].t - stopped_at
    print(f"found after {found:.2f} s")
    assert found < FOUND_S
    assert case.wait(process) == 0, case.output()
    assert_whole(case, KEYS)
    assert {record.attempt for record in case.records()} == {1}
    assert max(answered_prompts(log).values()) <= 2, "in flight when it stopped, and once more"
    assert case.server_pids().get(0) != stopped


@pytest.mark.parametrize(
    "times", [3, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(120)])], ids=["3", "10"]
)
def test_a_healthy_server_whose_slots_hold_long_thoughts_is_left_alone(case: Case, times: int) -> None:
    """Full, so that a probe waits: at addresses with counters, streamed, and where nothing can be seen."""
    kinds: list[dict[str, Any]] = [{}, {"no_metrics": True}, {"no_metrics": True, "stream": "ignored"}]
    # A machine full of other tests has kept a canary waiting for 2 s.
    stall_s = 3.0
    case.write(
        model={"name": "m"},
        engine={"kind": "openai", "args": {}, "addresses": [_address(case, n) for n in range(len(kinds))]},
        generation={"concurrency": 4},
        fleet={"stall_timeout": f"{stall_s}s", "min_ready": len(kinds)},
        prompts={"limit": 12},
    )
    flags = {"model": "m", "slots": 4, "latency_ms": times * stall_s * 1000, "quick_canary": True}
    with ExitStack() as servers:
        for number, kind in enumerate(kinds):
            servers.enter_context(scripted_server(case.port + number, **flags, **kind))
        assert case.run(timeout_s=100) == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(12)})
    assert {record.attempt for record in case.records()} == {1}
    assert told(case, "set aside") == []
    assert [event.server for event in told(case, "→ suspect")] == ["2"] * len(told(case, "→ suspect", "2"))
    assert told(case, "answers are streamed", "1")
    assert told(case, "tokens are not seen", "2")


def _address(case: Case, number: int) -> str:
    return f"http://127.0.0.1:{case.port + number}"


@pytest.mark.long
def test_a_launched_server_whose_slots_hold_long_thoughts_is_left_alone(case: Case) -> None:
    args = {"slots": 4, "latency-ms": 8000, "quick-canary": True, "health-fails-after": 4}
    case.write(engine={"args": args}, fleet={"stall_timeout": "2s"}, prompts={"limit": 8})
    assert case.run() == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(8)})
    assert told(case, "→ suspect|→ backoff") == []
    assert case.output().count(": started as pid") == 2


def test_a_health_page_that_fails_alone_kills_nobody(case: Case) -> None:
    case.write(engine={"args": {"slots": 4, "latency-ms": 300, "health-fails-after": 5}}, fleet={"stall_timeout": "3s"})
    assert case.run() == 0, case.output()
    assert_whole(case, KEYS)
    assert told(case, "→ suspect|→ backoff") == []


@pytest.mark.parametrize(
    ("stream", "words"), [("ignored", "it does not stream"), ("refused", "stream_options is not known")]
)
def test_a_server_that_does_not_stream_is_used_without(case: Case, stream: str, words: str) -> None:
    case.write(engine={"args": {"slots": 4, "no-metrics": True, "stream": stream}}, fleet={"servers": 1})
    assert case.run() == 0, case.output()
    assert_whole(case, KEYS)
    assert told(case, f"tokens are not seen: .*{words}")

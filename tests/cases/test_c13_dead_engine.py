"""C13: an engine that says it is dead is left alone; its prompts go to the others at once, uncharged."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tests.harness import Case, answered_prompts, assert_whole, requests, scripted_server
from tests.pumping import prompt, pumping
from tokenmill.engines.fake import Fake

KEYS = {f"p{n}" for n in range(40)}


def test_prompts_of_a_dead_engine_go_elsewhere(case: Case) -> None:
    log = case.folder / "requests.jsonl"
    # Each life of a server answers its canary of 4 and 12 prompts more, then says that its engine is dead.
    args = {"slots": 4, "error-after": 16, "then-close": True, "requests": str(log), "latency-ms": 20}
    case.write(engine={"args": args})
    assert case.run() == 0
    assert_whole(case, KEYS)
    assert all(record.attempt == 1 for record in case.records())
    assert "engine is dead" in case.output()
    assert max(answered_prompts(log).values()) <= 4


def test_a_server_that_is_not_ours_is_set_aside_and_seldom_asked_again(case: Case) -> None:
    good, bad = case.port, case.port + 1
    log = case.folder / "requests.jsonl"
    flags = {"model": "m", "slots": 4, "latency_ms": 20, "requests": str(log)}
    _on_running_servers(case, (good, bad))
    with scripted_server(good, **flags), scripted_server(bad, **flags, error_after=14, then_close=True):
        assert case.run() == 0
    assert_whole(case, KEYS)
    assert all(record.attempt == 1 for record in case.records())
    begun_on_the_dead = sum(entry["port"] == bad and "begin" in entry for entry in requests(log))
    assert begun_on_the_dead <= 4 + 10 + 4, "its canary, what it answered, and what was in flight when it died"


def test_with_every_server_dead_the_run_stops_in_the_end_and_has_lost_nothing(case: Case) -> None:
    ports = (case.port, case.port + 1)
    _on_running_servers(case, ports, give_up="2s")
    with ExitStack() as servers:
        for port in ports:
            servers.enter_context(scripted_server(port, model="m", slots=4, latency_ms=20, exit_after=14))
        assert case.run() == 4
    assert "no server for give_up = 2 s" in case.output()
    stored = {record.key: record.text for record in case.records()}
    assert 8 <= len(stored) <= 20, "each answers its canary of 4 and at most 10 more"
    with ExitStack() as servers:
        for port in ports:
            servers.enter_context(scripted_server(port, model="m", slots=4))
        assert case.run() == 0
    assert_whole(case, KEYS)
    assert all(record.attempt == 1 for record in case.records())
    assert stored.items() <= {record.key: record.text for record in case.records()}.items()


def _on_running_servers(case: Case, ports: Sequence[int], **fleet: Any) -> None:
    """The config of a run on servers that are not ours."""
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    case.write(
        model={"name": "m"},
        engine={"kind": "openai", "args": {}, "addresses": addresses},
        generation={"concurrency": 4},
        fleet=fleet,
    )


def test_a_prompt_that_failed_on_one_server_comes_back_to_it_when_no_other_is_left(port: int) -> None:
    async def work() -> list[str]:
        async with pumping(Fake(), timeout_s=0.3, attempts=2) as made:
            made.open(0, port, capacity=2)
            other = made.open(1, port + 1, capacity=2)
            made.pump.hold(other)  # in doubt, with nothing in flight
            made.pump.offer([prompt(0)])
            await asyncio.sleep(0.6)  # late on the first, and kept for the second
            made.pump.close(1)
            return [record.error for record in await made.take(1, timeout_s=3)]

    flags = {"latency_ms": 5000}
    with scripted_server(port, **flags), scripted_server(port + 1, **flags):
        [error] = asyncio.run(work())
    assert "after 2 attempts" in error

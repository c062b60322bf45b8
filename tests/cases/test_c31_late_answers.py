"""C31: a late request is ended on its server before it is asked anew; no prompt is ever alive twice; auto cuts none."""

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.harness import Case, answered_prompts, assert_whole, last_turn, requests, scripted_server
from tests.pumping import prompt, pumping
from tokenmill.engines.fake import Fake
from tokenmill.engines.sglang import SGLang
from tokenmill.testing.script import Script, is_canary

ATTEMPTS = 2


def test_late_prompts_are_tried_so_often_and_never_twice_at_once(case: Case) -> None:
    log = case.folder / "requests.jsonl"
    args = {"slots": 4, "bad": 0.2, "bad-latency-ms": 3000, "latency-ms": 20, "requests": str(log)}
    generation = {"timeout": "700ms", "attempts": ATTEMPTS}
    case.write(engine={"args": args}, generation=generation, gate={"max_failed": 1.0})
    assert case.run() == 0, case.output()

    assert_whole(case, {f"p{n}" for n in range(40)})
    script, begun = Script(bad=0.2), answered_prompts(log)
    late = {record.key for record in case.records() if script.is_bad(last_turn(record))}
    assert len(late) >= 5
    for record in case.records():
        tries = ATTEMPTS if record.key in late else 1
        assert record.labels == (("aborted",) if record.key in late else ())
        assert record.attempt == begun[last_turn(record)] == tries
        assert ("no answer within" in record.error) == (record.key in late)
    assert _most_copies(log) == 1
    assert case.output().count(": started as pid") == 2, "a late answer is no reason to restart a server"


def test_a_late_request_is_aborted_on_its_server_before_it_is_asked_anew(tmp_path: Path, port: int) -> None:
    log = tmp_path / "requests.jsonl"

    async def work() -> list[tuple[str, ...]]:
        async with pumping(SGLang(), timeout_s=0.3, attempts=ATTEMPTS) as made:
            for index in range(2):
                made.open(index, port + index, capacity=2)
            made.pump.offer([prompt(number) for number in range(6)])
            records = await made.take(6)
            assert made.troubles == []
            return [record.labels for record in records]

    flags = {"latency_ms": 5000, "ignore_close": True, "requests": str(log)}
    with scripted_server(port, **flags), scripted_server(port + 1, **flags):
        assert asyncio.run(work()) == [("aborted",)] * 6
    events = requests(log)
    begun = [entry["begin"] for entry in events if "begin" in entry]
    assert len(begun) == len(set(begun)) == 6 * ATTEMPTS
    assert sorted(entry["abort"] for entry in events if "abort" in entry) == sorted(begun)
    assert _most_copies(log) == 1


def test_with_the_timeout_on_auto_no_default_of_the_library_cuts_a_long_answer(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "requests.jsonl"
    short = aiohttp.ClientTimeout(total=0.3, sock_read=0.3)
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", short)

    async def work() -> set[tuple[tuple[str, ...], int]]:
        async with aiohttp.ClientSession() as session:
            assert session.timeout == short
        async with pumping(Fake(), timeout_s=None, attempts=3) as made:
            made.open(0, port, capacity=4)
            made.pump.offer([prompt(number) for number in range(4)])
            return {(record.labels, record.attempt) for record in await made.take(4)}

    with scripted_server(port, latency_ms=1500, requests=str(log)):
        assert asyncio.run(work()) == {((), 1)}
    assert set(answered_prompts(log).values()) == {1}


def _most_copies(log: Path) -> int:
    """How many requests of one prompt any servers had at the same time."""
    alive: Counter[str] = Counter()
    most = 0
    # A server sees a closed connection a moment after the client closed it.
    for entry in sorted(requests(log), key=lambda entry: entry["t"] + 0.05 * ("begin" in entry)):
        if not is_canary(entry.get("prompt", "")) and ("begin" in entry or "end" in entry):
            alive[entry["prompt"]] += 1 if "begin" in entry else -1
            most = max(most, alive[entry["prompt"]])
    return most

"""The reference run's own shape: a machine of eight cards, seven servers on cards 0 to 6, the last card not ours."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cards import pynvml as cards
from tests.chaos.conftest import write_short_prompts
from tests.harness import Case, assert_whole
from tokenmill import events

SERVERS = 7
PROMPTS = 50_000
MACHINE = {"PYTHONPATH": str(Path(cards.__file__).parent), "TEST_CARDS": "8"}
STALL_S = 6.0
WIDTH = 64


@contextmanager
def watched() -> Iterator[dict[int, set[int]]]:
    """Who is ever seen on which card, ten times a second."""
    seen: dict[int, set[int]] = {card: set() for card in range(SERVERS + 1)}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            for card, pids in seen.items():
                pids.update(cards.holders(card))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def seven(case: Case, prompts: int, **args: Any) -> set[str]:
    case.write(
        engine={"args": {"slots": WIDTH, "latency-ms": 200, **args}},
        fleet={"gpus": list(range(SERVERS)), "servers": SERVERS, "stall_timeout": f"{STALL_S}s"},
        gate={"cohort": 200, "max_rejected": 1.0},
    )
    return write_short_prompts(case.folder / "prompts.jsonl", prompts)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_one_killed_and_one_stopped_in_the_middle(case: Case) -> None:
    keys = seven(case, PROMPTS)
    with watched() as seen:
        process = case.start(env=MACHINE)
        case.until_done(PROMPTS // 4, process, 600.0)
        servers = case.server_pids()
        os.kill(servers[1], signal.SIGKILL)
        os.kill(servers[3], signal.SIGSTOP)
        harmed = time.time()
        code = case.wait(process, 1200.0)
    assert code == 0, case.output()
    assert_whole(case, keys)
    for card in range(SERVERS):
        assert servers[card] in seen[card], f"server {card} was not on card {card} alone"
    assert seen[SERVERS] == set()
    told = dict(_troubles(case, harmed))
    assert set(told) == {"1", "3"}, told
    assert case.ended()


def _troubles(case: Case, since: float) -> Iterator[tuple[str, str]]:
    for event, _ in events.read(case.run_folder.events):
        if event.t >= since and event.level != "info" and event.server:
            print(f"{event.t - since:+.1f} s, server {event.server}: {event.text}")
            yield event.server, event.text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_all_at_once_and_one_before_the_others(case: Case) -> None:
    """Two seconds of loading, on warm caches: all that a stagger can cost is seen, nothing of what it spares."""
    seven(case, 200, **{"start-delay-s": 2})
    for stagger in ("first", "off"):
        began = time.monotonic()
        words = ("--set", f"fleet.stagger={stagger}", "--set", f"fleet.min_ready={SERVERS}")
        assert case.wait(case.command("up", str(case.config), *words, env=MACHINE), 120.0) == 0, case.output()
        print(f"stagger = {stagger}: {SERVERS} servers after {time.monotonic() - began:.1f} s")
        assert sorted(case.server_pids()) == list(range(SERVERS))
        assert case.wait(case.command("down", str(case.run_path), env=MACHINE), 60.0) == 0, case.output()

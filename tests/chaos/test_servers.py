"""Servers killed (-9) and stopped in mid-run, over real llama.cpp: noticed, named, started again; all records there."""

import os
import random
import signal
import subprocess
import time

import pytest

from tests.chaos.conftest import write_short_prompts
from tests.harness import Case, assert_whole, wait_until
from tokenmill import events
from tokenmill.events import Event
from tokenmill.machine import processes


@pytest.mark.timeout(180)
def test_a_hung_and_a_dead_server_are_noticed_and_started_again(llama: Case) -> None:
    _run(llama, prompts=150, rounds=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_hangs_and_ten_deaths_in_two_thousand_prompts(llama: Case) -> None:
    _run(llama, prompts=2000, rounds=10)


def _run(case: Case, *, prompts: int, rounds: int) -> None:
    """In each round one server is stopped at a random moment, and the other one killed while nobody knows it yet."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    keys = write_short_prompts(case.folder / "prompts.jsonl", prompts)
    case.write(fleet={"stall_timeout": "3s", "backoff": "100ms", "restarts_per_hour": 100})
    process = case.start()
    for number in range(rounds):
        case.until_done(prompts * number // rounds + rng.randrange(1, 20), process)
        wait_until(lambda: case.run_folder.status() and _ready(case) == 2, process)
        harms = dict(zip(rng.sample((0, 1), 2), ("hangs", "exit code -9"), strict=True))
        known, at, began = case.server_pids(), case.run_folder.events.stat().st_size, dict[int, float]()
        for index, what in harms.items():
            began[index] = time.time()
            os.kill(known[index], signal.SIGSTOP if what == "hangs" else signal.SIGKILL)
            time.sleep(rng.uniform(0.0, 2.0))
        for index, what in harms.items():
            event = _told(case, process, at, index, what)
            print(f"server {index}: after {event.t - began[index]:.2f} s: {event.text}")
            _started_again(case, process, index, known[index])
    assert case.wait(process, 1200) == 0, case.output()
    assert_whole(case, keys)
    assert all(record.attempt == 1 for record in case.records()), "a server's own trouble was charged to a prompt"
    assert case.leftovers() == []
    assert case.output().count(": started as pid") == 2 + 2 * rounds


def _ready(case: Case) -> int:
    status = case.run_folder.status()
    return sum(server.state == "ready" for server in status.servers) if status else 0


def _told(case: Case, process: "subprocess.Popen[str]", at: int, index: int, what: str) -> Event:
    """What events.jsonl says of it, by its kind; fails where it is not noticed at all."""

    def found() -> list[Event]:
        mine = [event for event, _ in events.read(case.run_folder.events, at) if event.server == str(index)]
        return [event for event in mine if event.level == "warn" and what in event.text]

    wait_until(found, process)
    return found()[0]


def _started_again(case: Case, process: "subprocess.Popen[str]", index: int, old: int) -> None:
    wait_until(lambda: case.server_pids().get(index, old) != old, process)
    assert not _lives(old), "the old process lives on beside the new one"


def _lives(pid: int) -> bool:
    status = processes.stat(pid)
    return status is not None and status.state not in "ZX"

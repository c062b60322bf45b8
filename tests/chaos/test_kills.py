"""tokenmill killed (-9) at random moments over real llama.cpp: every key once, servers adopted, nothing left behind."""

import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.chaos.conftest import SLOTS, Command, write_short_prompts
from tests.harness import Case, assert_whole
from tokenmill import events, store
from tokenmill.machine import processes

SERVERS = 2


@pytest.mark.timeout(180)
def test_killed_at_random_moments_every_prompt_is_there_once(llama: Case) -> None:
    _kill_and_go_on(llama, prompts=50, kills=3)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_kills_in_two_thousand_prompts(llama: Case) -> None:
    _kill_and_go_on(llama, prompts=2000, kills=20)


def _kill_and_go_on(case: Case, *, prompts: int, kills: int) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    keys = write_short_prompts(case.folder / "prompts.jsonl", prompts)
    case.write()
    pids: dict[int, int] = {}
    moments = sorted(rng.sample(range(1, prompts - 20), kills))
    for number, rows in enumerate(moments):
        process = case.start()
        # The first kill falls while servers start, the others while they generate.
        case.until_done(0 if number == 0 else rows, process)
        _sleep(process, rng.uniform(0.2, 4.0) if number == 0 else rng.uniform(0.0, 0.5))
        _kill(process)
        _assert_journal_whole(case)
        assert pids.items() <= case.server_pids().items(), f"seed {seed}: a living server was not adopted"
        pids = {index: pid for index, pid in case.server_pids().items() if pid}
        assert all(processes.stat(pid) for pid in pids.values()), f"seed {seed}: a server died with tokenmill"
    assert case.wait(case.start(), 1200) == 0, case.output()
    assert_whole(case, keys)
    assert len({bytes(record.prompt_ids) for record in case.records()}) == prompts, "an answer on another's row"
    assert case.leftovers() == []
    told = case.output()
    assert told.count(": started as pid") <= SERVERS
    assert "Traceback" not in told
    _judge_the_bill(case, prompts, kills)


def _sleep(process: "subprocess.Popen[str]", seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass


def _kill(process: "subprocess.Popen[str]") -> None:
    assert process.poll() is None, "the run was over before its kill"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def _assert_journal_whole(case: Case) -> None:
    """Only the last line may be torn: a kill can cut the write that it falls into."""
    for path in store.journals(case.run_path / "data"):
        lines = path.read_bytes().splitlines(keepends=True)
        assert all(store.is_whole(line) for line in lines[:-1])


def _judge_the_bill(case: Case, prompts: int, kills: int) -> None:
    """By the servers' own logs, canaries taken off: no more was repeated than was in flight at the kills."""
    log = "".join(path.read_text(errors="replace") for path in case.run_folder.logs.glob("server-*.log"))
    begun = len(re.findall(r"launch_slot_: .*processing task", log))
    ended = len(re.findall(r"print_timing: .*total time", log))
    states = [event.text for event, _ in events.read(case.run_folder.events) if event.kind == "state"]
    canaries = SLOTS * sum(text.endswith("→ canary") for text in states)
    passed = SLOTS * sum(text == "canary → ready" for text in states)
    print(f"{begun} begun and {ended} ended by the servers, of them at most {canaries} and at least {passed} canaries")
    in_flight = kills * SERVERS * SLOTS
    print(f"{prompts} prompts, {kills} kills, at most {in_flight} in flight at them:", end=" ")
    print(f"{begun - passed - prompts} begun again at most, {ended - passed - prompts} answered in vain at most")
    assert prompts <= begun - passed
    assert begun - canaries <= prompts + in_flight


def test_a_server_that_is_launched_at_the_moment_of_the_kill_is_not_lost(case: Case, tokenmill: Command) -> None:
    """Its process lives before state.json can name it; nobody else knows of it, and on a GPU it holds all memory."""
    case.write(fleet={"servers": 1})
    process = case.start()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        assert process.poll() is None, case.output()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert case.leftovers() == []

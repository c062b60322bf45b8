"""Conversations and retries on two raylets whose run is killed in the middle: what the nodes make meanwhile is kept,
and nothing is asked for twice. A long form of tests/unit/test_earlier.py."""

import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.test_turns import assert_conversations, write_conversations
from tests.conftest import free_port
from tests.harness import Case, requests, wait_until
from tests.ray.raylets import clean_up, node_folder, raylets, wait_for
from tokenmill import dataset
from tokenmill.core.judge import Rules

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

NODES = ("n0", "n1")


def test_a_killed_run_of_conversations_and_its_killed_retry_ask_for_nothing_twice(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    asked = write_conversations(tmp_path / "prompts.jsonl", random.Random(seed), 120)
    case = Case(tmp_path, free_port())
    with raylets(*NODES) as cluster:
        args = {"slots": 4, "latency-ms": 1000, "bad": 0.3, "requests": str(tmp_path / "requests.jsonl")}
        case.write(
            engine={"args": args},
            fleet={"cluster": "ray", "address": cluster.address, "servers": 1},
            generation={"turns": "all"},
            gate={"max_rejected": 1.0},
        )
        try:
            killed_and_gone_on_with(case)
            records = case.records()
            assert_conversations(records, asked, Rules())
            whole = [(record.key, record.sample, record.turn) for record in records]
            killed_and_gone_on_with(case, "--retry", "rejected")
            assert [(record.key, record.sample, record.turn) for record in case.records()] == whole
        finally:
            print(case.output())
            clean_up(case, *NODES)


def killed_and_gone_on_with(case: Case, *words: str) -> None:
    """Killed with both nodes at work, and left alone until they have made all that they had in hand; killed once more
    and started at once."""
    before = made(case)
    run = case.start(*words)
    at_work(case, run, before)
    kill(run)
    spools = [node_folder(case, name).path / "spool.jsonl" for name in NODES]
    wait_for(lambda: all(spool.exists() for spool in spools), 60.0)
    begun = asked_of_servers(case)
    wait_for(lambda: made(case).total() + sum(lines(spool) for spool in spools) >= begun.total(), 60.0)
    before = made(case)
    run = case.start(*words)
    at_work(case, run, before)
    kill(run)
    assert case.run(*words) == 0
    assert asked_of_servers(case).total() == made(case).total(), "an answer was made in vain"


def at_work(case: Case, run: "subprocess.Popen[str]", before: Counter[str]) -> None:
    wait_until(lambda: all(made(case)[f"{name}/0"] > before[f"{name}/0"] for name in NODES), run, 60.0)


def made(case: Case) -> Counter[str]:
    """Answers in the store by their server, superseded ones as well."""
    return Counter(brief.server for brief in dataset.briefs(case.run_path / "data") if brief.server)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def kill(run: "subprocess.Popen[str]") -> None:
    run.send_signal(signal.SIGKILL)
    run.wait()


def asked_of_servers(case: Case) -> Counter[str]:
    """What servers have begun, canaries left out."""
    begun = (one["prompt"] for one in requests(case.folder / "requests.jsonl") if "begin" in one)
    return Counter(prompt for prompt in begun if prompt.startswith(("Question", "It is")))

"""Runs on a real Ray cluster of several raylets: whatever dies, every key is there once and nothing is left behind."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.harness import Case, answered_prompts, assert_whole
from tests.ray.raylets import Raylets, clean_up, raylets, wait_for
from tests.unit.make import jsonl

pytestmark = pytest.mark.timeout(150)

ROWS = 120
KEYS = {f"k{n}" for n in range(ROWS)}
NODES = ("n0", "n1", "n2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(*NODES) as made:
        yield made


@pytest.fixture
def case(tmp_path: Path, cluster: Raylets) -> Iterator[Case]:
    made = make_case(tmp_path, cluster)
    try:
        yield made
    finally:
        print(made.output())
        clean_up(made, *NODES)


def make_case(folder: Path, cluster: Raylets) -> Case:
    jsonl(folder / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"Question {n}?"} for n in range(ROWS)])
    case = Case(folder, free_port())
    write(case, cluster)
    return case


def write(case: Case, cluster: Raylets, *, latency_ms: int = 500) -> None:
    """A config for the cluster as it is now."""
    args = {"slots": 4, "latency-ms": latency_ms, "requests": str(case.folder / "requests.jsonl")}
    case.write(engine={"args": args}, fleet={"cluster": "ray", "address": cluster.address, "servers": 1})


def test_a_machine_may_join_and_be_lost_while_the_others_work(cluster: Raylets, case: Case) -> None:
    write(case, cluster, latency_ms=2000)
    run = case.start()
    cluster.add("later", wait=False)
    wait_for(lambda: any(record.server == "later/0" for record in case.records()), 60.0)
    cluster.kill("later", case)
    lost = case.done()
    assert case.wait(run) == 0
    assert lost < ROWS, "it was over before the machine was lost"
    assert_whole(case, KEYS)
    assert "node later: it is lost" in case.output()
    assert {record.server for record in case.records()} == {f"{name}/0" for name in (*NODES, "later")}
    assert case.ended(), "something is left"


def test_a_run_that_is_killed_finds_its_nodes_at_work_and_asks_for_nothing_twice(case: Case) -> None:
    run = case.start()
    case.until_done(20, run)
    pids = {name: started(case, name) for name in NODES}
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = case.done()
    assert before < ROWS
    assert case.run() == 0
    assert_whole(case, KEYS)
    assert {name: started(case, name) for name in NODES} == pids, "a server was started anew"
    begun = answered_prompts(case.folder / "requests.jsonl")
    assert sum(begun.values()) == ROWS, "what the nodes had in hand was asked for again"


def test_rays_head_and_every_raylet_may_die_and_the_servers_are_adopted(cluster: Raylets, case: Case) -> None:
    run = case.start()
    case.until_done(20, run)
    pids = {name: started(case, name) for name in NODES}
    run.send_signal(signal.SIGKILL)
    run.wait()
    cluster.kill_all()
    assert case.done() < ROWS
    cluster.start(*NODES)
    write(case, cluster)
    assert case.run() == 0
    assert_whole(case, KEYS)
    assert {name: started(case, name) for name in NODES} == pids, "a server was started anew"


def started(case: Case, name: str) -> set[int]:
    """Every process that ever was a node's server."""
    text = case.run_folder.events.read_text()
    return {int(word) for word in re.findall(rf'started as pid (\d+)[^\n]*"server":"{name}/0"', text)}

"""Runs on a real Ray cluster of several raylets: whatever dies, every key is there once and nothing is left behind."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def make_case(folder: Path, cluster: Raylets, **args: Any) -> Case:
    jsonl(folder / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"Question {n}?"} for n in range(ROWS)])
    case = Case(folder, free_port())
    args = {"slots": 4, "latency-ms": 500, "requests": str(folder / "requests.jsonl"), **args}
    fleet = {"cluster": "ray", "address": cluster.address, "servers": 1}
    case.write(engine={"args": args}, fleet=fleet)
    return case


def test_every_machine_works_and_nothing_is_left(case: Case) -> None:
    assert case.run() == 0
    assert_whole(case, KEYS)
    assert {record.server for record in case.records()} == {f"{name}/0" for name in NODES}
    assert max(answered_prompts(case.folder / "requests.jsonl").values()) == 1
    assert case.ended()


def test_a_machine_that_is_lost_costs_only_what_was_in_flight_there_and_one_that_joins_works(
    cluster: Raylets, case: Case
) -> None:
    cluster.add("later")
    run = case.start()
    case.until_done(20, run)
    wait_for(lambda: any(record.server == "later/0" for record in case.records()))
    cluster.kill("later", case)
    lost = case.done()
    cluster.add("joins", wait=False)
    assert case.wait(run) == 0
    assert lost < ROWS, "it was over before the machine was lost"
    assert_whole(case, KEYS)
    assert "node later: it is lost" in case.output()
    assert "node joins: joined" in case.output()
    cluster.kill("joins", case)


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


def started(case: Case, name: str) -> set[int]:
    """Every process that ever was a node's server."""
    text = case.run_folder.events.read_text()
    return {int(word) for word in re.findall(rf'started as pid (\d+)[^\n]*"server":"{name}/0"', text)}

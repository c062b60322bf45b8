"""Runs on a real Ray cluster of several raylets: whatever dies, every key is there once and nothing is left behind."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import bynumber
from tests.conftest import free_port
from tests.harness import Case, answered_prompts, assert_whole
from tests.ray.raylets import Raylets, actor_pid, clean_up, node_folder, raylets, server_pids, wait_for
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

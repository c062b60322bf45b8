"""Which cards each node's servers see: those that Ray has given it, and never another job's. Ray's GPUs are numbers
that it hands out, so that machines without cards will do; NVML's part is played by tests/cards. A long form."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.cards import pynvml
from tests.conftest import free_port
from tests.harness import Case, assert_whole, wait_until
from tests.ray.raylets import Raylets, clean_up, node_folder, raylets
from tests.unit.make import jsonl
from tokenmill.machine import processes

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

ROWS = 80
MACHINES = ("none", "two", "one", "told-not-to")
PATH = os.pathsep.join(filter(None, (str(Path(pynvml.__file__).parent), os.environ.get("PYTHONPATH"))))

HOLDER = """
import sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At
ray.init(address=sys.argv[1], log_to_driver=False)
machine = next(each["NodeID"] for each in ray.nodes() if each["NodeName"] == sys.argv[2])
@ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy=At(machine, soft=False))
class Holder:
    pass
holder = Holder.remote()
ray.get(holder.__ray_ready__.remote())
print("held", flush=True)
time.sleep(600)
"""
"""Another job of the same Ray, which has one GPU of a machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    """A machine without GPUs; one with two; one whose only GPU is its fourth card, by UUID; and one with two, in whose
    shell Ray is told not to tell jobs their GPUs."""
    shell = {"PYTHONPATH": PATH, "TEST_CARDS": "4"}
    gpus = {"two": 2, "one": 1, "told-not-to": 2}
    more = {
        "one": {"CUDA_VISIBLE_DEVICES": "GPU-00000003"},
        "told-not-to": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
    }
    with raylets("none") as made:
        for name, count in gpus.items():
            made.add(name, gpus=count, env={**shell, "TEST_MACHINE": name, **more.get(name, {})})
        yield made


@contextmanager
def held(cluster: Raylets, machine: str) -> Iterator["subprocess.Popen[str]"]:
    words = [sys.executable, "-c", HOLDER, cluster.address, machine]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@contextmanager
def made(folder: Path, cluster: Raylets, gpus: str | Sequence[int | str]) -> Iterator[Case]:
    jsonl(folder / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"Question {n}?"} for n in range(ROWS)])
    case = Case(folder, free_port())
    case.write(
        engine={"args": {"slots": 1, "latency-ms": 1500}},
        fleet={"cluster": "ray", "address": cluster.address, "gpus": gpus, "servers": 0},
    )
    try:
        yield case
    finally:
        print(case.output())
        clean_up(case, *MACHINES)


def cards(case: Case, machine: str) -> set[str]:
    """What the living servers of a machine see."""
    found = set()
    for entry in node_folder(case, machine).state().servers:
        for variable in processes.environment(entry.process.pid).split(b"\0"):
            if variable.startswith(b"CUDA_VISIBLE_DEVICES="):
                found.add(variable.partition(b"=")[2].decode())
    return found


def told(case: Case, words: str) -> bool:
    return words in case.output()


def test_all_are_what_ray_gives_and_what_another_job_has_is_waited_for(tmp_path: Path, cluster: Raylets) -> None:
    with made(tmp_path, cluster, "all") as case:
        with held(cluster, "told-not-to"):
            run = case.start()
            wait_until(lambda: (cards(case, "two"), cards(case, "one")) == ({"0", "1"}, {"3"}), run, 90.0)
            wait_until(lambda: "node told-not-to: waits for its 2 GPUs" in case.output(), run, 60.0)
            assert cards(case, "told-not-to") == set()
        wait_until(lambda: cards(case, "told-not-to") == {"0", "1"}, run, 60.0)
        assert case.wait(run, 200.0) == 0
        assert_whole(case, {f"k{n}" for n in range(ROWS)})
        assert not node_folder(case, "none").exists


def test_named_ones_are_used_where_ray_gives_them_and_nowhere_else(tmp_path: Path, cluster: Raylets) -> None:
    with made(tmp_path, cluster, [0]) as case, held(cluster, "told-not-to"):
        run = case.start()
        wait_until(lambda: cards(case, "two") == {"0"}, run, 90.0)
        for machine, given in (("one", "GPU 3"), ("told-not-to", "GPU 1")):
            words = f"node {machine}: fleet.gpus names GPU 0, and the cluster has given this node {given}"
            wait_until(partial(told, case, words), run, 60.0)
        assert case.wait(run, 200.0) == 0
        assert {record.server for record in case.records()} == {"two/0"}


def test_a_run_that_ends_while_a_node_waits_leaves_nothing_in_rays_queue(tmp_path: Path, cluster: Raylets) -> None:
    with made(tmp_path, cluster, "all") as case:
        with held(cluster, "told-not-to"):
            run = case.start()
            wait_until(lambda: "node told-not-to: waits for its 2 GPUs" in case.output(), run, 120.0)
            assert case.wait(run, 200.0) == 0
        with held(cluster, "told-not-to"), held(cluster, "told-not-to"):
            pass  # both are free: nobody waits for them any more

"""Runs on a real Ray cluster of several raylets: whatever dies, every key is there once and nothing is left behind."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.harness import Case, answered_prompts, assert_whole, wait_until
from tests.ray.raylets import Raylets, actor_pid, clean_up, raylets, wait_for
from tests.unit.make import jsonl
from tokenmill import environment
from tokenmill.machine import processes
from tokenmill.servers import status_of

pytestmark = pytest.mark.timeout(240)

ROWS = 120
KEYS = {f"k{n}" for n in range(ROWS)}
NODES = ("n0", "n1", "n2")


@pytest.fixture
def cluster() -> Iterator[Raylets]:
    with raylets(*NODES) as made:
        yield made


@contextmanager
def made(folder: Path, cluster: Raylets, **how: int) -> Iterator[Case]:
    """A case of its own, and nothing left of it afterwards."""
    folder.mkdir()
    jsonl(folder / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"Question {n}?"} for n in range(ROWS)])
    case = Case(folder, free_port())
    write(case, cluster, **how)
    try:
        yield case
    finally:
        print(case.output())
        clean_up(case, *NODES, "later")


def write(case: Case, cluster: Raylets, *, latency_ms: int = 500) -> None:
    """A config for the cluster as it is now."""
    args = {"slots": 4, "latency-ms": latency_ms, "requests": str(case.folder / "requests.jsonl")}
    case.write(engine={"args": args}, fleet={"cluster": "ray", "address": cluster.address, "servers": 1})


def test_machines_and_runs_may_come_and_go(tmp_path: Path, cluster: Raylets) -> None:
    """One cluster for both: it takes longer to start than to use."""
    with made(tmp_path / "run", cluster, latency_ms=1500) as case:
        a_run_is_killed_and_finds_its_nodes_at_work(case)
    with made(tmp_path / "machine", cluster, latency_ms=1500) as case:
        a_machine_joins_and_is_lost_while_the_others_work(case, cluster)


def a_run_is_killed_and_finds_its_nodes_at_work(case: Case) -> None:
    run = case.start()
    pids = at_work(case, run)
    assert nodes(case) == {(name, "ready", 1) for name in NODES}
    assert {row.node for row in environment.read(case.run_folder.environment)} == {"", *NODES}
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert case.done() < ROWS
    assert nodes(case) == {(name, "alone", 0) for name in NODES}
    assert case.run() == 0
    assert nodes(case) == {(name, "ended", 0) for name in NODES}
    assert_whole(case, KEYS)
    assert {name: started(case, name) for name in NODES} == pids, "a server was started anew"
    begun = answered_prompts(case.folder / "requests.jsonl")
    assert sum(begun.values()) == ROWS, "what the nodes had in hand was asked for again"
    assert left(case) == set(), "servers are left"


def a_machine_joins_and_is_lost_while_the_others_work(case: Case, cluster: Raylets) -> None:
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
    assert left(case) == set(), "servers are left"


@pytest.mark.long
def test_the_nodes_of_a_dead_run_are_ended_by_down_and_plan_and_doctor_ask_the_machines(
    tmp_path: Path, cluster: Raylets
) -> None:
    with made(tmp_path / "down", cluster, latency_ms=1500) as case:
        run = case.start()
        at_work(case, run)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert case.wait(case.command("plan", str(case.config))) == 0
        assert "3 on 3 nodes" in case.output()
        assert case.wait(case.command("doctor", str(case.config))) == 0
        assert re.search("ok +capacity +every node", case.output())
        assert case.wait(case.command("down", str(case.run_path)), 100.0) == 0
        assert "3 servers ended" in case.output()
        assert left(case) == set()
        assert nodes(case) == {(name, "gone", 0) for name in NODES}
        assert case.run() == 0
        assert_whole(case, KEYS)


@pytest.mark.long
def test_rays_head_and_every_raylet_may_die_and_the_servers_are_adopted(tmp_path: Path, cluster: Raylets) -> None:
    with made(tmp_path / "head", cluster, latency_ms=1500) as case:
        run = case.start()
        pids = at_work(case, run)
        run.send_signal(signal.SIGKILL)
        run.wait()
        cluster.kill_all()
        assert case.done() < ROWS
        cluster.start(*NODES)
        write(case, cluster, latency_ms=1500)
        assert case.run() == 0
        assert_whole(case, KEYS)
        assert {name: started(case, name) for name in NODES} == pids, "a server was started anew"


@pytest.mark.long
def test_sigterm_lets_what_is_in_flight_end(tmp_path: Path, cluster: Raylets) -> None:
    """Ray's own handler would abort the run after 3 s."""
    with made(tmp_path / "term", cluster, latency_ms=5000) as case:
        run = case.start()
        wait_until(lambda: case.done() > 0, run, 100.0)
        run.send_signal(signal.SIGTERM)
        assert case.wait(run) == 130
        assert "stopped: " in case.output()
        assert left(case) == set(), "servers are left"


@pytest.mark.long
def test_a_node_whose_process_dies_is_replaced_and_its_servers_are_adopted(tmp_path: Path, cluster: Raylets) -> None:
    with made(tmp_path / "actor", cluster, latency_ms=2500) as case:
        run = case.start()
        pids = at_work(case, run)
        os.kill(actor_pid(case, "n1"), signal.SIGKILL)
        assert case.wait(run, 100.0) == 0
        assert_whole(case, KEYS)
        assert case.output().count("node n1: joined") == 2
        assert {name: started(case, name) for name in NODES} == pids, "a server was started anew"


@pytest.mark.long
def test_nodes_whose_run_does_not_come_back_end_themselves_and_forget_nothing(tmp_path: Path, cluster: Raylets) -> None:
    with made(tmp_path / "orphans", cluster) as case:
        text = case.config.read_text()
        case.config.write_text(text.replace("[fleet]", '[fleet]\nwait_for_head = "8s"'))
        run = case.start()
        case.until_done(12, run)
        pids = [actor_pid(case, name) for name in NODES]
        run.send_signal(signal.SIGKILL)
        run.wait()
        wait_for(lambda: not left(case), 60.0)
        wait_for(lambda: all(processes.stat(pid) is None for pid in pids))
        assert case.run() == 0
        assert_whole(case, KEYS)
        begun = answered_prompts(case.folder / "requests.jsonl")
        assert sum(begun.values()) == ROWS, "what the nodes had made was asked for again"


@pytest.mark.long
def test_a_node_that_failed_does_not_end_the_run_while_a_lost_one_is_awaited(tmp_path: Path, cluster: Raylets) -> None:
    with made(tmp_path / "alone", cluster, latency_ms=500) as case:
        (case.run_path / "nodes").mkdir(parents=True)
        for name in ("n0", "n2"):
            (case.run_path / "nodes" / name).write_text("in the way of a node's folder")
        run = case.start()
        case.until_done(12, run)
        os.kill(actor_pid(case, "n1"), signal.SIGKILL)
        assert case.wait(run, 100.0) == 0
        assert {record.key for record in case.records()} == KEYS
        for name in ("n0", "n2"):
            (case.run_path / "nodes" / name).unlink()


@pytest.mark.long
def test_whoever_leaves_while_rays_head_is_away_may(tmp_path: Path) -> None:
    """Ray would abort the process a minute after its head: no report, and the run counts as killed."""
    with raylets(*NODES) as cluster, made(tmp_path / "away", cluster, latency_ms=2500) as case:
        run = case.start()
        case.until_done(1, run)
        cluster.kill_all()
        run.send_signal(signal.SIGINT)
        wait_until(lambda: "SIGINT: " in case.output(), run, 10.0)
        run.send_signal(signal.SIGINT)
        assert case.wait(run) == 130
        assert "its nodes are left" in case.output()
        assert "Traceback" not in case.output()
        assert case.wait(case.command("down", str(case.run_path))) == 0
        assert left(case) == set()


def left(case: Case) -> set[int]:
    """Servers that still live."""
    every = {pid for name in (*NODES, "later") for pid in started(case, name)}
    assert every
    return {pid for pid in every if (stat := processes.stat(pid)) is not None and stat.state not in "ZX"}


def nodes(case: Case) -> set[tuple[str, str, int]]:
    """As `status` shows them: name, state, servers."""
    return {(row.node, row.state, row.servers) for row in status_of(case.run_folder).nodes}


def at_work(case: Case, run: "subprocess.Popen[str]") -> dict[str, set[int]]:
    """Waits until every node has made something; returns the processes of its server so far."""
    names = {f"{name}/0" for name in NODES}
    wait_until(lambda: names <= {record.server for record in case.records()}, run, 50.0)
    return {name: started(case, name) for name in NODES}


def started(case: Case, name: str) -> set[int]:
    """Every process that ever was a node's server."""
    text = case.run_folder.events.read_text()
    return {int(word) for word in re.findall(rf'started as pid (\d+)[^\n]*"server":"{name}/0"', text)}

"""Runs on machines with addresses of their own: real llama.cpp servers, machines that die or are cut off, and what must
not be seen by whoever shares the network. A long form."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port
from tests.harness import Case, answered_prompts, assert_whole, wait_until
from tests.ray.network import Network, network
from tests.ray.raylets import clean_up, node_folder, server_pids, wait_for
from tests.unit.make import jsonl
from tokenmill.machine import processes
from tokenmill.quickstart import find_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NODES = ("n0", "n1", "n2", "n3")
SECRETS = {"engine.env": "sk-of-an-engine-0417", "api_key_env": "sk-of-a-shell-2205"}


@pytest.fixture(scope="module")
def machines() -> Iterator[Network]:
    with network(*NODES, env={"CASE_KEY": SECRETS["api_key_env"]}) as made:
        yield made


@contextmanager
def made(folder: Path, rows: int, **settings: Any) -> Iterator[Case]:
    jsonl(folder / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"Question {n}?"} for n in range(rows)])
    case = Case(folder, free_port())
    case.settings = {"fleet": {"cluster": "ray", "address": "10.213.77.1:6379", "servers": 1}, **settings}
    case.write()
    try:
        yield case
    finally:
        print(case.output())
        clean_up(case, *NODES)


def scripted(folder: Path, latency_ms: int) -> dict[str, Any]:
    args = {"slots": 4, "latency-ms": latency_ms, "requests": str(folder / "requests.jsonl")}
    return {"args": args}


def start(case: Case, machines: Network) -> "subprocess.Popen[str]":
    return case.start(under=machines.words("n0"), env={"RAY_AUTH_MODE": "disabled"})


def all_at_work(case: Case, run: "subprocess.Popen[str]") -> None:
    names = {f"{name}/0" for name in NODES}
    wait_until(lambda: names <= {record.server for record in case.records()}, run, 240.0)


def heard_beyond(machines: Network, name: str) -> set[int]:
    """The processes on a machine that listen where others can reach them."""
    found: set[int] = set()
    for line in machines.on(name, "ss", "-ltnpH").splitlines():
        where = line.split()[3].rpartition(":")[0].strip("[]")
        if where not in ("127.0.0.1", "::1", "[::ffff:127.0.0.1]", "::ffff:127.0.0.1"):
            found |= {int(word.partition(",")[0]) for word in line.split("pid=")[1:]}
    return found


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def memory_has(pid: int, needle: bytes) -> bool:
    """Whether a process has it anywhere in its memory."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            start, end = (int(word, 16) for word in span.split("-"))
            if "w" in rights and end - start < 1 << 30:
                try:
                    memory.seek(start)
                    if needle in memory.read(end - start):
                        return True
                except OSError:
                    continue  # not backed by anything
    return False


def test_a_machine_dies_under_real_servers_and_nothing_of_ours_is_seen(tmp_path: Path, machines: Network) -> None:
    with made(
        tmp_path,
        200,
        model={"path": str(find_model(print))},
        engine={
            "kind": "llamacpp",
            "args": {"parallel": 4, "ctx-size": 4096, "threads": 1},
            "env": {"ENGINE_KEY": SECRETS["engine.env"]},
            "api_key_env": "CASE_KEY",
        },
        fleet={"cluster": "ray", "address": machines.address, "servers": 1, "start_timeout": "120s"},
        generation={"thinking": False, "max_tokens": 12},
        gate={"cohort": 20, "max_rejected": 1.0, "max_truncated": 1.0},
    ) as case:
        run = start(case, machines)
        all_at_work(case, run)
        only_ray_is_heard(case, machines, run.pid)
        no_secret_is_told(machines)
        machines.kill("n2")
        lost = case.done()
        assert case.wait(run, 400.0) == 0
        assert lost < 200, "it was over before the machine was lost"
        assert_whole(case, {f"k{n}" for n in range(200)})
    machines.start_ray("n2")


def only_ray_is_heard(case: Case, machines: Network, run: int) -> None:
    for name in NODES:
        (server,) = server_pids(case, name)
        for pid in heard_beyond(machines, name):
            assert pid != server, command(pid)
            words = command(pid)
            assert pid == run or "ray" in words, f"{name}: {words}"
        # Ray's own port of a driver and of an actor: one each.
        for pid in {run, node_folder(case, name).owner().process.pid} & set(machines.pids(name)):  # type: ignore[union-attr]
            lines = [line for line in machines.on(name, "ss", "-ltnpH").splitlines() if f"pid={pid}," in line]
            assert len(lines) <= 1, lines


def no_secret_is_told(machines: Network) -> None:
    for what, secret in SECRETS.items():
        needle = secret.encode()
        for name in NODES:
            logs = machines.on(name, "sh", "-c", f"grep -rl -e {secret} {machines.folder} /dev/shm || true")
            assert logs == "", f"{what} in {logs}"
            assert not any(secret in command(pid) for pid in machines.pids(name))
        # What Ray's head knows of actors, jobs and tasks is in its memory. A shell's variables are in every process'.
        (head,) = (pid for pid in machines.pids("n0") if "gcs_server" in command(pid).split()[0])
        if what == "engine.env":
            assert not memory_has(head, needle), f"{what} in the memory of Ray's head"


def test_a_machine_that_is_cut_off_gives_its_records_once(tmp_path: Path, machines: Network) -> None:
    rows = 400
    with made(tmp_path, rows, engine=scripted(tmp_path, 4000)) as case:
        run = start(case, machines)
        all_at_work(case, run)
        servers = server_pids(case, "n3")
        machines.cut("n3")
        spool = node_folder(case, "n3").path / "spool.jsonl"
        wait_for(lambda: "node n3: it is lost" in case.output(), 90.0)
        wait_for(spool.exists, 30.0)
        machines.mend("n3")
        raylet_ends(machines, "n3")
        machines.start_ray("n3")
        wait_until(lambda: case.output().count("node n3: joined") == 2, run, 120.0)
        assert case.wait(run, 300.0) == 0
        assert_whole(case, {f"k{n}" for n in range(rows)})
        assert "(raylet)" not in case.output(), "Ray writes over the view"
        assert server_pids(case, "n3") in (servers, []), "a server was started anew"


def raylet_ends(machines: Network, name: str) -> None:
    """Ray's head has given it up, and tells it so."""
    wait_for(lambda: not any("raylet/raylet" in command_or_none(pid) for pid in machines.pids(name)), 90.0)


def command_or_none(pid: int) -> str:
    try:
        return command(pid)
    except OSError:
        return ""


def test_the_run_and_then_rays_head_may_be_killed(tmp_path: Path, machines: Network) -> None:
    with made(tmp_path, 200, engine=scripted(tmp_path, 1500)) as case:
        run = start(case, machines)
        all_at_work(case, run)
        run.send_signal(signal.SIGKILL)
        run.wait()
        run = start(case, machines)
        wait_until(lambda: case.output().count("node n1: brings") == 1, run, 90.0)
        begun = answered_prompts(tmp_path / "requests.jsonl")
        assert max(begun.values()) == 1, "what a node had in hand was asked for again"
        before = case.done()
        for name in NODES:
            for pid in machines.pids(name):
                if pid not in server_pids(case, name):
                    os.kill(pid, signal.SIGKILL)
        run.wait()
        assert before < 200
        time.sleep(1.0)
        for name in NODES:
            machines.start_ray(name)
        assert case.wait(start(case, machines), 300.0) == 0
        assert_whole(case, {f"k{n}" for n in range(200)})


def test_a_machine_that_never_comes_back_has_no_servers_for_long(tmp_path: Path, machines: Network) -> None:
    with made(
        tmp_path,
        100,
        engine=scripted(tmp_path, 500),
        fleet={"cluster": "ray", "address": machines.address, "servers": 1, "wait_for_head": "10s"},
    ) as case:
        run = start(case, machines)
        all_at_work(case, run)
        servers = server_pids(case, "n1") + server_pids(case, "n2")
        for name, number in (("n1", signal.SIGKILL), ("n2", signal.SIGTERM)):
            for pid in machines.pids(name):
                if "raylet/raylet" in command_or_none(pid):
                    os.kill(pid, number)
        assert case.wait(run, 200.0) == 0
        wait_for(lambda: not any(lives(pid) for pid in servers), 60.0)
        assert_whole(case, {f"k{n}" for n in range(100)})
    for name in ("n1", "n2"):
        machines.start_ray(name)


def lives(pid: int) -> bool:
    stat = processes.stat(pid)
    return stat is not None and stat.state not in "ZX"

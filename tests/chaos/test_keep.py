"""Servers that outlive a run: kept after Ctrl-C, adopted by the next start, and ended by `down`, they alone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.chaos.conftest import Command, write_short_prompts
from tests.harness import Case, answered_prompts, assert_whole, last_turn, wait_until
from tokenmill.engines import llamacpp_server
from tokenmill.machine import processes

ONLY_THE_SECOND = {"slots": 4, "number": "{index}", "only": 1}
KEYS = {f"p{n}" for n in range(40)}


def _all_live(pids: dict[int, int]) -> bool:
    return all((status := processes.stat(pid)) is not None and status.state not in "ZX" for pid in pids.values())


@contextmanager
def _namesake(port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of somebody else's, with the command line that our servers have."""
    words = [str(Path(llamacpp_server.__file__)), "--model", "m.gguf", "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(120)
def test_up_status_logs_run_and_down_on_real_servers(llama: Case, tokenmill: Command) -> None:
    keys = write_short_prompts(llama.folder / "prompts.jsonl", 12)
    llama.write(fleet={"keep_servers": "always"})
    with _namesake(llama.port) as foreign:
        assert llama.wait(llama.command("up", str(llama.config))) == 0, llama.output()
        assert "case: up, 2/2 servers ready" in llama.output()
        pids = llama.server_pids()
        assert _all_live(pids)
        code, status = tokenmill("status", llama.run_path, "--json")
        found: dict[str, Any] = json.loads(status)
        assert (code, found["state"]) == (0, "up")
        assert {server["pid"]: server["state"] for server in found["servers"]} == dict.fromkeys(pids.values(), "ready")
        code, logs = tokenmill("logs", llama.run_path, "1")
        assert (code, "[0] " in logs) == (0, False)
        assert f"listening on http://127.0.0.1:{llama.port + 1}" in logs
        code, said = tokenmill("run", llama.config)
        assert code == 0, said
        assert_whole(llama, keys)
        assert ": started as pid" not in said, "run did not take the servers that were up"
        assert llama.server_pids() == pids
        assert _all_live(pids)
        said = tokenmill("down", llama.run_path)[1]
        assert "2 servers ended" in said
        assert all(f"server {index} ended: pid {pid}, port {llama.port + index}" in said for index, pid in pids.items())
        assert llama.leftovers() == []
        assert foreign.poll() is None
    assert tokenmill("down", llama.run_path) == (0, "no server is left\n")


def _up(case: Case) -> tuple[int, str]:
    """In a process of its own, which its servers outlive."""
    before = len(case.output())
    code = case.wait(case.command("up", str(case.config)))
    return code, case.output()[before:]


def test_up_that_fails_says_what_failed_and_leaves_with_4(case: Case, tokenmill: Command) -> None:
    words = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
    case.write(engine={"args": {"exit-at-start": True, "exit-code": 1, "log": words}})
    code, said = _up(case)
    assert code == 4
    assert words in said, "the log's decisive line"
    assert "server 0, 1: out of memory, as scripted (exit code 1)" in said
    assert "0/2 servers ready" in tokenmill("status", case.run_path)[1]
    assert case.leftovers() == []


def test_up_with_min_ready_servers_says_which_one_is_missing(case: Case, tokenmill: Command) -> None:
    case.write(engine={"args": {**ONLY_THE_SECOND, "exit-after-line": 0, "exit-code": 2}})
    code, said = _up(case)
    assert code == 0, said
    assert "1 of 2 servers are ready; server 1: the scripted server refuses a flag (exit code 2)" in said
    code, said = tokenmill("status", case.config)
    assert code == 0
    assert "case: up, 1/2 servers ready" in said
    assert "the scripted server refuses a flag" in said
    assert "1 server ended" in tokenmill("down", case.config)[1]


def test_ctrl_c_in_up_leaves_what_is_ready_and_ends_the_rest(case: Case, tokenmill: Command) -> None:
    case.write(engine={"args": {"slots": 4, "start-delay-s": "{index}00"}})
    process = case.command("up", str(case.config))
    wait_until(lambda: "server 0: ready" in case.output(), process)
    process.send_signal(signal.SIGINT)
    assert case.wait(process, 15) == 130, case.output()
    (left,) = case.leftovers()
    assert case.server_pids() == {0: left}
    assert "server 1 ended: pid " in case.output()
    assert f"fix: tokenmill down {case.run_path}" in case.output()
    os.kill(left, signal.SIGKILL)
    assert case.ended()
    assert "it has ended since" in tokenmill("status", case.run_path)[1]
    assert tokenmill("down", case.run_path)[0] == 0
    assert "case: stopped, no servers" in tokenmill("status", case.run_path)[1]


def test_up_takes_servers_that_run_already_and_says_so(case: Case, tokenmill: Command) -> None:
    case.write()
    assert _up(case)[0] == 0
    pids = case.server_pids()
    code, said = _up(case)
    assert code == 0
    assert all(f"server {index}: adopts pid {pid} " in said for index, pid in pids.items())
    assert ": started as pid" not in said
    assert case.server_pids() == pids


def test_down_finds_what_a_killed_tokenmill_left_and_nothing_else(case: Case, tokenmill: Command) -> None:
    case.write(engine={"args": {"slots": 4, "latency-ms": 200, "child": True}})
    process = case.start()
    wait_until(lambda: (now := case.run_folder.status()) and [s.state for s in now.servers] == ["ready"] * 2, process)
    process.kill()
    process.wait()
    assert "case: killed, 2/2 servers ready" in tokenmill("status", case.run_path)[1]
    left = case.leftovers()
    assert len(left) == 4
    code, said = tokenmill("down", "--now", case.run_path)
    assert code == 0
    assert all(str(pid) in said for pid in left), "each process that it ended"
    assert "2 servers ended" in said
    assert case.leftovers() == []


def test_a_run_is_meant_by_its_folder_its_config_or_by_being_the_only_one(
    case: Case, tokenmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(case.folder)
    case.write()
    assert tokenmill("status")[0] == 2
    assert tokenmill("status", case.config) == (
        2,
        f"tokenmill: the run of {case.config} has not been started: there is no {case.run_path}\n",
    )
    assert case.run() == 0
    said = tokenmill("status", case.run_path)
    assert said[1].startswith("case: done, no servers\n")
    for run in ([], [case.config], [case.run_path / "config.toml"]):
        assert tokenmill("status", *run) == said
        assert json.loads(tokenmill("status", *run, "--json")[1])["state"] == "done"
        assert tokenmill("down", *run) == (0, "no server is left\n")
        assert tokenmill("report", *run)[0] == 0
    assert tokenmill("inspect", case.config)[0] == 0
    (case.folder / "runs" / "other").mkdir()
    (case.folder / "runs" / "other" / "state.json").write_text("{}")
    assert tokenmill("status")[0] == 2


def _interrupt_in_the_middle(case: Case, **config: Any) -> Path:
    """A run that Ctrl-C ends after eight rows; returns the servers' own notes."""
    log = case.folder / "requests.jsonl"
    case.write(engine={"args": {"slots": 4, "latency-ms": 100, "requests": str(log)}}, **config)
    process = case.start()
    case.until_done(8, process)
    process.send_signal(signal.SIGINT)
    assert case.wait(process) == 130, case.output()
    assert {last_turn(record) for record in case.records()} == set(answered_prompts(log)), "not all in flight is stored"
    return log


def test_servers_are_kept_when_a_run_is_stopped_and_taken_by_the_next(case: Case, tokenmill: Command) -> None:
    log = _interrupt_in_the_middle(case, fleet={"keep_servers": "stopped"})
    pids = case.server_pids()
    assert len(pids) == 2
    assert _all_live(pids)
    assert set(case.leftovers()) == set(pids.values())
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert ": started as pid" not in said, "the next run started servers of its own"
    assert f"server 0: adopts pid {pids[0]} " in said
    assert_whole(case, KEYS)
    assert set(answered_prompts(log).values()) == {1}
    assert case.leftovers() == [], "kept for a stopped run only, and this one is done"


@pytest.mark.long
def test_kept_servers_that_a_config_no_longer_fits_are_replaced(case: Case) -> None:
    _interrupt_in_the_middle(case, fleet={"keep_servers": "stopped"})
    pids = case.server_pids()
    assert case.run("--set", "engine.args={slots = 2}", "--set", "fleet.servers=1") == 0, case.output()
    words = "it was launched with another flag latency-ms, flag requests, flag slots"
    assert f"server 0, pid {pids[0]}, is ended: {words}" in case.output()
    assert f"server 1, pid {pids[1]}, is ended: this run has no such server" in case.output()
    assert_whole(case, KEYS)
    assert case.leftovers() == []


@pytest.mark.long
def test_a_changed_template_ends_the_servers_that_have_the_old_one(case: Case) -> None:
    def up() -> dict[int, int]:
        assert case.wait(case.command("up", str(case.config))) == 0, case.output()
        return case.server_pids()

    models.as_bytes(models.usual(case.folder / "model"))
    case.write(model={"path": str(case.folder / "model")}, stage={"to": "off"})
    first = up()
    assert up() == first
    (case.folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert set(up().values()).isdisjoint(first.values())
    assert f"server 0, pid {first[0]}, is ended: it was launched with another model" in case.output()
    assert case.wait(case.command("down", str(case.run_path))) == 0
    assert case.ended()

"""Terminals, pipes and signals: a lost terminal ends nothing, Ctrl-C drains and then cuts, one run has one owner."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import Command
from tests.harness import Case, answered_prompts, assert_whole, last_turn, wait_until

KEYS = {f"p{n}" for n in range(40)}
SLOTS = 8


def _slow(case: Case, latency_ms: int, **flags: Any) -> Path:
    """A run of 40 prompts, eight at a time; returns the server's own notes."""
    log = case.folder / "requests.jsonl"
    args = {"slots": SLOTS, "latency-ms": latency_ms, "requests": str(log), **flags}
    case.write(engine={"args": args}, fleet={"servers": 1})
    return log


@dataclass
class Terminal:
    """The far end of a pseudo-terminal, and the run in it."""

    process: "subprocess.Popen[bytes]"
    end: int
    shown: bytearray

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def close(self) -> None:
        """As when a connection breaks: the kernel sends SIGHUP, and what is written from now on fails with EIO."""
        if self.end >= 0:
            os.close(self.end)
        self.end = -1


@contextmanager
def _terminal(case: Case) -> Iterator[Terminal]:
    """`tokenmill run` in a terminal of its own, whose screen is read all the time, as terminals do."""
    end, near = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "tokenmill", "run", str(case.config)],
        stdin=near,
        stdout=near,
        stderr=near,
    )
    os.close(near)
    terminal = Terminal(process, end, bytearray())
    reader = threading.Thread(target=_read_on, args=(end, terminal.shown), daemon=True)
    reader.start()
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        terminal.close()
        reader.join()


def _read_on(end: int, into: bytearray) -> None:
    try:
        while data := os.read(end, 1 << 16):
            into += data
    except OSError:
        return  # the last process in the terminal has ended, or the terminal was closed


def _run_log(case: Case) -> str:
    return (case.run_path / "run.log").read_text()


# -- lost terminals ----------------------------------------------------------------------------------------------------
def test_a_run_whose_terminal_is_closed_goes_on_to_its_end(case: Case) -> None:
    _slow(case, 150)
    with _terminal(case) as terminal:
        wait_until(lambda: case.done() >= 8, terminal.process)
        assert b"40" in terminal.shown
        terminal.close()
        assert terminal.process.wait(30) == 0
    assert_whole(case, KEYS)
    assert "SIGHUP" in _run_log(case)
    assert "done: 40 accepted" in _run_log(case)
    assert "Traceback" not in _run_log(case)


def test_a_run_whose_reader_has_gone_ends_well(case: Case) -> None:
    _slow(case, 20)
    run = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", "run", str(case.config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert run.stdout is not None
    with run.stdout:
        first = subprocess.run(["head", "-1"], stdin=run.stdout, capture_output=True, timeout=30, check=True)
    assert run.wait(30) == 0
    assert first.stdout.count(b"\n") == 1
    assert_whole(case, KEYS)
    assert "done: 40 accepted" in _run_log(case)


@pytest.mark.parametrize(
    "closed",
    [">&- 2>&- <&-", pytest.param(">&-", marks=pytest.mark.long), pytest.param("2>&-", marks=pytest.mark.long)],
)
def test_a_run_without_standard_streams_ends_well(case: Case, closed: str) -> None:
    """As some daemons and cron jobs start theirs."""
    _slow(case, 20)
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "tokenmill", "run", str(case.config)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0
    assert_whole(case, KEYS)
    assert list((case.run_path / "data").glob("part-*.parquet")), "it was not sealed"
    assert "done: 40 accepted" in _run_log(case)


@pytest.mark.long
def test_a_run_that_was_stopped_for_a_while_does_not_blame_its_servers(case: Case) -> None:
    """Ctrl-Z and fg, a frozen container: nobody looked, so nobody knows of any silence."""
    case.write(engine={"args": {"slots": SLOTS, "start-delay-s": 0.5}}, fleet={"servers": 1, "stall_timeout": "1500ms"})
    process = case.start()
    wait_until(case.server_pids, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    assert case.wait(process) == 0, case.output()
    assert case.output().count(": started as pid") == 1
    assert_whole(case, KEYS)


# -- Ctrl-C and SIGTERM ------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_once_lets_what_is_in_flight_end(case: Case, how: str) -> None:
    log = _slow(case, 500)
    with _terminal(case) as terminal:
        wait_until(lambda: answered_prompts(log).total() >= SLOTS + 1, terminal.process)
        _interrupt(terminal, how)
        assert terminal.process.wait(30) == 130, terminal.shown.decode()
    begun = answered_prompts(log)
    assert SLOTS < len(begun) < 40, "no new prompts after the signal"
    assert {last_turn(record) for record in case.records()} == set(begun)
    assert case.leftovers() == []
    assert case.run_folder.status().state == "stopped"  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_twice_cuts_what_is_in_flight(case: Case, how: str) -> None:
    log = _slow(case, 0, **{"hang-after": SLOTS})  # it answers its canary, and nothing after that
    with _terminal(case) as terminal:
        wait_until(lambda: answered_prompts(log).total() >= SLOTS, terminal.process)
        _interrupt(terminal, how)
        wait_until(lambda: b"once more cuts" in terminal.shown, terminal.process)
        time.sleep(0.5)
        assert terminal.process.poll() is None, "the first one waits"
        _interrupt(terminal, how)
        assert terminal.process.wait(30) == 130, terminal.shown.decode()
    assert case.records() == []
    assert case.leftovers() == []


def test_ctrl_c_while_servers_start_ends_them_at_once(case: Case) -> None:
    _slow(case, 0, **{"start-delay-s": 600.0})
    process = case.start()
    wait_until(case.server_pids, process)
    process.send_signal(signal.SIGINT)
    assert case.wait(process, 15) == 130, case.output()
    assert case.leftovers() == []


def test_the_second_ctrl_c_does_not_wait_for_servers_that_do_not_want_to_end(case: Case) -> None:
    """STOP_GRACE_S is 20 s."""
    _slow(case, 0, **{"hang-after": SLOTS, "ignore-sigterm": True})
    process = case.start()
    wait_until(lambda: (status := case.run_folder.status()) and status.state == "generating", process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert case.wait(process, 10) == 130, case.output()
    assert case.leftovers() == []


def _interrupt(terminal: Terminal, how: str) -> None:
    if how == "Ctrl-C":
        terminal.type("\x03")
    else:
        terminal.process.send_signal(signal.SIGTERM)


# -- one owner ---------------------------------------------------------------------------------------------------------
def test_a_detached_run_is_watched_to_its_end_and_a_second_start_harms_nothing(case: Case, tokenmill: Command) -> None:
    log = _slow(case, 700)
    assert case.wait(case.command("run", str(case.config), "--detach")) == 0, case.output()
    assert len(answered_prompts(log)) > 0, "it returns once generation has begun"
    owner = case.run_folder.owner()
    assert owner is not None, "it returned after the end of the run"
    pid = owner.process.pid
    assert case.output() == f"running as pid {pid}; follow it with: tokenmill watch {case.run_path}\n"
    code, said = tokenmill("run", case.config)
    assert code == 2
    assert f"is in use by tokenmill run, pid {pid} on " in said
    assert "tokenmill watch" in said
    code, said = tokenmill("watch", case.run_path)
    assert code == 0
    assert "case: done" in said
    assert "40/40 done: 40 accepted" in said
    assert case.run_folder.owner() is None
    assert case.ended()
    assert_whole(case, KEYS)
    assert set(answered_prompts(log).values()) == {1}


def test_down_lets_a_live_run_end_what_is_in_flight(case: Case, tokenmill: Command) -> None:
    log = _slow(case, 500)
    assert case.wait(case.command("run", str(case.config), "--detach")) == 0, case.output()
    assert case.run_folder.owner() is not None
    code, said = tokenmill("down", case.run_path)
    assert code == 0, said
    assert case.run_folder.owner() is None
    assert case.ended()
    begun = answered_prompts(log)
    assert SLOTS <= len(begun) < 40
    assert {last_turn(record) for record in case.records()} == set(begun)


def test_a_second_down_does_not_cut_what_the_first_one_lets_end(case: Case, tokenmill: Command) -> None:
    log = _slow(case, 2000, **{"quick-canary": True})
    process = case.start()
    wait_until(lambda: answered_prompts(log).total() >= SLOTS, process)
    first = case.command("down", str(case.run_path))
    wait_until(lambda: (status := case.run_folder.status()) and status.state == "draining", process)
    code, said = tokenmill("down", case.run_path)
    assert code == 0
    assert "is draining" in said
    assert case.wait(first) == 0
    assert case.wait(process) == 130
    assert {last_turn(record) for record in case.records()} == set(answered_prompts(log))

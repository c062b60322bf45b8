"""C03: a foreign server that answers on a port is never taken for ours: named, and sent no prompt."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import living
from tests.harness import Case, assert_whole, requests, scripted_server
from tokenmill import life
from tokenmill.core.server import Restart
from tokenmill.machine import processes

LAUNCHER = """
import pathlib, subprocess, sys, time
port, folder, then = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
(folder / "wanted").write_text(port)
while not (folder / "taken").exists():
    time.sleep(0.01)
code = subprocess.call([sys.executable, "-m", "tokenmill.testing.server", "--port", port, "--model", "m"])
if then == "stays":
    time.sleep(600)
sys.exit(code)
"""
"""Its port is taken between the plan and its bind: then it ends, as most engines do, or lives on without it."""


def test_a_taken_port_is_left_to_its_owner(case: Case) -> None:
    log, stale = case.folder / "ours.jsonl", case.folder / "stale.jsonl"
    case.write(engine={"args": {"requests": str(log)}}, fleet={"servers": 1})
    with scripted_server(case.port, model="old-model", requests=str(stale)) as process:
        assert case.run() == 0
        assert process.poll() is None
    assert_whole(case, {f"p{n}" for n in range(40)})
    assert f"port {case.port} is taken by pid {process.pid} " in case.output()
    assert requests(stale) == []
    assert {entry["port"] for entry in requests(log)} == {case.port + 1}


@pytest.mark.parametrize(
    ("served", "then"),
    [
        pytest.param("old-model", "ends", id="another model, ours ends"),
        pytest.param("m", "stays", id="the same model, ours lives on"),
    ],
)
def test_a_server_that_took_the_port_first_is_named_and_never_asked(case: Case, served: str, then: str) -> None:
    launcher = case.folder / "launcher.py"
    launcher.write_text(LAUNCHER)
    command = [sys.executable, str(launcher), "{port}", str(case.folder), then]
    stale = case.folder / "stale.jsonl"
    case.write(
        model={"name": "m"},
        engine={"kind": "openai", "args": {}, "command": command},
        fleet={"servers": 1, "restarts_per_hour": 0},
    )
    with _stranger(case.folder, model=served, requests=str(stale)) as pids:
        assert case.run() == 4
    words = case.output().partition("tokenmill: ")[2]
    assert f"port {case.port} is taken by pid {pids[0]} " in words
    assert served == "m" or "a server of old-model, not of m" in words
    assert requests(stale) == []
    assert case.records() == []


@pytest.mark.parametrize("whose", ["ours", "another's"])
def test_a_port_on_which_nobody_says_anything_is_given_up_where_it_is_anothers(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """SGLang 0.5.11 fails to bind at the end of its start, and then waits for ever to shut down: 206 s were lost."""
    monkeypatch.setattr(life, "IDENTITY_TIMEOUT_S", 0.3)
    code = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"
    silent = [sys.executable, "-c", code if whose == "ours" else "import time; time.sleep(600)", "{port}"]

    async def looks() -> None:
        async with living.begun(living.job(tmp_path, silent), port) as server:
            if whose == "ours":
                await server.until(lambda: server.life._listens)
                assert server.failures == [], "it is slow to answer"
                return
            with socket.create_server(("127.0.0.1", port)):
                await server.until(lambda: server.failures)
            failure = server.failures[0]
            assert failure.restart is Restart.OTHER_PORTS
            assert failure.cause == f"port {port} is taken by {processes.describe(os.getpid())}"

    asyncio.run(looks())


@contextmanager
def _stranger(folder: Path, **flags: str) -> Iterator[list[int]]:
    """Takes the port that is named in the file `wanted` as soon as it stands there; yields its pid in a list."""
    pids: list[int] = []
    over = threading.Event()

    def take() -> None:
        while not (folder / "wanted").exists() or not (folder / "wanted").read_text():
            if over.wait(0.01):
                return
        port = int((folder / "wanted").read_text())
        with scripted_server(port, **flags) as process:
            pids.append(process.pid)
            (folder / "taken").touch()
            over.wait()

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield pids
    finally:
        over.set()
        thread.join()


def test_a_server_of_ours_that_serves_another_model_is_no_stranger_on_the_port(case: Case) -> None:
    command = [sys.executable, "-m", "tokenmill.testing.server", "--port", "{port}", "--model", "other"]
    case.write(model={"name": "m"}, engine={"kind": "openai", "args": {}, "command": command}, fleet={"servers": 1})
    assert case.run() == 4
    words = case.output().partition("tokenmill: ")[2]
    assert "it answers as a server of other, not of m" in words
    assert "taken" not in words
    assert case.output().count(": started as pid") == 1, "no other port would help"
    assert case.leftovers() == []

"""C02: an engine that dies at its start is known in seconds, with exit code and words; not at the start timeout."""

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import Case, scripted_server

IMPORT = "ImportError: libcudart.so.13: cannot open shared object file"
DEAF = [
    *(sys.executable, "-c"),
    "import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)",
]


def test_a_server_that_dies_at_import_is_named_within_seconds(case: Case) -> None:
    args = {"log": f"import torch|{IMPORT}", "start-delay-s": 1.0, "exit-at-start": True, "exit-code": 1}
    case.write(engine={"args": args}, fleet={"start_timeout": "600s"})
    began = time.monotonic()
    assert case.run() == 4
    assert time.monotonic() - began < 10
    assert "exit code 1" in case.output()
    assert "libcudart.so.13" in case.output()
    assert case.records() == []


def test_a_death_without_a_known_cause_is_told_with_its_last_words(case: Case) -> None:
    args = {"log": "loading|something never seen before", "exit-at-start": True, "exit-code": 7}
    case.write(engine={"args": args}, fleet={"start_timeout": "600s", "restarts_per_hour": 1, "servers": 1})
    began = time.monotonic()
    assert case.run() == 4
    assert time.monotonic() - began < 10
    assert "exit code 7" in case.output()
    assert "something never seen before" in case.output()


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"kind": "fake", "args": {"warm-s": 600.0}}, id="loads for ever"),
        pytest.param({"kind": "openai", "args": {}, "command": DEAF}, id="listens but never answers"),
    ],
)
def test_the_start_timeout_is_a_time_and_not_a_number_of_tries(case: Case, engine: dict[str, Any]) -> None:
    fleet = {"start_timeout": "2s", "stall_timeout": "60s", "restarts_per_hour": 0, "servers": 1}
    case.write(model={"name": "m"}, engine=engine, fleet=fleet)
    began = time.monotonic()
    assert case.run() == 4
    assert time.monotonic() - began < 10
    assert "start_timeout = 2 s" in case.output()


def test_nothing_waits_for_a_server_that_will_never_come(case: Case) -> None:
    ports = (case.port, case.port + 1)
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    case.write(
        model={"name": "m"}, engine={"kind": "openai", "args": {}, "addresses": addresses}, fleet={"min_ready": 2}
    )
    with scripted_server(ports[0], model="m"), scripted_server(ports[1], model="m", ignore_thinking=True):
        process = case.start()
        try:
            _wait_for(lambda: "server 1: thinking is on" in case.output(), 20)
            _wait_for(lambda: case.done() > 0, 3)
        finally:
            process.kill()
            process.wait()


def _wait_for(what: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)

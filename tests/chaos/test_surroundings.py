"""Trouble of outside, for real: the mount that holds the model goes away under living servers and comes back."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Case, assert_whole, wait_until
from tests.slowfs import mounted, server_of
from tokenmill import events

KEYS = {f"p{n}" for n in range(40)}

LOADER = """
import os, sys
model, port, name = sys.argv[1:]
print("Load weight begin", flush=True)
with open(os.path.join(model, "weights"), "rb") as weights:
    weights.read()
os.execv(sys.executable, [sys.executable, "-m", "tokenmill.testing.server", "--port", port, "--model", name,
                          "--slots", "2", "--latency-ms", "300", "--mode", "reasoning_content"])
"""


def said(case: Case, kind: str) -> list[str]:
    return [event.text for event, _ in events.read(case.run_folder.events) if event.kind == kind]


def write(case: Case, mount: Path, **fleet: object) -> None:
    (case.folder / "loader.py").write_text(LOADER)
    case.settings = {
        "model": {"path": str(mount / "model"), "name": "m"},
        "engine": {
            "kind": "openai",
            "args": {},
            "command": [sys.executable, str(case.folder / "loader.py"), "{model}", "{port}", "{name}"],
        },
        "generation": {"concurrency": 2},
        "fleet": {"servers": 3, "backoff": "100ms", "restarts_per_hour": 1, **fleet},
    }
    case.write()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source" / "model").mkdir(parents=True)
    (tmp_path / "source" / "model" / "weights").write_bytes(os.urandom(1 << 20))
    return tmp_path / "source"


def test_a_mount_that_is_away_for_a_while_costs_no_server(case: Case, source: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    with ExitStack() as first:
        first.enter_context(mounted(source, mount))
        write(case, mount)
        process = case.start()
        case.until_done(4, process)
        os.kill(server_of(mount), signal.SIGKILL)
        for pid in case.server_pids().values():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: any("cannot be read now" in text for text in said(case, "surroundings")), process)
        time.sleep(1.0)  # many more tries than a server has restarts
    with mounted(source, mount):
        assert case.wait(process) == 0, case.output()
    assert_whole(case, KEYS)
    assert any(text.startswith("well again after") for text in said(case, "surroundings"))
    assert not any("quarantined" in text for text in said(case, "state"))
    assert case.ended()


@pytest.mark.long
def test_a_mount_that_stays_away_ends_the_run_with_the_story(case: Case, source: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    with mounted(source, mount):
        write(case, mount, give_up="3s")
        process = case.start()
        case.until_done(4, process)
        os.kill(server_of(mount), signal.SIGKILL)
        for pid in case.server_pids().values():
            os.kill(pid, signal.SIGKILL)
        assert case.wait(process) == 4, case.output()
    last = case.output().splitlines()
    assert any("no server for give_up = 3 s; one cause on 3 servers at once" in line for line in last), last
    assert any("the mount they lie on is away" in line for line in last)
    assert case.ended()

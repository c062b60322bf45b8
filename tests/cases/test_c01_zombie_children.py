"""C01: children that die before Python starts, and a launcher that waits for them for ever: named within seconds."""

import sys
import time
from pathlib import Path

import pytest

from tests.harness import Case
from tests.unit.machine.test_filesystems import table
from tokenmill import events, signs
from tokenmill.machine import filesystems

LAUNCHER = "import subprocess, time; child = subprocess.Popen(['/bin/sh', '-c', 'exit {code}']); time.sleep(600)"
"""Forks a child that ends at once, does not reap it, and sleeps for ever; its log stays empty. A Popen that nobody
holds would reap a child that has ended by then."""

MIXED = (
    "import subprocess; child = subprocess.Popen(['/bin/sh', '-c', 'exit 1']);"
    " subprocess.Popen(['sleep', '600']).wait()"
)


def write(case: Case, code: str, **fleet: object) -> None:
    case.write(
        model={"name": "m"},
        engine={"kind": "openai", "args": {}, "command": [sys.executable, "-c", code]},
        fleet={"servers": 1, "restarts_per_hour": 0, "start_timeout": "600s", **fleet},
    )


def died_after(case: Case) -> float:
    """Seconds from the server's start to the word that it failed."""
    told = [event for event, _ in events.read(case.run_folder.events, 0)]
    started = next(event.t for event in told if "started as pid" in event.text)
    return next(event.t for event in told if "its child pid" in event.text) - started


@pytest.mark.parametrize("code", [126, 0])
def test_children_that_are_all_dead_are_named_within_seconds(case: Case, code: int) -> None:
    write(case, LAUNCHER.format(code=code))
    assert case.run() == 4
    seconds = died_after(case)
    print(f"named after {seconds:.1f} s")
    assert seconds < 10, "on an idle machine it is under 5"
    assert f"died (exit code {code}), and pid" in case.output()
    assert "waits for ever" in case.output()
    assert "child_died" not in case.output(), "in words"
    assert case.ended()


def test_a_dead_child_beside_a_living_one_is_no_failure(case: Case) -> None:
    write(case, MIXED, stall_timeout="6s")
    began = time.monotonic()
    assert case.run() == 4
    assert time.monotonic() - began > 6
    assert "silent and idle for 6 s" in case.output()
    assert "its child" not in case.output()


def test_a_noexec_tmp_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "36 35 98:0 / /tmp rw,noexec,nosuid - tmpfs tmpfs rw"
    monkeypatch.setattr(filesystems, "read_mounts", lambda: f"{table((Path('/'), 'ext4'))}\n{line}\n")
    assert signs.fix(Path("/tmp/tm-0-abc/0")) == "/tmp is mounted noexec: mount -o remount,exec /tmp"
    monkeypatch.setattr(filesystems, "read_mounts", lambda: table((Path("/"), "ext4")))
    assert signs.fix(Path("/tmp/tm-0-abc/0")) == ""

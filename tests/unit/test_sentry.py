"""Servers whose node is killed: met by the next one in time, or ended."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.machine import processes
from tokenmill.sentry import Sentry

NODE = """
import sys, time
from pathlib import Path
from tokenmill.sentry import Sentry
first = Sentry(Path(sys.argv[1]), 0.5)
second = Sentry(Path(sys.argv[1]), 0.5)
first.dismiss()
print(flush=True)
time.sleep(60)
"""
"""A node's process, which was begun by two heads one after the other."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Something that runs, and the run folder that says that it is a server."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        folder = RunFolder(tmp_path)
        with folder.own("node"):
            main = processes.identify(process.pid)
            assert main is not None
            folder.write_servers((ServerEntry("", 0, main, process.pid, 0, 0, "none", "", {}),), keep=False)
        try:
            yield process
        finally:
            process.kill()


def test_servers_of_a_killed_node_end_when_nobody_comes(tmp_path: Path, server: "subprocess.Popen[bytes]") -> None:
    with subprocess.Popen([sys.executable, "-c", NODE, str(tmp_path)], stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        node.stdout.readline()
        assert server.poll() is None
        node.kill()
    assert server.wait(20.0) == -signal.SIGTERM
    assert "no other has come" in RunFolder(tmp_path).events.read_text()


def test_the_next_node_is_given_its_servers(tmp_path: Path, server: "subprocess.Popen[bytes]") -> None:
    with RunFolder(tmp_path).own("node"):
        sentry = Sentry(tmp_path, 0.2)
        sentry._process.communicate()  # its node is dead
        assert sentry._process.returncode == 0
    assert server.poll() is None

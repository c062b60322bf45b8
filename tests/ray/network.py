"""A Ray cluster of machines that differ: each has a network of its own, with an address and a loopback, a /dev/shm and
a folder for Ray. They share a disk, the numbers of processes and this machine's clock."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import bynumber
from tests.ray.raylets import NOTICED, STORE
from tokenmill.machine import processes

NET = "10.213.77"
"""Addresses of the machines; no route leads there from anywhere else."""

PORT = 6379

PATIENT = {**NOTICED, "health_check_failure_threshold": 6}
"""Four machines on one with two cores are late with their pulses."""


class Network:
    """`names` are the machines; the first has Ray's head. All of them hang on one bridge."""

    def __init__(self, *names: str, env: dict[str, str] | None = None) -> None:
        self.names = names
        self.folder = Path(tempfile.mkdtemp(prefix="tmn-", dir="/tmp"))  # Ray's sockets have 107 characters in all
        # With a token in this account's home Ray's head would ask for it, and `ray start` on the others not give it.
        self.env = {**os.environ, "RAY_AUTH_MODE": "disabled", **(env or {})}
        self._anchors: dict[str, subprocess.Popen[bytes]] = {}
        self._bridge = f"tm{os.getpid()}"
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        try:
            for number, name in enumerate(names):
                self._plug(name, number)
            for name in names:
                self.start_ray(name)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"{NET}.1:{PORT}"

    def _plug(self, name: str, number: int) -> None:
        words = ["unshare", "--net", "--mount", "sh", "-c", "echo; exec sleep 3600"]
        anchor = self._anchors[name] = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert anchor.stdout is not None
        with anchor.stdout as ready:
            ready.readline()
        outer = f"{self._bridge}.{number}"
        _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", str(anchor.pid))
        _ip("link", "set", outer, "master", self._bridge, "up")
        self.on(name, "ip", "addr", "add", f"{NET}.{number + 1}/24", "dev", "eth0")
        self.on(name, "ip", "link", "set", "eth0", "up")
        self.on(name, "ip", "link", "set", "lo", "up")
        for place in (self.folder, "/dev/shm"):
            self.on(name, "mount", "-t", "tmpfs", "tmpfs", str(place))

    def words(self, name: str, *words: str) -> list[str]:
        """A command as it runs on a machine."""
        return ["nsenter", f"--target={self._anchors[name].pid}", "--net", "--mount", "--", *words]

    def on(self, name: str, *words: str) -> str:
        return subprocess.run(self.words(name, *words), check=True, capture_output=True, text=True, timeout=60).stdout

    def start_ray(self, name: str) -> None:
        number = self.names.index(name) + 1
        own = [f"--node-ip-address={NET}.{number}", f"--node-name={name}", "--num-cpus=1", "--num-gpus=0"]
        if number == 1:
            own += ["--head", f"--port={PORT}", f"--temp-dir={self.folder}", f"--system-config={json.dumps(PATIENT)}"]
            own += ["--include-dashboard=false"]
        else:
            own += [f"--address={self.address}"]
        ray = str(Path(sys.executable).parent / "ray")
        words = self.words(name, ray, "start", *own, f"--object-store-memory={STORE}", "--disable-usage-stats")
        with tempfile.TemporaryFile("w+") as said:  # no pipe: what it leaves running would hold it open
            done = subprocess.run(words, env=self.env, stdout=said, stderr=said, timeout=120, check=False)
            said.seek(0)
            assert done.returncode == 0, said.read()

    def pids(self, name: str) -> list[int]:
        """Every process on a machine, but for the one that keeps it."""
        anchor = self._anchors[name].pid
        own = Path(f"/proc/{anchor}/ns/net").stat().st_ino
        found = []
        for pid in processes.pids():
            try:
                if pid != anchor and Path(f"/proc/{pid}/ns/net").stat().st_ino == own:
                    found.append(pid)
            except OSError:
                continue  # it ended meanwhile
        return found

    def kill(self, name: str) -> None:
        """A machine's power: raylet, actors, servers, all."""
        while pids := self.pids(name):
            bynumber.signal_all(pids, signal.SIGKILL)

    def cut(self, name: str) -> None:
        """Its cable is out, until `mend`."""
        _ip("link", "set", f"{self._bridge}.{self.names.index(name)}", "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", f"{self._bridge}.{self.names.index(name)}", "up")

    def close(self) -> None:
        for name, anchor in self._anchors.items():
            self.kill(name)
            anchor.kill()
            anchor.wait()
        _ip("link", "del", self._bridge)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


def here() -> str:
    """Why this machine can have no networks of its own; empty where it can, and must work."""
    if not shutil.which("ip") or not shutil.which("nsenter"):
        return "NO ip OR nsenter HERE"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else f"NO NETWORK NAMESPACES HERE ({made.stderr.strip()})"


@contextmanager
def network(*names: str, env: dict[str, str] | None = None) -> Iterator[Network]:
    """A cluster for the scope; skips where this machine has no namespaces, fails where they are there and broken."""
    if why := here():
        pytest.skip(f"{why}: Ray across addresses is NOT tested on this machine")
    made = Network(*names, env=env)
    try:
        yield made
    finally:
        made.close()

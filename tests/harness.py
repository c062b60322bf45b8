"""Runs of the real command on scripted or real servers, and what must hold of a run folder afterwards."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from tests import bynumber
from tokenmill import dataset, launch
from tokenmill.core.records import Record
from tokenmill.engines.base import flags as engine_flags
from tokenmill.folder import RunFolder
from tokenmill.machine import processes
from tokenmill.testing.script import fingerprint

DEADLINE_S = 50.0
"""For one command; every limit inside it is set far shorter."""


@dataclass
class Case:
    """One config in a folder of its own, and the commands on it. `settings` are nested as the config is."""

    folder: Path
    port: int
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: str = "prompts.jsonl"

    @property
    def run_path(self) -> Path:
        return self.folder / "runs" / "case"

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.run_path)

    @property
    def config(self) -> Path:
        return self.folder / "case.toml"

    def write(self, **overrides: Any) -> Path:
        """The config: a scripted fleet of two unless the settings say otherwise, with short limits."""
        base: dict[str, Any] = {
            "name": "case",
            "engine": {"kind": "fake", "args": {"slots": 4}},
            "fleet": {
                "gpus": "none",
                "servers": 2,
                "port": self.port,
                "stagger": "off",
                "start_timeout": "30s",
                "backoff": "200ms",
            },
            "prompts": {"path": self.prompts},
            "generation": {"max_tokens": 400},
            "gate": {"cohort": 20},
        }
        data = _merge(_merge(base, self.settings), overrides)
        if data["engine"].get("addresses"):
            data["fleet"].pop("servers", None)
        self.config.write_text(tomli_w.dumps(data))
        return self.config

    def start(
        self, *words: str, env: Mapping[str, str] | None = None, under: Sequence[str] = ()
    ) -> "subprocess.Popen[str]":
        """`tokenmill run` on the config, with its output in `output()`."""
        if not self.config.exists():
            self.write()
        return self.command("run", str(self.config), *words, env=env, under=under)

    def command(
        self, *words: str, env: Mapping[str, str] | None = None, under: Sequence[str] = ()
    ) -> "subprocess.Popen[str]":
        """Any command; `under` are words before it, such as a shell that sets a limit and then execs it."""
        out = (self.folder / "output.txt").open("a")
        with out:
            return subprocess.Popen(
                [*under, sys.executable, "-m", "tokenmill", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                text=True,
            )

    def run(self, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = DEADLINE_S) -> int:
        """Runs to the end and returns the exit code; a run that takes too long is killed and fails the test."""
        return self.wait(self.start(*words, env=env), timeout_s)

    def wait(self, process: "subprocess.Popen[str]", timeout_s: float = DEADLINE_S) -> int:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()}") from None

    def output(self) -> str:
        path = self.folder / "output.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self) -> list[Record]:
        return list(dataset.records(self.run_path / "data"))

    def done(self) -> int:
        """Rows in the store so far, by a glance."""
        data = self.run_path / "data"
        return sum(path.read_bytes().count(b"\n") for path in data.glob("journal-*.jsonl")) if data.exists() else 0

    def until_done(self, rows: int, process: "subprocess.Popen[str]", timeout_s: float = DEADLINE_S) -> None:
        """Waits until so many rows are stored (or sealed), or the process has ended."""
        deadline = time.monotonic() + timeout_s
        while self.done() < rows and process.poll() is None and not list((self.run_path / "data").glob("part-*")):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def server_pids(self) -> dict[int, int]:
        """The main process of each server, by index."""
        return {entry.index: entry.process.pid for entry in self.run_folder.state().servers}

    def cleanup(self) -> None:
        """Ends whatever this case's runs left behind, by the marks that only its servers carry."""
        owner = self.run_folder.owner()
        if owner is not None:
            os.kill(owner.process.pid, signal.SIGKILL)
        for entry in self.run_folder.state().servers:
            bynumber.signal_all(bynumber.members(-1, entry.nonce), signal.SIGKILL)
        bynumber.signal_all(self.leftovers(), signal.SIGKILL)

    def ended(self, timeout_s: float = 10.0) -> bool:
        """Whether nothing is left; waits for a process that has let its folder go and is on its way out."""
        deadline = time.monotonic() + timeout_s
        while left := self.leftovers():
            if time.monotonic() > deadline:
                print(f"left: {[processes.describe(pid) for pid in left]}")
                return False
            time.sleep(0.05)
        return True

    def leftovers(self) -> list[int]:
        """Every living process that a command on this case started, known to the run folder or not."""
        servers = f"TMPDIR={launch.tmp_folder(self.run_path, 0).parent}/".encode()
        commands = (os.fsencode(self.config), os.fsencode(self.run_path))
        found = []
        for pid in processes.pids():
            status = processes.stat(pid)
            if status is None or status.state in "ZX":
                continue
            try:
                words, env = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            except OSError:
                continue  # it ended meanwhile
            if servers in env or any(command in words for command in commands):
                found.append(pid)
        return found


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both and key != "args" else value  # type: ignore[arg-type]
    return merged


def assert_whole(case: Case, keys: set[str], *, samples: int = 1) -> None:
    """Every id once, nothing else; each answer on the row that asked; no torn line."""
    records = case.records()
    seen = Counter((record.key, record.sample) for record in records)
    wanted = {(key, sample) for key in keys for sample in range(samples)}
    assert {entry for entry, count in seen.items() if count > 1} == set()
    assert set(seen) == wanted
    for record in records:
        if re.search(r"ANSWER [0-9a-f]{8} ", record.text):
            assert fingerprint(last_turn(record)) in record.answer, f"{record.key} holds another row's answer"


def last_turn(record: Record) -> str:
    return str(json.loads(bytes(record.messages))[-1]["content"])


def requests(path: Path) -> list[dict[str, Any]]:
    """What the scripted servers noted: begins, ends, aborts."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answered_prompts(path: Path) -> Counter[str]:
    """How often each prompt was begun on a server, canaries left out."""
    return Counter(
        entry["prompt"] for entry in requests(path) if "begin" in entry and entry["prompt"].startswith("Question")
    )


@contextmanager
def scripted_server(port: int, **flags: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A scripted server that belongs to nobody's run, for the scope; flags as in testing/script.py."""
    words = engine_flags({name.replace("_", "-"): value for name, value in flags.items()})
    with server(port, "-m", "tokenmill.testing.server", "--port", str(port), *words) as process:
        yield process


@contextmanager
def server(port: int, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A Python program that listens on a port, for the scope."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *words], stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        wait_for_port(port)
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_until(what: Callable[[], object], process: "subprocess.Popen[Any]", timeout_s: float = 30.0) -> None:
    """Until that is so, while the process lives."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert process.poll() is None, "the process ended before that"
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def wait_for_port(port: int, timeout_s: float = 10.0) -> None:
    """Returns once somebody accepts connections there."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens on port {port}"
            time.sleep(0.02)
        else:
            return


def most_at_once(path: Path) -> int:
    """How many user's prompts the scripted servers had at once."""
    events = [entry for entry in requests(path) if entry.get("prompt", "").startswith("Question")]
    now = most = 0
    for entry in sorted(events, key=lambda entry: entry["t"]):
        now += 1 if "begin" in entry else -1
        most = max(most, now)
    return most

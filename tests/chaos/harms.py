"""Harms for a storm: what is done to a run, when it has been noticed, and what it must then be called.

A harm of the start is an argument of the scripted server and hits one life of one server; any other comes from outside.
Its `words` are a pattern of the event that must tell it within `within_s`; without words nothing may be told at all.
"""

import csv
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from tests.harness import Case
from tokenmill import events
from tokenmill.core.server import Failure
from tokenmill.engines.sglang import SGLang
from tokenmill.events import Event

DATA = Path(__file__).parents[1] / "data"
START_LOG = DATA / "sglang-0.5.11-h200" / "plain.log"

STALL_S = {"scripted": 3.0, "llamacpp": 6.0}
"""fleet.stall_timeout. Processor time is read every 2 s, and it is evidence: a real server that gets little of it in a
storm must not be taken for one that hangs."""

DEATH_S = 2.0
CHILDREN_S = 5.0
CLOCKS_S = 0.3
"""A harm's time is taken beside it, an event's when it is told."""

HANG_S = 5.0
"""Beyond stall_timeout."""

PRE_ARGUMENTS = 8
"""Lines of the recorded log until SGLang has said its arguments: before them nobody knows whose words these are."""


T = TypeVar("T")


@dataclass
class Scene:
    """A run under harm: `process` is its tokenmill, `start` begins another one on the same folder."""

    case: Case
    rng: random.Random
    process: "subprocess.Popen[str]"
    start: Callable[[], "subprocess.Popen[str]"]
    stack: ExitStack
    settings: dict[str, Any]
    began: float = field(default_factory=time.time)

    def pid(self, server: int) -> int:
        """The server's main process, once there is one; raises OverError where the run has ended."""
        return self.wait(lambda: self.case.server_pids().get(server))

    def wait(self, what: Callable[[], T | None], timeout_s: float = 30.0) -> T:
        """What it gives, once it gives something; raises OverError where the run has ended."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            if self.process.poll() is not None:
                raise OverError
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.case.output()}"
            time.sleep(0.02)
        return found

    def told(self, server: int, since: float, words: str) -> Event | None:
        """The event that says so of this server, or of all, if there is one."""
        for event, _ in events.read(self.case.run_folder.events):
            mine = event.server in ("", str(server)) and event.t >= since - CLOCKS_S
            if mine and event.level in ("warn", "error") and re.search(words, event.text):
                return event
        return None


class OverError(Exception):
    """The run has ended: nothing can be done to it any more."""


@dataclass(frozen=True)
class Harm:
    """`args` for the scripted server; `told_by` reads the words from them where they differ from run to run. `strike`
    acts from outside and returns the Unix time when it hit. `real`: llama.cpp's servers can suffer it, too. `quick`:
    may follow another one. `fleet`: hits all servers. `hangs`: the time allowed begins after stall_timeout."""

    name: str
    words: str = ""
    within_s: float = DEATH_S
    args: Callable[[random.Random, int], dict[str, Any]] | None = None
    strike: Callable[[Scene, int], float] | None = None
    real: bool = False
    quick: bool = False
    fleet: bool = False
    hangs: bool = False
    told_by: Callable[[dict[str, Any]], str] = field(default=lambda args: "")

    def limit_s(self, kind: str) -> float:
        """Seconds from the harm to its event, on servers of this kind."""
        return self.within_s + (STALL_S[kind] if self.hangs else 0.0)


# -- from outside ------------------------------------------------------------------------------------------------------
def _kill(scene: Scene, server: int) -> float:
    pid, at = scene.pid(server), time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def _kill_child(scene: Scene, server: int) -> float:
    children = Path(f"/proc/{(pid := scene.pid(server))}/task/{pid}/children")
    os.kill(int(scene.wait(lambda: children.read_text().split())[0]), signal.SIGKILL)
    return time.time()


def _kill_tokenmill(scene: Scene, server: int) -> float:
    scene.process.kill()
    scene.process.wait()
    scene.began = time.time()
    scene.process = scene.start()
    return scene.began


def _stop(scene: Scene, server: int) -> float:
    os.kill(scene.pid(server), signal.SIGSTOP)
    return time.time()


def _stop_and_go(scene: Scene, server: int) -> float:
    pid = scene.pid(server)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(scene.rng.uniform(0.1, 1.0))
    os.kill(pid, signal.SIGCONT)
    return time.time()


def _steal_port(scene: Scene, server: int) -> float:
    """A listener that is no server: it accepts, and says nothing."""
    port = _known_to_be_dead(scene, server)
    scene.stack.enter_context(_at_once(lambda: socket.create_server(("127.0.0.1", port))))
    return time.time()


class _Stale(BaseHTTPRequestHandler):
    """Says 200 to everything, and that it serves another model."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "old-model"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _stale_server(scene: Scene, server: int) -> float:
    return _stale_on(scene, _known_to_be_dead(scene, server))


def _stale_at_once(scene: Scene, server: int) -> float:
    return _stale_on(scene, _killed(scene, server))


def _stale_on(scene: Scene, port: int) -> float:
    stale = scene.stack.enter_context(_at_once(lambda: ThreadingHTTPServer(("127.0.0.1", port), _Stale)))
    threading.Thread(target=stale.serve_forever, daemon=True).start()
    scene.stack.callback(stale.shutdown)
    return time.time()


def _killed(scene: Scene, server: int) -> int:
    """Kills a server; returns its port."""
    pid = scene.pid(server)
    port = next(entry.port for entry in scene.case.run_folder.state().servers if entry.index == server)
    os.kill(pid, signal.SIGKILL)
    return port


def _known_to_be_dead(scene: Scene, server: int) -> int:
    """Kills a server, and waits until that is known: its port is free for a back-off now."""
    at, port = time.time(), _killed(scene, server)
    scene.wait(lambda: scene.told(server, at, DIED))
    return port


def _at_once(bind: Callable[[], T]) -> T:
    """In this process: an interpreter of its own would come too late on a busy machine."""
    deadline = time.monotonic() + 2.0
    while True:
        try:
            return bind()
        except OSError:
            assert time.monotonic() < deadline, "the port of a dead server is not free"
            time.sleep(0.001)


def _give_back(scene: Scene, server: int) -> float:
    """The mount that all servers load from comes back after a while."""
    scene.pid(server)
    at = time.time()
    time.sleep(2.0)
    Path(scene.settings["while-there"]).unlink()
    return at


# -- of the start ------------------------------------------------------------------------------------------------------
def _failures() -> list[tuple[str, int]]:
    """Words that SGLang dies with in its start, and its exit code."""
    with (DATA / "failures.tsv").open(encoding="utf-8", newline="") as rows:
        found = csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["text"], int(row["exit"])) for row in found if row["engine"] == "sglang" and row["exit"] != "2"]


def _diagnosis(text: str, code: int) -> Failure:
    return SGLang().diagnose(text.replace("\\n", "\n").splitlines(), code)


def _exit_in_the_start(rng: random.Random, server: int) -> dict[str, Any]:
    text, code = rng.choice(_failures())
    line = rng.randrange(PRE_ARGUMENTS, len(START_LOG.read_text(encoding="utf-8").splitlines()))
    return {"log-file": str(START_LOG), "exit-after-line": line, "last-words": text, "exit-code": code}


def _told_by_sglang(args: dict[str, Any]) -> str:
    return re.escape(_diagnosis(args["last-words"], args["exit-code"]).cause)


def _flag(**args: Any) -> Callable[[random.Random, int], dict[str, Any]]:
    return lambda rng, server: {name.replace("_", "-"): value for name, value in args.items()}


DIED = r"exit code -9|it died|it ended"
TAKEN = r"port (?:\d+ is|was) (?:taken|held)"

HARMS = {
    harm.name: harm
    for harm in (
        Harm("kill a server", DIED, strike=_kill, real=True, quick=True),
        Harm("kill a child", strike=_kill_child, quick=True),
        Harm("kill tokenmill", strike=_kill_tokenmill, real=True, quick=True),
        Harm("stop", r"hangs|silent and idle", HANG_S, strike=_stop, real=True, hangs=True),
        Harm("stop and go", strike=_stop_and_go, real=True, quick=True),
        Harm("port theft", TAKEN, 6.0, strike=_steal_port, real=True),
        Harm("stale server", TAKEN, 6.0, strike=_stale_server, real=True),
        Harm("stale server at once", TAKEN, 6.0, strike=_stale_at_once),
        Harm("exit in the start", args=_exit_in_the_start, told_by=_told_by_sglang),
        Harm("silence in the start", "silent and idle", HANG_S, args=_flag(silent=True), hangs=True),
        Harm("slow health", args=_flag(health_delay_s=1.5)),
        Harm("double fork", DIED, args=_flag(double_fork=True), strike=_kill),
        Harm("ignores SIGTERM", args=_flag(ignore_sigterm=True)),
        Harm("zombies", "child", CHILDREN_S, args=_flag(zombies=True)),
        Harm(
            "graphs do not fit",
            "captured",
            10.0,  # from the run's own start
            args=_flag(mem_fraction_static=0.9, capture_oom_above=0.86, log_file=str(START_LOG)),
            fleet=True,
        ),
        Harm(
            "a mount is away",
            "one cause on 2 servers at once|the mount they lie on is away",
            5.0,
            args=_flag(exit_after_line=0, last_words="OSError: [Errno 107] Transport endpoint is not connected"),
            strike=_give_back,
            fleet=True,
        ),
    )
}

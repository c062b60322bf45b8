"""Supervision of real SGLang servers on a GPU: python -m tests.gpu.prove_supervision OUT --model DIR --site DIR

Two servers on one card under `tokenmill run`; then, one after another: the scheduler of one is stopped (SIGSTOP) with
work in flight, the scheduler of one is killed (-9), the main process of one is killed, tokenmill itself is killed and
adopts. Of each: what tokenmill said, after how many seconds, and the card's memory by NVML before and after the run.
Not a test of pytest's: that machine has no network and no pytest.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import bynumber
from tests.gpu.prove import START_S, cards, make_case, phases, prove, write_prompts
from tests.harness import Case, assert_whole
from tokenmill import events
from tokenmill.events import Event
from tokenmill.machine import nvml

PROMPTS = 9000
STALL_S = 15.0

Running = subprocess.Popen[str]


def used_mib() -> list[int]:
    return [card.memory_used >> 20 for card in nvml.read()]


def child(case: Case, server: int, word: bytes) -> int:
    """A process of a server by its title; SGLang names them sglang::scheduler and sglang::detokenizer."""
    entry = next(entry for entry in case.run_folder.state().servers if entry.index == server)
    for pid in bynumber.members(entry.group, entry.nonce):
        if word in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"server {server} has no {word!r}")


def serving(case: Case, process: Running) -> None:
    """Until both servers are ready and have something in flight."""
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, case.output()
        assert time.monotonic() < deadline, case.output()
        status = case.run_folder.status()
        if status and len(status.servers) == 2 and all(s.state == "ready" and s.in_flight for s in status.servers):
            return
        time.sleep(0.1)


def told(case: Case, process: Running, at: int, server: int) -> Event:
    """The next warning of a server that is more than a doubt."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, case.output()
        for event, _ in events.read(case.run_folder.events, at):
            if event.server == str(server) and event.level == "warn" and event.kind == "server":
                return event
        time.sleep(0.02)
    raise AssertionError(f"nothing was said of server {server}:\n{case.output()}")


def harm(case: Case, process: Running, server: int, word: bytes, number: signal.Signals) -> dict[str, Any]:
    serving(case, process)
    at, pid = case.run_folder.events.stat().st_size, child(case, server, word)
    began = time.time()
    os.kill(pid, number)
    event = told(case, process, at, server)
    seen = event.t - began
    serving(case, process)
    back = time.time() - began
    words = {"harm": f"{number.name} of {word.decode()}", "told after s": round(seen, 2), "said": event.text}
    return {**words, "lines": list(event.lines), "both serve again after s": round(back, 1)}


def supervision(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All harms in one run; every id is there once at its end, and the card's memory is back."""
    before = used_mib()
    case = make_case(
        folder,
        args,
        args.port,
        fleet={"gpus": cards(args, 1), "stall_timeout": f"{STALL_S:.0f}s", "servers": 2},
        generation={"max_tokens": 400, "thinking": False, "concurrency": 8, "extra": {"min_new_tokens": 300}},
    )
    write_prompts(case.folder / "prompts.jsonl", PROMPTS)
    process = case.start()
    found: list[dict[str, Any]] = []
    for server, word, number in (
        (0, b"scheduler", signal.SIGSTOP),
        (1, b"scheduler", signal.SIGKILL),
        (0, b"launch_server", signal.SIGKILL),
        (1, b"detokenizer", signal.SIGKILL),
        (0, b"detokenizer", signal.SIGSTOP),
    ):
        found.append(harm(case, process, server, word, number))
    process.kill()
    process.wait()
    began = time.monotonic()
    process = case.start()
    serving(case, process)
    adopted = time.monotonic() - began
    code = case.wait(process, START_S)
    assert code == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(PROMPTS)})
    return {
        "harms": found,
        "seconds until both adopted servers serve": round(adopted, 1),
        "adopted": case.output().count("adopts pid"),
        "MiB used before, after": [before, used_mib()],
        "leftovers": case.leftovers(),
        "phases": phases(case),
        "start as kept": case.run_folder.state().start,
    }


if __name__ == "__main__":
    sys.exit(prove({"supervision": supervision}))

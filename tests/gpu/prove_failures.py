"""Starts that must fail, or must be saved, on a real GPU with real SGLang: python -m tests.gpu.prove_failures OUT …

Each is one server in a run of its own; most run at the same time. Of each: what doctor said, the exit code, how long it
took, what tokenmill said, and the card's memory afterwards. `graphs` and `eaten` need the card for themselves.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.prove import FLAGS, START_S, make_case, prove, write_prompts
from tests.harness import Case, assert_whole
from tokenmill import events
from tokenmill.machine import nvml

SMALL = {**FLAGS, "max-total-tokens": 100_000, "cuda-graph-max-bs": 16}
PROMPTS = 100

EATER = """
import sys, time, torch
leave = int(sys.argv[1]) << 20
held = []
while torch.cuda.mem_get_info()[0] > leave + (1 << 28):
    held.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
print("full", flush=True)
time.sleep(float(sys.argv[2]))
"""


def used_mib(args: argparse.Namespace) -> list[int]:
    return [] if args.no_gpu else [nvml.read()[gpu].memory_used >> 20 for gpu in args.gpus]


def small_case(folder: Path, args: argparse.Namespace, port: int, flags: dict[str, Any], **overrides: Any) -> Case:
    case = make_case(
        folder,
        args,
        port,
        engine={"args": {**SMALL, **flags}},
        generation={"max_tokens": 64, "thinking": False},
        **overrides,
    )
    write_prompts(case.folder / "prompts.jsonl", PROMPTS)
    return case


def outcome(case: Case, *words: str) -> dict[str, Any]:
    """One run: exit code, seconds, and all warnings and errors that were told."""
    began = time.monotonic()
    code = case.run(*words, timeout_s=START_S)
    told = [
        {"at": round(event.t - began - time.time() + time.monotonic(), 1), "text": event.text, "fix": event.fix}
        | ({"lines": list(event.lines)} if event.lines else {})
        for event, _ in events.read(case.run_folder.events)
        if event.level in ("warn", "error") or event.kind == "ready"
    ]
    return {
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "told": told,
        "last lines": case.output().splitlines()[-6:],
        "leftovers": case.leftovers(),
    }


def unknown_flag(folder: Path, args: argparse.Namespace, port: int) -> dict[str, Any]:
    case = small_case(folder, args, port, {"no-such-flag": 3})
    return {"with doctor": outcome(case), "without": outcome(case, "--skip", "engine")}


def missing_shard(folder: Path, args: argparse.Namespace, port: int) -> dict[str, Any]:
    model = folder.parent / f"{folder.name}-model"
    shutil.copytree(args.model, model)
    (weights,) = model.glob("*.safetensors")
    weights.rename(model / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    case = small_case(folder, args, port, {}, model={"path": str(model)})
    return {"with doctor": outcome(case), "without": outcome(case, "--skip", "model")}


def no_cache(folder: Path, args: argparse.Namespace, port: int) -> dict[str, Any]:
    """A fraction below the weights: it fails when the cache is to be made."""
    case = small_case(folder, args, port, {"mem-fraction-static": 0.002})
    return outcome(case, "--skip", "capacity")


def taken(folder: Path, args: argparse.Namespace, port: int, which: str) -> dict[str, Any]:
    """Taken when the server has been launched: no check before it can know."""
    case = small_case(folder, args, port, {})
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            state = case.run_folder.state()
            if state.servers:
                entry = state.servers[0]
                number = entry.port if which == "http" else entry.internal_port
                with socket.socket() as holder:
                    holder.bind(("127.0.0.1", number))
                    holder.listen()
                    stop.wait(START_S)
            stop.wait(0.05)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        found = outcome(case)
    finally:
        stop.set()
        thread.join()
    if found["code"] == 0:
        assert_whole(case, {f"p{n}" for n in range(PROMPTS)})
    return found


STARTS: dict[str, Callable[[Path, argparse.Namespace, int], dict[str, Any]]] = {
    "unknown flag": unknown_flag,
    "missing shard": missing_shard,
    "fraction too small for a cache": no_cache,
    "HTTP port taken": lambda folder, args, port: taken(folder, args, port, "http"),
    "NCCL port taken": lambda folder, args, port: taken(folder, args, port, "nccl"),
}


def starts(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All of STARTS at once, on one card."""
    folder.mkdir()
    before = used_mib(args)

    def one(item: tuple[int, str]) -> Any:
        number, name = item
        try:
            return STARTS[name](folder / f"{number}", args, args.port + 50 * number)
        except AssertionError as error:
            return {"FAILED": str(error)[-3000:]}

    with ThreadPoolExecutor(len(STARTS)) as pool:
        found = dict(zip(STARTS, pool.map(one, enumerate(STARTS)), strict=True))
    return {**found, "MiB used before, after": [before, used_mib(args)]}


def eat(args: argparse.Namespace, leave_mib: int, seconds: float) -> "subprocess.Popen[str]":
    env = {"CUDA_VISIBLE_DEVICES": str(args.gpus[0]), "PATH": "/usr/bin:/bin", "HOME": "/root"}
    words = [sys.executable, "-c", EATER, str(leave_mib), str(seconds)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)


def when_logged(case: Case, word: str, act: Callable[[], None]) -> threading.Thread:
    """Acts once when the first server's log holds a word."""

    def watch() -> None:
        deadline = time.monotonic() + START_S
        log = case.run_folder.log(0)
        while time.monotonic() < deadline:
            if log.exists() and word in log.read_text(errors="replace"):
                act()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def graphs(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Somebody takes the rest of the card when the cache stands: the capture of graphs runs out of memory."""
    case = small_case(folder, args, args.port, {"cuda-graph-max-bs": 256})
    eaters: list[subprocess.Popen[str]] = []
    when_logged(case, "KV Cache is allocated", lambda: eaters.append(eat(args, 64, 60.0)))
    try:
        return {**outcome(case), "MiB used": used_mib(args)}
    finally:
        for eater in eaters:
            eater.kill()
            eater.wait()


def eaten(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Somebody takes all of the card's free memory while a server works; then a start on the full card."""
    case = small_case(folder / "a", args, args.port, {}, fleet={"stall_timeout": "20s"})
    write_prompts(case.folder / "prompts.jsonl", 6000)
    process = case.start()
    case.until_done(500, process, START_S)
    eater = eat(args, 64, START_S)
    assert eater.stdout is not None
    eater.stdout.readline()
    full = used_mib(args)
    code = case.wait(process, START_S)
    working = {"code": code, "MiB when full": full, "last lines": case.output().splitlines()[-4:]}
    other = small_case(folder / "b", args, args.port + 50, {}, fleet={"give_up": "20s"})
    doctor = subprocess.run(
        [sys.executable, "-m", "tokenmill", "doctor", str(other.config), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = outcome(other, "--skip", "gpus", "--skip", "capacity")
    eater.kill()
    eater.wait()
    return {"while working": working, "doctor on the full card": doctor.stdout[-4000:], "start on it": found}


def doctor(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every check's reading on the real machine."""
    case = small_case(folder, args, args.port, {})
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "doctor", str(case.config), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return {"code": done.returncode, **found}


if __name__ == "__main__":
    sys.exit(prove({"doctor": doctor, "starts": starts, "graphs": graphs, "eaten": eaten}))

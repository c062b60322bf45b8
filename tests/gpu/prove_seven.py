"""Many servers on one machine, one card left alone: python -m tests.gpu.prove_seven OUT --gpus 0,1,2 …

The last card of the machine is never ours: its processes and memory are read every half second and must not change.
`starts`: the servers' start staggered and all at once. `many`: `SERVERS` servers, all prompts, one server killed and
one stopped in the middle. `scale`: a server a card against one server, by a bare closed loop and under tokenmill.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import bynumber
from tests.gpu.closed_loop import forget, loop, steady
from tests.gpu.prove import START_S, cards, make_case, phases, prove, write_prompts
from tests.gpu.prove_node import ARGS, PEAK_S, RAMP_S, generation, sampling, under_tokenmill
from tests.gpu.prove_sglang import exactness
from tests.harness import Case, assert_whole
from tokenmill import events
from tokenmill.machine import nvml

SERVERS = 7
WIDTH = 128
MANY = {**ARGS, "cuda-graph-max-bs": 128, "max-total-tokens": 200_000}
STALL_S = 20.0
SHORT = {"max_tokens": 128, "extra": {}}
"""50,000 answers within minutes, on one card, too."""


@contextmanager
def untouched(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Watches the machine's last card; the dict says what was seen once the watch has ended."""
    seen: set[tuple[int, int]] = set()
    found: dict[str, Any] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            card = nvml.read()[-1]
            seen.add((card.memory_used >> 20, len(card.pids)))

    thread = threading.Thread(target=watch, daemon=True)
    if not args.no_gpu:
        assert nvml.read()[-1].index not in args.gpus, "the last card must be left alone"
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        if thread.ident:
            thread.join()
        found["the last card: (MiB used, processes) ever seen"] = sorted(seen)


def many_case(folder: Path, args: argparse.Namespace, servers: int, **overrides: Any) -> Case:
    case = make_case(
        folder,
        args,
        args.port,
        engine={"args": MANY},
        generation={**generation(args), "concurrency": WIDTH, **overrides.pop("generation", {})},
        fleet={"gpus": cards(args, min(servers, len(args.gpus))), "servers": servers, "stall_timeout": f"{STALL_S}s"},
        **overrides,
    )
    write_prompts(case.folder / "prompts.jsonl", args.prompts)
    return case


def starts(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until all servers are ready, by fleet.stagger; caches are warm for both but for the very first."""
    folder.mkdir()
    found: dict[str, Any] = {}
    with untouched(args) as last:
        for stagger in ("first", "off"):
            case = many_case(folder / stagger, args, SERVERS)
            began = time.monotonic()
            words = ("--set", f"fleet.stagger={stagger}", "--set", f"fleet.min_ready={SERVERS}")
            code = case.wait(case.command("up", str(case.config), *words), START_S)
            found[stagger] = {"code": code, "seconds": round(time.monotonic() - began, 1), "phases": phases(case)}
            case.wait(case.command("down", str(case.run_path)), 120)
    return {**found, **last}


def many(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts on SERVERS servers; in the middle one's main process is killed and another's scheduler stopped."""
    with untouched(args) as last:
        case = many_case(folder, args, SERVERS, generation=SHORT)
        began = time.monotonic()
        process = case.start()
        case.until_done(args.prompts // 5, process, START_S)
        first = time.monotonic() - began
        state = case.run_folder.state()
        killed, stopped = state.servers[1], state.servers[3]
        os.kill(killed.process.pid, signal.SIGKILL)
        for pid in bynumber.members(stopped.group, stopped.nonce):
            if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGSTOP)
        harmed = time.time()
        code = case.wait(process, START_S)
        took = time.monotonic() - began
    told = [
        f"{event.t - harmed:+.1f} server {event.server}: {event.text}"
        for event, _ in events.read(case.run_folder.events)
        if event.level != "info" or event.kind == "ready"
    ]
    assert code == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(args.prompts)})
    records = case.records()
    return {
        "seconds to a fifth": round(first, 1),
        "seconds": round(took, 1),
        "records": len(records),
        "output tokens": sum(record.output_tokens for record in records),
        "exact": exactness(records[::10], Path(args.model)),
        "by server": {name: sum(record.server == name for record in records) for name in {r.server for r in records}},
        "told": told,
        "leftovers": case.leftovers(),
        "status": json.loads((case.run_path / "status.json").read_bytes()),
        **last,
    }


def scale(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One server, then one a card: throughput ÷ (cards × one), under tokenmill and of the bare loop."""
    folder.mkdir()
    found: dict[str, Any] = {}
    for servers in (1, len(args.gpus)):
        case = many_case(
            folder / f"{servers}", args, servers, prompts={"limit": args.prompts * servers // 4}, stage={"to": "off"}
        )
        case.write(fleet={"keep_servers": "always", "gpus": cards(args, servers), "servers": servers})
        assert case.run(timeout_s=START_S) == 0, case.output()
        records = case.records()
        asked = [json.loads(bytes(each.prompt_ids)) for each in sorted(records, key=lambda each: each.started)]
        ports = [entry.port for entry in case.run_folder.state().servers]
        forget(ports)
        bare = steady(loop(ports, asked, sampling(args), WIDTH, PEAK_S + RAMP_S), RAMP_S)
        own = under_tokenmill(records, RAMP_S)
        case.wait(case.command("down", str(case.run_path)), 120)
        found[f"{servers}"] = {
            "tokens": own.tokens,
            "seconds": own.seconds,
            "peak_tokens": bare.tokens,
            "peak_seconds": bare.seconds,
            "ratio": round(own.per_s / bare.per_s, 4),
            "per_s": own.per_s,
            "peak_per_s": bare.per_s,
        }
    one, all_ = found["1"], found[str(len(args.gpus))]
    found["throughput ÷ (servers × one)"] = round(all_["per_s"] / one["per_s"] / len(args.gpus), 4)
    return found


def machine(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    found = [] if args.no_gpu else nvml.read()
    return {"cards": [(card.name, card.driver, card.memory_used >> 20) for card in found], "cores": os.cpu_count()}


if __name__ == "__main__":
    sys.exit(prove({"machine": machine, "starts": starts, "many": many, "scale": scale}))

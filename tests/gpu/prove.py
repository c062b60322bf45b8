"""What the proofs on a GPU machine share: a config for real SGLang, prompts, what was told, the steps."""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.harness import Case
from tokenmill import events

START_S = 300.0

FLAGS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.5,
    "max-total-tokens": 200_000,
    "context-length": 4096,
    "cuda-graph-max-bs": 64,
}

"""SGLang takes its fraction of the whole card from what is free: servers that share one take tokens instead."""

TOPICS = [
    "tides",
    "bread",
    "glaciers",
    "bridges",
    "violins",
    "maps",
    "bees",
    "harbours",
    "clocks",
    "salt",
    "kites",
    "comets",
    "wells",
    "letters",
    "looms",
]
ASKS = (
    "Explain in a short paragraph how {} work.",
    "Write three sentences about {}.",
    "What do most people get wrong about {}?",
    "Give two facts and one question about {}.",
)


def write_prompts(path: Path, count: int) -> None:
    with path.open("w") as out:
        for n in range(count):
            text = ASKS[n % len(ASKS)].format(TOPICS[n % len(TOPICS)]) + f" Number {n}."
            out.write(json.dumps({"id": f"p{n}", "prompt": text}) + "\n")


def make_case(folder: Path, args: argparse.Namespace, port: int, **overrides: Any) -> Case:
    folder.mkdir(parents=True)
    case = Case(folder, port)
    case.settings = {
        "model": {"path": args.model, "name": "smollm2"},
        "engine": {
            "kind": "sglang",
            "python": args.python,
            "args": FLAGS,
            "env": {"PYTHONPATH": args.site, "HF_HUB_OFFLINE": "1"},
        },
        "fleet": {"gpus": cards(args, 1), "servers": 1, "stagger": "first", "start_timeout": "5m", "backoff": "1s"},
        "generation": {"max_tokens": 200, "thinking": False},
        "gate": {"cohort": 100, "max_truncated": 1.0},
    }
    case.write(**overrides)
    _made.append(case)
    return case


_made: list[Case] = []
"""All cases of this process: what a failed step leaves running would sit on the next one's cards and ports."""


def cards(args: argparse.Namespace, count: int) -> Any:
    """The first of the cards that this proof may use."""
    assert args.no_gpu or len(args.gpus) >= count, f"needs {count} cards, has {args.gpus}"
    return "none" if args.no_gpu else args.gpus[:count]


def phases(case: Case) -> list[str]:
    return [
        f"{event.t:.1f} {event.server} {event.kind} {event.text}"
        for event, _ in events.read(case.run_folder.events)
        if event.kind in ("state", "launch", "ready", "adopt", "server", "canary", "leftover")
    ]


def keep(args: argparse.Namespace, step: str, found: Mapping[str, Any]) -> None:
    """What a step has found so far: a machine may be gone before the step's end."""
    (args.out / f"stages-{args.work.name}-{step}.json").write_text(json.dumps(found, indent=1, default=str))


Step = Callable[[Path, argparse.Namespace], dict[str, Any]]
"""A proof: the folder it may make, the arguments → what it found."""


def prove(steps: Mapping[str, Step]) -> int:
    """Runs the steps asked for, prints and keeps what they found, and the logs; a step that fails ends no other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--site", required=True)
    parser.add_argument("--python", default=sys.executable, help="the engine's own")
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")], default=[0])
    parser.add_argument("--port", type=int, default=31200, help="proofs that run at once need blocks of 100 apart")
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--work", type=Path, default=Path("/tmp/prove"))
    parser.add_argument("--no-gpu", action="store_true", help="a rehearsal with a stand-in for the engine")
    parser.add_argument("--only", default=",".join(steps))
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    results: dict[str, Any] = {}
    for name in args.only.split(","):
        began = time.monotonic()
        try:
            results[name] = steps[name](args.work / name, args)
        except (AssertionError, LookupError, OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
            results[name] = {"FAILED": f"{type(error).__name__}: {str(error)[-6000:]}"}
        while _made:
            _made.pop().cleanup()
        results[name]["took"] = round(time.monotonic() - began, 1)
        print(name, json.dumps(results[name], indent=1, default=str), flush=True)
        (args.out / f"results-{args.work.name}.json").write_text(json.dumps(results, indent=1, default=str))
    for log in args.work.rglob("server-*.log"):
        shutil.copy(log, args.out / f"{args.work.name}-{log.parent.parent.parent.parent.name}-{log.name}")
    for log in args.work.rglob("output.txt"):
        shutil.copy(log, args.out / f"{args.work.name}-{log.parent.name}-output.txt")
    return 0

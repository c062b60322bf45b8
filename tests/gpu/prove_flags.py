"""The reference run's own flags on its kind of model, with random weights: python -m tests.gpu.prove_flags OUT …

--model is the hybrid dummy's folder with a tokenizer beside its configs. A plan before, a run, and what the server said
of requests at once, accept length, the silent compile at the first full batch. `bounded` has max-mamba-cache-size 80
as the reference run had, `unbounded` leaves it to the engine; `three` are three servers on three cards.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.prove import START_S, cards, make_case, phases, prove, write_prompts
from tests.harness import Case
from tokenmill import events

PROMPTS = 320
RUN_S = 2 * START_S

REFERENCE = {
    "speculative-algorithm": "EAGLE",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
    "mamba-scheduler-strategy": "extra_buffer",
    "max-mamba-cache-size": 80,
    "context-length": 8192,
}
HERE = {
    "mem-fraction-static": 0.5,  # the card is shared with other proofs
    "attention-backend": "triton",  # FlashAttention-3 is too big to bring over
    "sampling-backend": "pytorch",
    "load-format": "dummy",
}


def plan(case: Case) -> Any:
    words = [sys.executable, "-m", "tokenmill", "plan", str(case.config), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr[-2000:]


def with_flags(folder: Path, args: argparse.Namespace, flags: dict[str, Any], servers: int = 1) -> dict[str, Any]:
    case = make_case(
        folder,
        args,
        args.port,
        model={"name": "hybrid"},
        engine={"args": {**flags, **HERE}, "env": {"SGLANG_ENABLE_SPEC_V2": "1"}},
        fleet={"gpus": cards(args, servers), "servers": servers, "stagger": "first"},
        generation={"max_tokens": 256, "thinking": False},
        judge={"reject": []},
        gate={"cohort": 100, "max_truncated": 1.0, "max_rejected": 1.0},
    )
    write_prompts(case.folder / "prompts.jsonl", PROMPTS * servers)
    planned = plan(case)
    code = case.run("--skip", "model", timeout_s=RUN_S)
    told = [f"{e.t:.1f} {e.server} {e.level} {e.text}" for e, _ in events.read(case.run_folder.events)]
    moments = (case.run_path / "history.jsonl").read_text().splitlines()
    records = case.records()
    return {
        "code": code,
        "planned": planned,
        "events": told,
        "phases": phases(case),
        "records": len(records),
        "accept length": sorted({record.accept_length for record in records if record.accept_length})[:5],
        "last moments": moments[-6:],
        "output": case.output()[-3000:],
    }


def bounded(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    return with_flags(folder, args, REFERENCE)


def unbounded(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    flags = {name: value for name, value in REFERENCE.items() if name != "max-mamba-cache-size"}
    return with_flags(folder, args, flags)


def three(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    return with_flags(folder, args, REFERENCE, servers=3)


if __name__ == "__main__":
    sys.exit(prove({"bounded": bounded, "unbounded": unbounded, "three": three}))

"""A node of real SGLang servers on GPUs, whole and at full speed: python -m tests.gpu.prove_node OUT --model … --site …

`two`: two cards, a server each: 200 prompts from cold; then the servers' own peak, by a bare closed loop and by the
engine's own bench_serving; then all prompts at the width that was best, on the servers that were kept; the peak again;
report, inspect, audit, exports. `four`: four servers on one card. Ids are checked against the tokenizer, row by row.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.closed_loop import Rate, peak
from tests.gpu.prove import FLAGS, START_S, cards, make_case, phases, prove, write_prompts
from tests.gpu.prove_sglang import exactness
from tests.harness import Case, assert_whole
from tokenmill.core.records import Record

FIRST = 200
WIDTHS = (64, 128, 256)
SWEEP_S, PEAK_S = 9.0, 20.0
SAMPLING: dict[str, object] = {"max_new_tokens": 512, "min_new_tokens": 256, "temperature": 1.0}
GENERATION = {
    "max_tokens": 512,
    "temperature": 1.0,
    "thinking": False,
    "extra": {"min_new_tokens": 256},
}
ARGS = {**FLAGS, "cuda-graph-max-bs": 256, "max-total-tokens": 400_000}


def under_tokenmill(records: list[Record], width_s: float) -> Rate:
    """Tokens of the answers of the middle of a run: without `width_s` at its begin and at its end."""
    ends = [record.started + record.seconds for record in records]
    begin, end = min(record.started for record in records) + width_s, max(ends) - width_s
    tokens = sum(record.output_tokens for record, at in zip(records, ends, strict=True) if begin <= at < end)
    return Rate(tokens, round(end - begin, 2))


def bench_serving(port: int, args: argparse.Namespace, width: int) -> dict[str, Any]:
    """The engine's own closed loop on one server; random ids, 300 tokens an answer."""
    out = args.work / f"bench-{port}.jsonl"
    words = ["--backend", "sglang", "--base-url", f"http://127.0.0.1:{port}", "--dataset-name", "random-ids"]
    words += ["--random-input-len", "40", "--random-output-len", "300", "--random-range-ratio", "1.0"]
    words += ["--num-prompts", str(width * 20), "--max-concurrency", str(width), "--output-file", str(out)]
    words += ["--model", args.model, "--tokenizer", args.model, "--disable-tqdm"]
    done = subprocess.run(
        [sys.executable, "-m", "sglang.bench_serving", *words],
        env={**os.environ, "PYTHONPATH": args.site, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-1500:]}
    found = json.loads(out.read_text().splitlines()[-1])
    return {name: found.get(name) for name in ("output_throughput", "completed", "duration", "total_output_tokens")}


def page(port: int, name: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=30) as reply:
        return str(reply.read(), "utf-8", "replace")


def two(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    return node(folder, args, count=2, on=2)


def four(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    return node(folder, args, count=4, on=1)


def node(folder: Path, args: argparse.Namespace, *, count: int, on: int) -> dict[str, Any]:
    case = make_case(
        folder,
        args,
        args.port,
        engine={"args": ARGS},
        stage={"to": "/dev/shm/tokenmill-proof"},
        fleet={"gpus": cards(args, on), "servers": count, "keep_servers": "always"},
        generation={**GENERATION, "concurrency": 64},
        prompts={"limit": FIRST},
    )
    write_prompts(case.folder / "prompts.jsonl", args.prompts)
    found: dict[str, Any] = {}
    began = time.monotonic()
    assert case.run(timeout_s=START_S) == 0, case.output()
    found["cold: seconds to 200 records"] = round(time.monotonic() - began, 1)
    found["phases"] = phases(case)
    found["start as kept"] = case.run_folder.state().start
    ports = [entry.port for entry in case.run_folder.state().servers]
    prompts = [json.loads(bytes(record.prompt_ids)) for record in case.records()]
    sweep = {width: peak(ports, prompts, SAMPLING, width, SWEEP_S) for width in WIDTHS}
    found["closed loop, tokens/s by width"] = {width: rate.per_s for width, rate in sweep.items()}
    best = max(sweep, key=lambda width: sweep[width].per_s)
    before = peak(ports, prompts, SAMPLING, best, PEAK_S)
    began, second = time.monotonic(), time.time()
    code = case.run("--set", "prompts.limit=0", "--set", f"generation.concurrency={best}", timeout_s=START_S)
    took = time.monotonic() - began
    after = peak(ports, prompts, SAMPLING, best, PEAK_S)
    assert code == 0, case.output()
    with ThreadPoolExecutor(count) as pool:
        found["bench_serving"] = list(pool.map(lambda port: bench_serving(port, args, best), ports))
    records = case.records()
    assert_whole(case, {f"p{n}" for n in range(args.prompts)})
    own = under_tokenmill([record for record in records if record.started > second], 3.0)
    found["pages"] = {name: page(ports[0], name) for name in ("server_info", "metrics")}
    found |= {
        "width": best,
        "measurement": {
            "what": f"{args.prompts} prompts under tokenmill, closed loop before and after",
            "engine": "sglang 0.5.11",
            "gpus": on,
            "servers": count,
            "tokens": own.tokens,
            "seconds": own.seconds,
            "peak_tokens": before.tokens + after.tokens,
            "peak_seconds": before.seconds + after.seconds,
        },
        "peak before, after": [before.per_s, after.per_s],
        "ratio": round(own.per_s / ((before.tokens + after.tokens) / (before.seconds + after.seconds)), 4),
        "whole second run, s": round(took, 1),
        "output tokens": sum(record.output_tokens for record in records),
        "exact": exactness(records, Path(args.model)),
        "status": (case.run_path / "status.json").read_text()[:3000],
    }
    found["commands"] = commands(case)
    assert case.wait(case.command("down", str(case.run_path)), START_S) == 0, case.output()
    found["leftovers"] = case.leftovers()
    return found


def commands(case: Case) -> dict[str, Any]:
    """What is done with a run afterwards, each with its exit code and seconds."""
    done = {}
    for words in (
        ("report", str(case.run_path)),
        ("inspect", str(case.run_path)),
        ("audit", str(case.run_path), "--sample", "2000"),
        ("export", str(case.run_path), "specforge", str(case.folder / "specforge")),
        ("export", str(case.run_path), "parquet", str(case.folder / "parquet")),
    ):
        began = time.monotonic()
        code = case.wait(case.command(*words), START_S)
        done[" ".join(words[:1] + words[2:3])] = [code, round(time.monotonic() - began, 1)]
    return done


if __name__ == "__main__":
    sys.exit(prove({"two": two, "four": four}))

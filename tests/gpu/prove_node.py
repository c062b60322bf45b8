"""A node of real SGLang servers on GPUs, whole and at full speed: python -m tests.gpu.prove_node OUT --model … --site …

`two`: two cards, a server each: 200 prompts from cold; then the servers' own peak by a bare closed loop; then all
prompts at the best width, on the servers that were kept; the loop again, in the order in which tokenmill asked them;
report, inspect, exports, and the engine's own bench_serving. `four`: four servers on one card. Ids are checked against
the tokenizer, row by row. Each stage is kept as it ends.

Run it alone on its machine. Beside other proofs a step of one and the same batch took 16 to 33 ms (H200, 32 cores), so
that a ratio of two stretches said more of the neighbours than of tokenmill. Each stage notes the load average.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.closed_loop import Rate, forget, loop, steady
from tests.gpu.prove import FLAGS, START_S, cards, keep, make_case, phases, prove, write_prompts
from tests.gpu.prove_sglang import end_ids, exactness, render
from tests.harness import Case, assert_whole
from tokenmill.core.records import Record
from tokenmill.core.trials import Answer

FIRST = 200
WIDTHS = (64, 128, 256)
SWEEP_S, PEAK_S, RAMP_S = 12.0, 40.0, 8.0
"""An answer of 512 tokens takes 8 s at 256 in flight: then all slots are at different points of theirs."""

BENCH_S = 120.0
"""bench_serving once gave no sign within 300 s, and took the rest of the session with it."""

ARGS = {**FLAGS, "cuda-graph-max-bs": 256, "max-total-tokens": 400_000}


def sampling(args: argparse.Namespace) -> dict[str, object]:
    """256 to 512 tokens an answer. SGLang's min_new_tokens bars the tokenizer's end token and those in stop_token_ids,
    not the model's own: unnamed, half of the answers had fewer than 76 tokens."""
    stops = sorted(end_ids(Path(args.model)))
    return {"max_new_tokens": 512, "min_new_tokens": 256, "temperature": 1.0, "stop_token_ids": stops}


def generation(args: argparse.Namespace) -> dict[str, Any]:
    """The same for tokenmill."""
    extra = {name: sampling(args)[name] for name in ("min_new_tokens", "stop_token_ids")}
    return {"max_tokens": 512, "temperature": 1.0, "thinking": False, "extra": extra}


def under_tokenmill(records: list[Record], ramp_s: float) -> Rate:
    return steady(
        [Answer(each.started, each.started + each.seconds, each.output_tokens) for each in records],
        ramp_s,
    )


def bench_serving(port: int, args: argparse.Namespace, width: int) -> dict[str, Any]:
    """The engine's own closed loop on one server; random ids, 300 tokens an answer."""
    out = args.work / f"bench-{port}.jsonl"
    words = ["--backend", "sglang", "--base-url", f"http://127.0.0.1:{port}", "--dataset-name", "random-ids"]
    words += ["--random-input-len", "40", "--random-output-len", "300", "--random-range-ratio", "1.0"]
    words += ["--num-prompts", str(width * 20), "--max-concurrency", str(width), "--output-file", str(out)]
    words += ["--model", args.model, "--tokenizer", args.model, "--disable-tqdm"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sglang.bench_serving", *words],
            env={**os.environ, "PYTHONPATH": args.site, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=BENCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"not done within s": BENCH_S, "said": str(error.stdout)[-1500:], "on stderr": str(error.stderr)[-1500:]}
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
    found: dict[str, Any] = {}

    def stage(**values: Any) -> None:
        found.update(values)
        found.setdefault("load average", []).append([*values, round(os.getloadavg()[0], 1)])
        keep(args, folder.name, found)

    case = make_case(
        folder,
        args,
        args.port,
        engine={"args": ARGS},
        stage={"to": "/dev/shm/tokenmill-proof"},
        fleet={"gpus": cards(args, on), "servers": count, "keep_servers": "always"},
        generation={**generation(args), "concurrency": 64},
        prompts={"limit": FIRST},
    )
    write_prompts(case.folder / "prompts.jsonl", args.prompts)
    began = time.monotonic()
    assert case.run(timeout_s=START_S) == 0, case.output()
    stage(cold_s_to_200_records=round(time.monotonic() - began, 1))
    state = case.run_folder.state()
    stage(phases=phases(case), start_as_kept=state.start)
    measured = measure(case, args, [entry.port for entry in state.servers], stage)
    stage(measurement={"engine": "sglang 0.5.11", "gpus": on, "servers": count, **measured})
    records = case.records()
    assert_whole(case, {f"p{n}" for n in range(args.prompts)})
    stage(output_tokens=sum(record.output_tokens for record in records), exact=exactness(records, Path(args.model)))
    stage(commands=commands(case), status=(case.run_path / "status.json").read_text()[:3000])
    ports = [entry.port for entry in state.servers]
    stage(pages={name: page(ports[0], name) for name in ("server_info", "metrics")})
    with ThreadPoolExecutor(count) as pool:
        stage(bench_serving=list(pool.map(lambda port: bench_serving(port, args, found["width"]), ports)))
    assert case.wait(case.command("down", str(case.run_path)), START_S) == 0, case.output()
    stage(leftovers=case.leftovers())
    return found


def measure(case: Case, args: argparse.Namespace, ports: list[int], stage: Callable[..., None]) -> dict[str, Any]:
    """tokenmill's steady stretch between two of the bare loop: the same prompts, sampling and width, empty caches."""
    wanted = sampling(args)
    prompts = render(case.folder / "prompts.jsonl", Path(args.model))
    sweep = {width: steady(loop(ports, prompts, wanted, width, SWEEP_S), SWEEP_S / 3) for width in WIDTHS}
    best = max(sweep, key=lambda width: sweep[width].per_s)
    stage(by_width={width: rate.per_s for width, rate in sweep.items()}, width=best)
    forget(ports)
    before = steady(loop(ports, prompts, wanted, best, PEAK_S + RAMP_S), RAMP_S)
    stage(peak_before=before.per_s)
    forget(ports)
    began, second = time.monotonic(), time.time()
    code = case.run("--set", "prompts.limit=0", "--set", f"generation.concurrency={best}", timeout_s=START_S)
    assert code == 0, case.output()
    records = sorted((each for each in case.records() if each.started > second), key=lambda each: each.started)
    own = under_tokenmill(records, RAMP_S)
    stage(whole_second_run_s=round(time.monotonic() - began, 1), under_tokenmill=own.per_s)
    forget(ports)
    asked = [json.loads(bytes(record.prompt_ids)) for record in records]
    after = steady(loop(ports, asked, wanted, best, PEAK_S + RAMP_S), RAMP_S)
    peak = Rate(before.tokens + after.tokens, before.seconds + after.seconds)
    stage(peak_after=after.per_s, ratio=round(own.per_s / peak.per_s, 4))
    return {
        "what": f"{args.prompts} prompts of 256 to 512 tokens under tokenmill, closed loop before and after",
        "tokens": own.tokens,
        "seconds": own.seconds,
        "peak_tokens": peak.tokens,
        "peak_seconds": peak.seconds,
    }


def commands(case: Case) -> dict[str, Any]:
    """What is done with a run afterwards, each with its exit code and seconds."""
    done = {}
    for words in (
        ("report", str(case.run_path)),
        ("inspect", str(case.run_path)),
        ("export", str(case.run_path), "specforge", str(case.folder / "specforge")),
        ("export", str(case.run_path), "parquet", str(case.folder / "parquet")),
    ):
        began = time.monotonic()
        code = case.wait(case.command(*words), START_S)
        done[" ".join(words[:1] + words[2:3])] = [code, round(time.monotonic() - began, 1)]
    return done


if __name__ == "__main__":
    sys.exit(prove({"two": two, "four": four}))

"""What a completion costs a client: a run without its end, the report at its end, the sealing beside it; two floors."""

import subprocess
import sys
from pathlib import Path

from bench import data
from bench.measure import PORTS, ROOT, Cost, fake_server, measure, run_config, write_config

GOALS = {300: (0.5, 0.18), 30_000: (0.8, 0.38)}
"""Bytes of an answer: processor seconds per 1,000, and the floor of the day on which they were set, as a bare loop that
parses each answer and writes it to a file: their ratio is what is asked for."""

Words = tuple[str, str, str, str]


def measure_all(scratch: Path, warm: int, rows: int) -> list[Words]:
    """Two runs of different size for each length of answer, so that the start is left out."""
    return [_of(scratch, size, warm, rows) for size in GOALS]


def _of(scratch: Path, size: int, warm: int, rows: int) -> Words:
    goal, there = GOALS[size]
    runs: list[Cost] = []
    reports: list[Cost] = []
    with fake_server("--answer-bytes", str(size)) as address:
        for count in (warm, warm + rows):
            prompts = data.write_prompts(scratch / f"prompts-{count}.jsonl", count)
            folder = scratch / f"cost-{size}-{count}"
            runs.append(run_config(write_config(folder, prompts), address))
            command = [sys.executable, "-m", "tokenmill", "report", str(folder / "runs" / "bench")]
            reports.append(measure(command, address))
        keeps, bare = _floor(rows, scratch / "floor.jsonl"), _floor(rows)
    scale = 1000 / rows
    report = (reports[1].cpu_s - reports[0].cpu_s) * scale
    run = (runs[1].main_s - runs[0].main_s) * scale - report
    sealed = (runs[1].cpu_s - runs[0].cpu_s) * scale
    return (
        f"client CPU s per 1,000 completions of {size:,} B; its report; all with sealing, at low priority",
        f"{goal} ({goal / there:.1f} × floor)",
        f"{run:.2f} ({run / (keeps * scale):.1f} ×); {report:.2f}; {sealed:.2f}",
        f"{keeps * scale:.2f}; {bare * scale:.2f} with nothing kept",
    )


def _floor(count: int, keep: Path | None = None) -> float:
    command = [sys.executable, "-m", "bench.floor", str(count), PORTS, "64", *([str(keep)] if keep else [])]
    return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

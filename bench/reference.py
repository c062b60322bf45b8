"""The whole reference run, simulated: 902,087 prompts, 7 servers × 64 in flight, by the commands that a user gives.

The servers are fake and time-compressed (bench/referenceserver.py); prompts, client, judge, journal, sealing, gate,
report and export are the real ones. tokenmill is killed (-9) when half of the rows are served, and run again. At the
end every count is compared with what follows from the rows' numbers.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow.parquet as pq

from bench import data, measure
from bench.measure import ROOT, stats
from bench.referenceserver import is_empty, is_refused
from tokenmill.reporting.figures import Counts

SAMPLE_S = 0.5
"""A sealer lives for seconds."""

TELL_S = 20.0
PATIENCE_S = 4 * 3600.0
"""For a machine that others use, too; minutes by itself."""

SETTLED = 0.2
"""Of a life's samples, those before are its start: pools and arenas fill."""


ENOUGH = 60
"""Samples for a slope: half a minute."""


@dataclass
class Life:
    """One process from start to end: its memory over time (seconds, rows served, MB), MB at the peak by kind."""

    code: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    samples: list[tuple[float, int, float]] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)

    @property
    def serving_mb(self) -> float:
        """The most that its main process had up to the last row served; `peaks` knows the end as well."""
        last = self.samples[-1][1]
        return max((size for _, done, size in self.samples if done < last), default=0.0)

    @property
    def slope(self) -> float | None:
        """MB of main memory per 100,000 rows served, after the start; nothing where too little was seen."""
        served = [(done, size) for _, done, size in self.samples if done > self.samples[0][1]]
        served = served[int(SETTLED * len(served)) :]
        rows = np.array([done for done, _ in served])
        if len(served) < ENOUGH:
            return None
        return float(np.polyfit(rows, [size for _, size in served], 1)[0]) * 100_000


def follow(words: list[str], what: str, address: str = "", stop_after: int = 0) -> Life:
    """`tokenmill …` to its end, or killed (-9) once so many rows were served."""
    life, began, told = Life(), time.monotonic(), 0.0
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "tokenmill", *words]
    cpu: dict[int, float] = {}
    with subprocess.Popen(command, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            passed = time.monotonic() - began
            done = int(stats(address)["done"]) if address else 0
            main_mb = _look(watched, life.peaks, cpu)
            if main_mb:
                life.samples.append((passed, done, main_mb))
            if passed - told >= TELL_S:
                told = passed
                sys.stderr.write(f"{what}: {passed:,.0f} s, {done:,} served, {main_mb:,.0f} MB\n")
            if (stop_after and done >= stop_after) or passed > PATIENCE_S:
                process.kill()
            time.sleep(SAMPLE_S)
        assert process.stderr is not None
        errors = process.stderr.read().decode("utf-8", "replace")
    life.wall_s, life.cpu_s, life.code = time.monotonic() - began, sum(cpu.values()), process.returncode
    if life.code != (-9 if stop_after else 0):
        raise SystemExit(f"tokenmill {' '.join(words)} ended with exit code {life.code}:\n{errors[-2000:]}")
    return life


def _look(main: psutil.Process, peaks: dict[str, float], cpu: dict[int, float]) -> float:
    """Notes the peaks (VmHWM) of a process and its children and their processor seconds; its own memory of now."""
    own = 0.0
    try:
        for member in [main, *main.children(recursive=True)]:
            words = " ".join(member.cmdline())
            kind = "main" if member is main else "sealer" if "tokenmill.seal" in words else "other"
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{member.pid}/status").read_text().splitlines())
            if "VmHWM" not in fields:
                continue  # a zombie
            peaks[kind] = max(peaks.get(kind, 0.0), int(fields["VmHWM"].split()[0]) / 1024)
            times = member.cpu_times()
            cpu[member.pid] = times.user + times.system
            if member is main:
                own = int(fields["VmRSS"].split()[0]) / 1024
    except (psutil.Error, OSError):
        pass
    return own


def run(scratch: Path, prompts: int) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Rows of what, goal, here and the raw values."""
    path = data.write_prompts(scratch / f"prompts-{prompts}.jsonl", prompts)
    folder = scratch / "reference"
    config = measure.write_config(folder, path)
    out = folder / "export"
    with _servers() as address:
        half = follow(["run", str(config)], "first life", address, stop_after=prompts // 2)
        rest = follow(["run", str(config)], "second life", address)
        posts = int(stats(address)["posts"])
    export = follow(["export", str(folder / "runs" / "bench"), "specforge", str(out)], "export")
    checked, wrong = _check(folder / "runs" / "bench", out, prompts, config)
    lives = (half, rest)
    sealer = max(life.peaks.get("sealer", 0.0) for life in lives)
    serving = max(life.serving_mb for life in lives)
    slopes = ", ".join("too short to tell" if life.slope is None else f"{life.slope:+.1f}" for life in lives)
    wall = half.wall_s + rest.wall_s
    cost = (half.cpu_s + rest.cpu_s) / prompts * 1000
    raw: dict[str, Any] = {
        **checked,
        "posts": posts,
        "asked_twice": posts - prompts,
        "lives": [
            {**vars(life), "samples": life.samples[:: max(1, len(life.samples) // 200)], "slope": life.slope}
            for life in (half, rest, export)
        ],
    }
    name = f"reference run, {prompts:,} prompts, 7 × 64, kill -9 at half"
    parts = " + ".join(f"{checked[name]:,}" for name in ("accepted", "rejected", "failed", "pending"))
    counts = (
        f"{parts} of {prompts:,}; {checked['rows_in_parts']:,} rows in parts, {checked['exported']:,} exported; "
        f"{posts - prompts:,} asked once more after the kill"
    )
    memory = (
        f"{serving:.0f}, growing per 100,000 rows by {slopes}; with its report {rest.peaks['main']:.0f}; "
        f"sealer {sealer:.0f}, export {export.peaks['main']:.0f}"
    )
    took = (
        f"{wall / 60:.1f} min, {prompts / wall:,.0f} rows/s, {cost:.2f} CPU s per 1,000; "
        f"export {export.wall_s / 60:.1f} min"
    )
    return [
        (
            f"{name}: every count",
            "all right",
            f"WRONG {', '.join(wrong)}: {counts}" if wrong else f"all right: {counts}",
            raw,
        ),
        (f"{name}: memory MB, peak and slope", "≤ 200, flat", memory, {}),
        (f"{name}: time", "", took, {}),
    ]


def _check(folder: Path, out: Path, prompts: int, config: Path) -> tuple[dict[str, Any], list[str]]:
    """The counts of what is there, and what is wrong with them."""
    shown = subprocess.run(
        [sys.executable, "-m", "tokenmill", "status", str(config), "--json"], cwd=ROOT, capture_output=True, check=True
    )
    status = json.loads(shown.stdout)["prompts"]
    failed = sum(map(is_refused, range(prompts)))
    rejected = sum(is_empty(row) and not is_refused(row) for row in range(prompts))
    stored = _stored(folder / "data", prompts)
    exported = _exported(out)
    told = dict(zip(Counts._fields, json.loads((folder / "report.json").read_bytes())["counts"], strict=True))
    wanted = {
        "total": prompts,
        "accepted": prompts - rejected - failed,
        "rejected": rejected,
        "failed": failed,
        "pending": 0,
    }
    there = {name: int(status[name]) for name in wanted}
    wrong = [f"status {name} {there[name]:,}, not {count:,}" for name, count in wanted.items() if there[name] != count]
    if sum(there[name] for name in wanted if name != "total") != there["total"]:
        wrong.append("a sum that is not what was asked for")
    wrong += [f"report {name}" for name in ("accepted", "rejected", "failed") if told[name] != there[name]]
    wrong += [f"{name} {count:,}" for name, count in stored.items() if name != "rows in parts" and count]
    if stored["rows in parts"] != prompts:
        wrong.append(f"rows in parts {stored['rows in parts']:,}")
    rows, keys = exported
    if (rows, keys) != (there["accepted"], there["accepted"]):
        wrong.append(f"export rows {rows:,}, keys {keys:,}")
    return {**there, "rows_in_parts": stored["rows in parts"], "exported": rows}, wrong


def _stored(store: Path, prompts: int) -> Counter[str]:
    """Rows in sealed parts, and faults: journals left, keys that are missing or twice there, answers of other rows."""
    found = Counter({"rows in parts": 0, "journals left": len(list(store.glob("journal-*")))})
    times = np.zeros(prompts, np.uint8)
    for part in sorted(store.glob("part-*.parquet")):
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(batch_size=4096, columns=["key", "text"]):
                keys, texts = (batch.column(name).to_pylist() for name in ("key", "text"))
                found["rows in parts"] += len(keys)
                np.add.at(times, [int(key[3:]) for key in keys], 1)
                found["in the wrong row"] += sum(
                    bool(text) and key not in text for key, text in zip(keys, texts, strict=True)
                )
    found["lost"] = int((times == 0).sum())
    found["doubled"] = int((times > 1).sum())
    return found


def _exported(out: Path) -> tuple[int, int]:
    """Rows and different keys of an export."""
    rows, keys = 0, set()
    for path in out.rglob("*.jsonl"):
        with path.open("rb") as lines:
            for line in lines:
                rows += 1
                keys.add(int(msgspec.json.decode(line, type=_Exported).id[3:]))
    return rows, len(keys)


class _Exported(msgspec.Struct):
    id: str


@contextmanager
def _servers() -> Iterator[str]:
    with measure.fake_server(module="bench.referenceserver") as address:
        yield address

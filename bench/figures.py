"""The figures: each a function that measures in a scratch folder and returns rows of the table."""

import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import data, head
from bench.measure import ROOT, SERVERS, fake_server, run_config, stats, write_config
from tokenmill import dataset, settings
from tokenmill.configfile import load

BOTH = 448  # 7 servers × 64 in flight, as the reference run


@dataclass(frozen=True)
class Scale:
    """How large: the full figures, or a smoke test of the code that makes them."""

    rows: int = 10_000
    warm: int = 1_000
    waves: int = 5_000
    simulated_slots: tuple[int, int, int, int] = (20_000, 2_000, 24, 64)
    prompts: int = 902_087
    done: int = 450_000
    generated: int = 20_000
    kills: int = 5
    kill_rows: int = 5_000
    latency_ms: int = 2_000
    stage_mb: int = 128
    head_rows: int = 60_000
    nodes: int = 16
    head_s: float = 20.0
    end_rows: int = 4_000
    shown: int = 500_000
    lag_rows: int = 16_384
    lag_in_flight: int = 256
    segment: int = 128_000_000
    simulated: int = 902_087
    peer_rows: int = 1_500


SMOKE = Scale(
    rows=200,
    warm=100,
    waves=450,
    simulated_slots=(300, 100, 1, 4),
    prompts=4_000,
    done=2_000,
    generated=400,
    kills=1,
    kill_rows=600,
    latency_ms=200,
    stage_mb=4,
    head_rows=800,
    nodes=4,
    head_s=1.0,
    end_rows=300,
    shown=500,
    lag_rows=100,
    lag_in_flight=16,
    segment=4_000_000,
    simulated=500,
    peer_rows=0,
)


@dataclass(frozen=True)
class Row:
    what: str
    goal: str
    here: str
    floor: str = ""
    peers: str = ""
    raw: dict[str, Any] = field(default_factory=dict)


def client_cost(scratch: Path, scale: Scale) -> list[Row]:
    """Processor seconds per 1,000 completions."""
    from bench.cost import measure_all

    return [Row(*words) for words in measure_all(scratch, scale.warm, scale.rows)]


def slots_busy(scratch: Path, scale: Scale) -> list[Row]:
    """Requests in flight ÷ slots, from the first answer on, for fixed and heavy-tailed latencies; who gets which prompt
    when, on a clock that jumps."""
    from bench.slots import measure_all

    rows = []
    latency = str(scale.latency_ms)
    forms: list[tuple[str, str, tuple[str, ...]]] = [
        ("slots busy: fixed 2 s, 448 in flight, answers ÷ ideal", "≥ 0.98", ("--latency-ms", latency)),
        ("slots busy: lognormal 2 s, σ = 1", "≥ 0.99", ("--latency-ms", latency, "--sigma", "1")),
        (
            "slots busy: the same, one server 3 × slower",
            "≥ 0.98",
            ("--latency-ms", latency, "--sigma", "1", "--slow", "3"),
        ),
        (
            "slots busy: one server dies and comes back; it is asked again after",
            "≥ 0.99",
            ("--latency-ms", latency, "--sigma", "1", "--dies-s", str(6 * scale.latency_ms / 1000), "--away-s", "3"),
        ),
    ]
    prompts = data.write_prompts(scratch / "prompts-waves.jsonl", scale.waves * 2)
    for number, (name, goal, flags) in enumerate(forms):
        with fake_server("--answer-bytes", "300", *flags) as address:
            config = write_config(scratch / f"slots-{number}", prompts)
            process = subprocess.Popen(
                [sys.executable, "-m", "tokenmill", "run", str(config)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            first = _when(address, BOTH, process)  # the first wave is through
            last = _when(address, int(first["done"]) + scale.waves, process)
            process.kill()
            process.wait()
        back = f"; {last['asked'] - last['listened']:.1f} s" if last["asked"] else ""
        away = last["asked"] - last["died"] if last["asked"] else 0.0
        there = BOTH * (last["last"] - first["last"]) - BOTH / SERVERS * away
        rows.append(Row(name, goal, f"{(last['area'] - first['area']) / there:.3f}{back}"))
    return [*rows, *(Row(*words) for words in measure_all(*scale.simulated_slots))]


def _when(address: str, done: int, client: "subprocess.Popen[bytes]") -> dict[str, float]:
    while (found := stats(address))["done"] < done:
        if client.poll() is not None:
            raise SystemExit(f"the client ended with exit code {client.returncode}")
        time.sleep(0.05)
    return found


def memory(scratch: Path, scale: Scale) -> list[Row]:
    """Peak memory with the whole prompt set, some of it generated."""
    prompts = data.write_prompts(scratch / f"prompts-{scale.prompts}.jsonl", scale.prompts)
    with fake_server("--answer-bytes", "30000") as address:
        config = write_config(scratch / "memory", prompts)
        cost = run_config(config, address, stop_after=scale.generated)
    what = f"peak memory MB, {scale.prompts:,} prompts, 30 KB answers: run; with its sealer"
    return [Row(what, "≤ 200", f"{cost.main_mb:.0f}; {cost.peak_mb:.0f}")]


def resume(scratch: Path, scale: Scale) -> list[Row]:
    """Processor time to the first new request with half of the set done, sealed."""
    prompts = data.write_prompts(scratch / f"prompts-{scale.prompts}.jsonl", scale.prompts)
    folder = scratch / "resume"
    config = write_config(folder, prompts)
    row = settings.of(load(config), None, "")
    store = folder / "runs" / "bench" / "data"
    if not store.exists():
        data.write_records(store, range(scale.done), row.id)
        settings.keep(store, row)
    with fake_server() as address:
        cost = run_config(config, address, stop_after=1)
    what = f"CPU s to the first new request, {scale.done:,} of {scale.prompts:,} done (7 × 64 canaries included)"
    return [Row(what, "≤ 6", f"{cost.cpu_s:.1f}")]


def kept(scratch: Path, scale: Scale) -> list[Row]:
    """kill -9 in the middle: answers that were served and are not in the store; then resumed: lost, doubled, wrong."""
    lost: list[int] = []
    faults: Counter[str] = Counter()
    latency = str(scale.latency_ms)
    prompts = data.write_prompts(scratch / f"prompts-{scale.kill_rows}.jsonl", scale.kill_rows)
    for kill in range(scale.kills):
        folder = scratch / f"kept-{kill}"
        config = write_config(folder, prompts)
        with fake_server("--answer-bytes", "30000", "--latency-ms", latency, "--sigma", "1") as address:
            after = random.Random(kill).randrange(scale.kill_rows // 4, scale.kill_rows // 2)
            cost = run_config(config, address, stop_after=after)
            stored = len(list(dataset.briefs(folder / "runs" / "bench" / "data")))
            lost.append(int(cost.stats["done"]) - stored)
            run_config(config, address)
        records = list(dataset.records(folder / "runs" / "bench" / "data"))
        names = Counter(record.key for record in records)
        faults["lost"] += scale.kill_rows - len(names)
        faults["doubled"] += sum(names.values()) - len(names)
        faults["wrong row"] += sum(record.key not in record.text for record in records)
    what = f"answers served but not kept at kill -9, {BOTH} in flight: worst of {scale.kills}"
    words = ", ".join(f"{name} {count}" for name, count in sorted(faults.items()))
    return [Row(what, "≤ 16", str(max(lost))), Row("rows after kill and resume", "0, 0, 0", words)]


def staging(scratch: Path, scale: Scale) -> list[Row]:
    """Staging against cp on a mount with 4 ms a read, and against the best of cp and dd on a RAM disk and a disk."""
    from bench.staging import measure_all

    return [Row(*words) for words in measure_all(scratch, scale.stage_mb)]


def one_head(scratch: Path, scale: Scale) -> list[Row]:
    """Nodes of a cluster, simulated: what their head takes, and how long they wait for one another at the end."""
    took = head.head(scratch, rows=scale.head_rows, nodes=scale.nodes, seconds=scale.head_s)
    return [Row(*took), Row(*head.end_of_set(scratch, rows=scale.end_rows))]


def page(scratch: Path, scale: Scale) -> list[Row]:
    """The page of a large run."""
    from bench.page import measure_all

    return [Row(*words) for words in measure_all(scratch, scale.shown)]


def loop_lag(scratch: Path, scale: Scale) -> list[Row]:
    """How long a run's event loop is held up."""
    from bench import lag

    latency_ms = 4 * scale.latency_ms
    many = data.write_prompts(scratch / f"prompts-{scale.lag_rows}.jsonl", scale.lag_rows)
    few = data.write_prompts(scratch / f"prompts-{2 * scale.segment // 30_000}.jsonl", 2 * scale.segment // 30_000)
    return [
        Row(*lag.many(scratch, many, in_flight=scale.lag_in_flight, latency_ms=latency_ms)),
        Row(*lag.sealing(scratch, few, in_flight=64, latency_ms=scale.latency_ms, segment=scale.segment)),
    ]


def reference(scratch: Path, scale: Scale) -> list[Row]:
    """The whole reference run, simulated."""
    from bench.reference import run

    return [Row(what, goal, here, raw=raw) for what, goal, here, raw in run(scratch, scale.simulated)]


def peers(scratch: Path, scale: Scale) -> list[Row]:
    """Other clients and tokenmill in one harness."""
    from bench.peers.run import Sizes, side_by_side

    sizes = Sizes(scale.peer_rows // 5, scale.peer_rows, scale.peer_rows)
    return [Row(*words) for words in side_by_side(scratch, sizes)]


def concurrency(scratch: Path, scale: Scale) -> list[Row]:
    """What concurrency = "auto" finds, beside fixed numbers."""
    from bench.pace import measure_all

    return [Row(*words) for words in measure_all(scratch)]


def concurrency_on_llamacpp(scratch: Path, scale: Scale) -> list[Row]:
    """The same on a real server."""
    from bench.pace import on_llamacpp

    return [Row(*on_llamacpp(scratch))]


def efficiency(scratch: Path, scale: Scale) -> list[Row]:
    """What the efficiency meter says, and how near a run comes to a bare closed loop."""
    from bench.efficiency import measure_all

    return [Row(*words) for words in measure_all(scratch)]


FIGURES: dict[str, Callable[[Path, Scale], list[Row]]] = {
    "peers": peers,  # first: what they took stands beside the others' rows
    "cost": client_cost,
    "lag": loop_lag,
    "slots": slots_busy,
    "pace": concurrency,
    "pace-llamacpp": concurrency_on_llamacpp,
    "efficiency": efficiency,
    "memory": memory,
    "resume": resume,
    "kept": kept,
    "stage": staging,
    "head": one_head,
    "page": page,
    "reference": reference,
}

NOT_IN_SMALL = ("pace", "pace-llamacpp", "efficiency")
"""What they measure shows only after minutes."""


def clear(scratch: Path) -> None:
    """Removes what a figure left, but for prompt files."""
    for folder in scratch.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)

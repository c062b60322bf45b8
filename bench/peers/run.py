"""Drives each peer, and tokenmill, against bench/fakeserver.py, one after the other: the same rows, the same server.

A peer's environment is made by setup.sh and stays out of the repository; where there is none, the recorded figures are
shown with their date.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench import data
from bench.measure import POLL_S, PORTS, ROOT, fake_server, stats, write_config
from bench.peers.shown import ENV, HERE, OWN, RESULTS, shown
from tokenmill import dataset

SLOTS = 448

START_S, LIMIT_S = 120.0, 150.0
"""Until a client's first request, and for a run of it: the slowest peer takes 20 s and 60 s by itself."""

SETTLE_S, WINDOW_S = 4.0, 12.0
"""Slots are looked at two mean latencies after the first wave, for six."""

LATENCY = ("--latency-ms", "2000", "--sigma", "1")
"""Every client that keeps up with this has few answers in its sockets when it is killed."""


@dataclass(frozen=True)
class Sizes:
    """`warm` and `rows` of the two runs that cost is the difference of; `kill_rows` of the run that is killed."""

    warm: int = 300
    rows: int = 1500
    kill_rows: int = 2000


@dataclass
class Figures:
    """What one client took. Nothing where it did not come to it; `notes` say why."""

    cpu_300: float | None = None
    cpu_30k: float | None = None
    busy: float | None = None
    peak_mb: float | None = None
    not_kept: int | None = None
    lost: int | None = None
    doubled: int | None = None
    notes: str = ""


@dataclass(frozen=True)
class Client:
    """How it is called on a prompt file and a folder; what lies in the folder, as ids and texts."""

    name: str
    command: Callable[[Path, Path], list[str]]
    kept: Callable[[Path], Iterator[tuple[str, str]]]


def clients() -> list[Client]:
    """tokenmill, and the peers that have an environment here."""
    scripts = {"openai": "openai_pool", "datatrove": "datatrove_endpoint", "ray": "ray_http"}
    there = [name for name in scripts if (ENV / name / ".ready").exists()]
    return [Client(OWN, _own, _own_kept), *(Client(name, _peer(name, scripts[name]), _lines) for name in there)]


def _own(prompts: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "tokenmill", "run", str(write_config(out, prompts))]


def _own_kept(out: Path) -> Iterator[tuple[str, str]]:
    return ((record.key, record.text) for record in dataset.records(out / "runs" / "bench" / "data"))


def _peer(name: str, script: str) -> Callable[[Path, Path], list[str]]:
    low, _, high = PORTS.partition("-")
    numbers = [low, str(int(high) - int(low) + 1), str(SLOTS)]

    def command(prompts: Path, out: Path) -> list[str]:
        return [str(ENV / name / "bin" / "python"), str(HERE / f"{script}.py"), str(prompts), str(out), *numbers]

    return command


def _lines(out: Path) -> Iterator[tuple[str, str]]:
    """Rows of JSON lines, torn ones left out; datatrove puts its answers into `metadata`."""
    for path in sorted([*out.glob("answers.jsonl"), *out.glob("done/**/*.json*")]):
        for line in path.read_bytes().splitlines():
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            answers = row.get("metadata", {}).get("rollout_results") or [row]
            yield row["id"], answers[0]["text"]


class Running:
    """A client that runs, with all processes that it starts: they end with it."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("ab") as file:
            self.main = psutil.Popen(command, cwd=ROOT, stdin=-3, stdout=file, stderr=file)
        self._known: dict[int, psutil.Process] = {self.main.pid: self.main}
        self._cpu: dict[int, float] = {}
        self.peak_mb = 0.0
        self._began = time.monotonic()
        self._before = os.times()
        self._waited_s = 0.0

    def look(self) -> bool:
        """Reads processor time and memory; whether it still runs."""
        total = 0.0
        alive = self.main.poll() is None
        if not alive:
            now, before = os.times(), self._before
            self._waited_s = now.children_user + now.children_system - before.children_user - before.children_system
        for member in list(self._known.values()):
            try:
                for child in member.children():
                    self._known.setdefault(child.pid, child)
            except psutil.Error:
                pass
        for pid, member in self._known.items():
            try:
                times = member.cpu_times()
                self._cpu[pid] = times.user + times.system
                total += member.memory_info().rss / 1e6
            except psutil.Error:
                pass
        self.peak_mb = max(self.peak_mb, total)
        return alive

    def wait(self, seconds: float = LIMIT_S) -> bool:
        """To its end, at most so long; whether it ended well."""
        while self.look():
            if time.monotonic() - self._began > seconds:
                return False
            time.sleep(POLL_S)
        return bool(self.main.returncode == 0)

    def wait_for(self, address: str, name: str, least: int, seconds: float = START_S) -> bool:
        """Until a counter of the server is so high; whether it came to that."""
        until = time.monotonic() + seconds
        while self.look() and time.monotonic() < until:
            if int(stats(address)[name]) >= least:
                return True
            time.sleep(POLL_S)
        return int(stats(address)[name]) >= least

    @property
    def cpu_s(self) -> float:
        """Exact of what was waited for; of daemons as last seen."""
        return max(sum(self._cpu.values()), self._waited_s)

    def kill(self) -> None:
        """All of its processes, at once."""
        self.look()
        for member in self._known.values():
            try:
                member.kill()
            except psutil.Error:
                pass
        self.main.wait()


@contextmanager
def started(client: Client, prompts: Path, out: Path) -> Iterator[Running]:
    out.mkdir(parents=True, exist_ok=True)
    running = Running(client.command(prompts, out), out.parent / f"{client.name}.log")
    try:
        yield running
    finally:
        running.kill()


def measured(client: Client, scratch: Path, sizes: Sizes) -> Figures:
    """All figures of one client."""
    found = Figures()
    for size in (300, 30_000):
        took: list[float] = []
        with fake_server("--answer-bytes", str(size)) as address:
            for count in (sizes.warm, sizes.warm + sizes.rows):
                prompts = data.write_prompts(scratch / f"prompts-{count}.jsonl", count)
                with started(client, prompts, scratch / client.name / f"{size}-{count}") as running:
                    if not running.wait():
                        found.notes += (
                            f"{count} rows of {size} B: {int(stats(address)['done'])} after {LIMIT_S:.0f} s; "
                        )
                        break
                    took.append(running.cpu_s)
        if len(took) == 2:
            per_1k = (took[1] - took[0]) / sizes.rows * 1000
            found.cpu_300, found.cpu_30k = (per_1k, None) if size == 300 else (found.cpu_300, per_1k)
            found.peak_mb = running.peak_mb
    _slots(client, scratch, sizes, found)
    _killed(client, scratch, sizes, found)
    return found


def _slots(client: Client, scratch: Path, sizes: Sizes, found: Figures) -> None:
    prompts = data.write_prompts(scratch / "prompts-10000.jsonl", 10_000)
    with (
        fake_server(*LATENCY) as address,
        started(client, prompts, scratch / client.name / "slots") as running,
    ):
        if not running.wait_for(address, "done", SLOTS):
            found.notes += f"slots: {int(stats(address)['done'])} answers in {START_S:.0f} s; "
        time.sleep(SETTLE_S)
        first = stats(address)
        time.sleep(WINDOW_S)
        last = stats(address)
    found.busy = (last["area"] - first["area"]) / (last["last"] - first["last"]) / SLOTS


def _killed(client: Client, scratch: Path, sizes: Sizes, found: Figures) -> None:
    """kill -9 of all its processes at half, then once more to the end."""
    prompts = data.write_prompts(scratch / f"prompts-{sizes.kill_rows}.jsonl", sizes.kill_rows)
    out = scratch / client.name / "killed"
    with fake_server("--answer-bytes", "30000", *LATENCY) as address:
        with started(client, prompts, out) as running:
            reached = running.wait_for(address, "done", sizes.kill_rows // 2)
        served = int(stats(address)["done"])
        if not reached:
            found.notes += f"{served} served in {START_S:.0f} s when it was killed; "
        with started(client, prompts, out) as running:
            ended = running.wait()
        both = int(stats(address)["done"])
        if not ended:
            found.notes += f"resumed, {both - served} more after {LIMIT_S:.0f} s; "
            return
    keys: Counter[str] = Counter()
    wrong = 0
    for key, text in client.kept(out):
        keys[key] += 1
        wrong += key not in text
    found.not_kept = both - len(keys)  # served once more, whatever it had kept them in
    found.lost, found.doubled = sizes.kill_rows - len(keys), keys.total() - len(keys)
    if wrong:
        found.notes += f"{wrong} in the wrong row; "


def run(scratch: Path, sizes: Sizes, only: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Measures all clients that are here, and keeps what was found beside their environments."""
    found = json.loads(RESULTS.read_bytes())["clients"] if RESULTS.exists() else {}
    for client in clients():
        if only is None or client.name in only:
            sys.stderr.write(f"peers: {client.name}\n")
            found[client.name] = asdict(measured(client, scratch, sizes))
            kept = {"date": datetime.now(UTC).date().isoformat(), "clients": found}
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return found


MEASURES = {
    "cpu_300": "CPU s per 1,000 completions of 300 B",
    "cpu_30k": "CPU s per 1,000 completions of 30 KB",
    "busy": "slots busy, lognormal 2 s, σ = 1",
    "peak_mb": "peak memory MB, all processes, a few thousand rows of 30 KB",
    "not_kept": "answers served once more after kill -9",
    "lost": "rows lost after kill and resume",
    "doubled": "rows doubled after kill and resume",
}


def side_by_side(scratch: Path, sizes: Sizes) -> list[tuple[str, str, str, str, str, dict[str, Any]]]:
    """Rows of what, goal, tokenmill's, floor, the peers', raw values. Where none is measured, the recorded ones."""
    here = sizes.rows > 0 and len(clients()) > 1
    found = run(scratch, sizes) if here else {}
    own = found.get(OWN, {})
    rows: list[tuple[str, str, str, str, str, dict[str, Any]]] = []
    for key, what in MEASURES.items():
        value = own.get(key)
        words = "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
        rows.append((f"side by side: {what}", "", words or "bench/peers/setup.sh first", "", shown(key), {}))
    return [(*row[:5], found) if number == 0 else row for number, row in enumerate(rows)]

"""Concurrency "auto" against fixed numbers: on a scripted server whose rate saturates, in one run.

The server makes n / (n + 16) of its peak of n requests, runs 64 and lets the others wait. It tells nothing of itself:
behind an address there is only what its streams show, or, where it has a metrics page, what that says. Then on a real
llama.cpp server: "auto" with as many slots as the largest fixed number, which sets them itself.
"""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import data, timed
from bench.measure import PORTS, ROOT, write_config
from tokenmill.core.capacity import USUAL_PROMPT

LIMIT, HALF = 64, 16
PORT = PORTS.partition("-")[0]

Words = tuple[str, str, str]

FIXED_S = (4.0, 10.0)
"""Left out, and measured, of a fixed number: three and seven answers of each slot."""

FOUND_AFTER_S = 180.0
"""Given to "auto", before it is measured as long: by metrics, where rates are known by answers alone, a step takes ten
to forty seconds, and from 32 to 64 are eight."""

LLAMA_FIXED = (2, 4, 8, 16, 32)

LLAMA_S, LLAMA_TOKENS, LLAMA_ROUNDS = 40.0, 16, 2
"""Of generating, in each run: eight answers of each of 32 slots. In turns: a shared machine is not as fast in every
minute."""


@contextmanager
def _server(*flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tokenmill.testing.server", "--port", PORT, "--slots", str(LIMIT)]
    script = ["--half", str(HALF), "--latency-ms", "1500", "--sigma", "0.3", "--quick-canary", *flags]
    process = subprocess.Popen([*command, *script], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{PORT}"
    finally:
        process.terminate()
        process.wait()


def _seen(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/server_info", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)["seen"]
    return found


def _until_works(address: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if _seen(address)["running"]:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"nothing runs on {address} after 60 s")


def _rate(
    folder: Path, prompts: Path, in_flight: int | str, seconds: tuple[float, float], *flags: str
) -> tuple[float, float]:
    """Tokens a second over the second stretch, the first left out; the most that was with the server, on average."""
    with _server(*flags) as address:
        engine = {"kind": "openai", "addresses": [address]}
        config = write_config(folder, prompts, engine=engine, generation={"concurrency": in_flight})
        command = [sys.executable, "-m", "tokenmill", "run", str(config)]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        client = subprocess.Popen(command, cwd=ROOT, **quiet)  # type: ignore[call-overload]
        try:
            _until_works(address)
            time.sleep(seconds[0])
            began, first = time.monotonic(), _seen(address)["tokens"]
            held = []
            while time.monotonic() - began < seconds[1]:
                time.sleep(0.5)
                now = _seen(address)
                held.append(now["running"] + now["queued"])
            made = (_seen(address)["tokens"] - first) / (time.monotonic() - began)
        finally:
            client.kill()
            client.wait()
    return made, max(held)


def measure_all(scratch: Path) -> Iterator[Words]:
    """Fixed numbers, then auto, then the middle one again, each on a fresh server."""
    prompts = data.write_prompts(scratch / "prompts-pace.jsonl", 20_000)
    for name, flags in (("its streams", ("--no-metrics",)), ("its metrics", ())):

        def rate(in_flight: int | str, first_s: float, flags: tuple[str, ...] = flags) -> tuple[float, float]:
            folder = scratch / f"pace-{in_flight}-{time.monotonic():.0f}"
            return _rate(folder, prompts, in_flight, (first_s, FIXED_S[1]), *flags)

        fixed = {number: rate(number, FIXED_S[0])[0] for number in (LIMIT // 2, LIMIT, 2 * LIMIT)}
        auto, most = rate("auto", FOUND_AFTER_S)
        fixed[LIMIT] = (fixed[LIMIT] + rate(LIMIT, FIXED_S[0])[0]) / 2
        best = max(fixed, key=lambda number: fixed[number])
        told = ", ".join(f"{number}: {made / fixed[best]:.2f}" for number, made in fixed.items())
        here = f"{auto / fixed[best]:.3f}, at most {most:.0f} of {LIMIT} (fixed {told})"
        yield f"concurrency auto ÷ best fixed, by {name}, after {FOUND_AFTER_S:.0f} s", "≥ 0.97", here


def on_llamacpp(scratch: Path) -> Words:
    """Fixed numbers and auto on a real server."""
    prompts = timed.write_prompts(scratch)
    made: dict[int | str, list[float]] = {}
    for turn in range(LLAMA_ROUNDS):
        for in_flight in ("auto", *LLAMA_FIXED):
            most = max(LLAMA_FIXED)
            args = {"ctx-size": most * (LLAMA_TOKENS + USUAL_PROMPT), "threads": 2}
            args |= {"parallel": most} if in_flight == "auto" else {}
            over = timed.llamacpp(args, LLAMA_TOKENS, {})
            folder = scratch / f"pace-llamacpp-{in_flight}-{turn}"
            path = timed.config(folder, prompts, in_flight, fleet={"servers": 1}, **over)
            timed.generate(path, LLAMA_S)
            rate = timed.rate(timed.answers(timed.folder_of(path), 0.0), LLAMA_S / 4)
            made.setdefault(in_flight, []).append(rate)
    mean = {in_flight: fmean(rates) for in_flight, rates in made.items()}
    auto = mean.pop("auto")
    best = max(mean.values())
    told = ", ".join(f"{number}: {rate / best:.2f}" for number, rate in mean.items())
    here = f"{auto / best:.3f} (fixed {told}; {', '.join(f'{rate:.0f}' for rate in made['auto'])} tok/s)"
    return "concurrency auto ÷ best fixed, llama.cpp on two cores", "≥ 0.97", here

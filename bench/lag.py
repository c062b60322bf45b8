"""The event loop's lag in a real run: python -m bench.lag OUT ASIDE COMMAND … runs tokenmill, and listens in its loop.

OUT gets a JSON list of looks: [moment of the monotonic clock, lag in seconds, whether the file ASIDE was there]. The
floor is a thread that only sleeps, meanwhile: what a busy machine costs anybody.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from bench.measure import ROOT, fake_server, stats, write_config

LOOK_S = 0.01
LIMIT_S = 300.0

PORTS_16, PORTS_8 = "31800-31815", "31820-31827"
"""No other figure's."""

Look = tuple[float, float, bool]
Words = tuple[str, str, str, str]


async def _listen(looks: list[Look], aside: Path) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        looks.append((now, now - began - LOOK_S, aside.exists()))


async def _listened(work: Coroutine[Any, Any, Any], out: Path, aside: Path) -> Any:
    looks: list[Look] = []
    listening = asyncio.create_task(_listen(looks, aside))
    try:
        return await work
    finally:
        listening.cancel()
        out.write_text(json.dumps(looks))


def main() -> None:
    from tokenmill import cli

    out, aside = Path(sys.argv[1]), Path(sys.argv[2])
    plain = uvloop.run
    uvloop.run = lambda work: plain(_listened(work, out, aside))  # type: ignore[assignment, misc]
    sys.argv = ["tokenmill", *sys.argv[3:]]
    cli.main()


class _Sleeper(threading.Thread):
    """Looks of its own, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="sleeper")
        self.looks: list[Look] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(LOOK_S):
            now = time.monotonic()
            self.looks.append((now, now - began - LOOK_S, True))
            began = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _run(
    scratch: Path, prompts: Path, ports: str, in_flight: int, latency_ms: int, segment: int
) -> tuple[list[Look], list[Look]]:
    """Looks from the first answer to the last, and the sleeper's."""
    folder = scratch / f"lag-{in_flight}"
    config = write_config(
        folder, prompts, in_flight=in_flight, ports=ports, output={"dir": str(folder / "runs"), "segment": segment}
    )
    out, aside = folder / "looks.json", folder / "runs" / "bench" / "data" / ".part-000001.parquet"
    with fake_server(
        "--answer-bytes", "30000", "--latency-ms", str(latency_ms), "--sigma", "1", ports=ports
    ) as address:
        command = [sys.executable, "-m", "bench.lag", str(out), str(aside), "run", str(config)]
        sleeper = _Sleeper()
        sleeper.start()
        try:
            subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=LIMIT_S)
        finally:
            sleeper.stop()
        found = stats(address)
    first = found["first_post"] + latency_ms / 1000
    looks: list[Look] = json.loads(out.read_text())
    own, others = ([look for look in some if first <= look[0] <= found["last_done"]] for some in (looks, sleeper.looks))
    return own, others


def _p99_ms(looks: list[Look]) -> str:
    if not looks:
        return "no look"
    lags = sorted(lag for _, lag, _ in looks)
    return f"{1000 * lags[len(lags) * 99 // 100]:.0f} ms (longest {1000 * lags[-1]:.0f}, {len(lags):,} looks)"


def many(scratch: Path, prompts: Path, *, in_flight: int, latency_ms: int) -> Words:
    """16 servers in one process, 30 KB answers."""
    looks, sleeper = _run(scratch, prompts, PORTS_16, in_flight, latency_ms, 1 << 40)
    what = f"event-loop lag p99, 16 servers × {in_flight} in flight, 30 KB"
    return what, "< 200 ms", _p99_ms(looks), _p99_ms(sleeper)


def sealing(scratch: Path, prompts: Path, *, in_flight: int, latency_ms: int, segment: int) -> Words:
    """8 servers, while a full journal becomes Parquet."""
    looks, sleeper = _run(scratch, prompts, PORTS_8, in_flight, latency_ms, segment)
    meanwhile = [look for look in looks if look[2]]
    what = f"event-loop lag p99, 8 servers × {in_flight} in flight, while {segment // 1_000_000} MB are sealed"
    return what, "< 50 ms", _p99_ms(meanwhile), _p99_ms(sleeper)


if __name__ == "__main__":
    main()

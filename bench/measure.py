"""Runs one client against a fresh fake server and reads what it cost: processor time, memory, requests in flight."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

ROOT = Path(__file__).parent.parent
POLL_S = 0.05
FIRST_PORT, SERVERS = 31_000, 7


def _free_ports() -> str:
    """As many neighbours as the reference run has servers, that nobody has: another bench may run."""
    for first in range(FIRST_PORT, 32_700, 10):
        try:
            for port in range(first, first + SERVERS):
                with socket.socket() as one:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return f"{first}-{first + SERVERS - 1}"
    raise SystemExit("no seven free ports from 31000 to 32700")


PORTS = _free_ports()


@dataclass(frozen=True)
class Cost:
    """Of a client and all its processes: seconds of processor time and wall, megabytes of memory at the peak.

    `main_s` and `main_mb` are of its first process alone, as of at most POLL_S before its end.
    """

    cpu_s: float
    main_s: float
    wall_s: float
    peak_mb: float
    main_mb: float
    stats: dict[str, Any]
    code: int | None


TAKEN: list[Cost] = []
"""All that this process has measured, in its order, for --json."""


@contextmanager
def fake_server(*flags: str, ports: str = PORTS, module: str = "bench.fakeserver") -> Iterator[str]:
    """The fake server for the scope; yields the address of its first port."""
    command = [sys.executable, "-m", module, "--ports", ports, *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if not process.stdout.readline():
        raise SystemExit(f"the fake server ended with exit code {process.wait()}: is one of the ports {ports} taken?")
    try:
        yield f"http://127.0.0.1:{ports.partition('-')[0]}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def stats(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/stats", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def addresses(ports: str = PORTS) -> list[str]:
    low, _, high = ports.partition("-")
    return [f"http://127.0.0.1:{port}" for port in range(int(low), int(high or low) + 1)]


def write_config(folder: Path, prompts: Path, *, in_flight: int = 64, ports: str = PORTS, **over: Any) -> Path:
    """A tokenmill config on the fake server's ports."""
    data: dict[str, Any] = {
        "name": "bench",
        "model": {"name": "fake"},
        "engine": {"kind": "openai", "addresses": addresses(ports)},
        "prompts": {"path": str(prompts)},
        "generation": {"concurrency": in_flight},
        "output": {"dir": str(folder / "runs")},
    }
    for section, values in over.items():
        data.setdefault(section, {}).update(values)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.toml"
    path.write_text(tomli_w.dumps(data))
    return path


def run_config(config: Path, address: str, *, stop_after: int = 0, timeout_s: float = 600.0) -> Cost:
    """`tokenmill run` on a config; killed (-9) once the server has answered `stop_after` requests, canaries too."""
    cost = measure([sys.executable, "-m", "tokenmill", "run", str(config)], address, stop_after, timeout_s)
    wanted = -9 if stop_after else 0
    if cost.code != wanted:
        raise SystemExit(f"tokenmill run {config} ended with exit code {cost.code}, not {wanted}")
    return cost


def measure(command: Sequence[str], address: str, stop_after: int = 0, timeout_s: float = 600.0) -> Cost:
    before = os.times()
    began = time.monotonic()
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(list(command), cwd=ROOT, **quiet)  # type: ignore[call-overload]
    watched = psutil.Process(process.pid)
    peak = main_mb = seen_cpu = main_s = 0.0
    while process.poll() is None:
        total, own, cpu, own_cpu = _reading(watched)
        peak, main_mb = max(peak, total), max(main_mb, own)
        seen_cpu, main_s = max(seen_cpu, cpu), max(main_s, own_cpu)
        if (stop_after and stats(address)["done"] >= stop_after) or time.monotonic() - began > timeout_s:
            process.kill()
            process.wait()
            break
        time.sleep(POLL_S)
    wall = time.monotonic() - began
    # Once waited for, a child and all that it had waited for are in our own times, exactly.
    after = os.times()
    waited = after.children_user + after.children_system - before.children_user - before.children_system
    cpu = seen_cpu if process.returncode == -9 else waited
    TAKEN.append(Cost(cpu, main_s, wall, peak, main_mb, stats(address), process.returncode))
    return TAKEN[-1]


def _reading(process: psutil.Process) -> tuple[float, float, float, float]:
    """Resident megabytes of a process and its children, of itself; processor seconds of all, of itself."""
    total = own = cpu = own_cpu = 0.0
    try:
        for member in [process, *process.children(recursive=True)]:
            with member.oneshot():
                size, times = member.memory_info().rss / 1e6, member.cpu_times()
            total += size
            cpu += times.user + times.system
            if member is process:
                own, own_cpu = size, times.user + times.system
    except psutil.Error:
        pass
    return total, own, cpu, own_cpu

"""The efficiency meter on two real llama.cpp servers: python -m bench.efficiency [CASE …] [--seconds N] [--fake].

`peak`: what the meter takes for the servers' peak beside a bare closed loop on the same servers, in alternating rounds.
`full`, `stopped`, `killed`, `starved`, `slow`: a run that is left alone, one whose server is stopped (SIGSTOP) for a
while or killed, one without prompts for 15 of 40 s, and one whose client sleeps over each answer: what the meter says.
`--fake`: on two scripted servers of 32 slots, which sleep instead of computing, so that no neighbour slows them down.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.measure import ROOT, write_config
from tokenmill.core.efficiency import words
from tokenmill.core.status import RunStatus
from tokenmill.folder import RunFolder
from tokenmill.quickstart import find_model

SLOTS, TOKENS, STRETCH = 4, 48, "20s"
RUN = "from tokenmill import cli; cli.main()"
SLOW = (
    "import time; from tokenmill.core import judge; real = judge.measure; "
    "judge.measure = lambda *a: (time.sleep({sleep}), real(*a))[1]; " + RUN
)
STARVED = (
    "import time; from tokenmill.generate import Pump; real = Pump.credits; "
    "Pump.credits = lambda self: 0 if time.monotonic() % 40 < 15 else real(self); " + RUN
)


FAKE_ARGS = {"slots": 32, "latency-ms": 2000, "sigma": 0.2, "quick-canary": True}
"""Its answers have all the same tokens, so a spread in time is one in speed, which slots of one batch hardly have."""


def config(folder: Path, port: int, *, fake: bool = False, **over: Any) -> Path:
    folder.mkdir(parents=True)
    prompts = folder / "prompts.jsonl"
    rows = ({"id": f"p{n}", "prompt": f"Write {n} words about the number {n}."} for n in range(100_000))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"parallel": SLOTS, "ctx-size": 512 * SLOTS, "threads": 1, "threads-batch": 1, "threads-http": 2}
    if fake:
        fleet = {"gpus": "none", "servers": 2, "port": port, "stagger": "off", "stall_timeout": "20s"}
        engine = {"kind": "fake", "args": FAKE_ARGS, "addresses": []}
        return write_config(
            folder, prompts, in_flight=32, engine=engine, fleet=fleet, generation={"calibrate": STRETCH}
        )
    return write_config(
        folder,
        prompts,
        in_flight=SLOTS,
        model={"name": "smollm2", "path": str(find_model(print))},
        engine={"kind": "llamacpp", "args": args, "addresses": []},
        fleet={"gpus": "none", "servers": 2, "port": port, "stagger": "off", "stall_timeout": "20s", **over},
        generation={"thinking": False, "max_tokens": TOKENS, "calibrate": STRETCH, "extra": {"ignore_eos": True}},
        gate={"max_rejected": 1.0, "max_truncated": 1.0, "max_failed": 1.0},
    )


def status(path: Path) -> RunStatus | None:
    return RunFolder(path.parent / "runs" / "bench").status()


def generate(path: Path, seconds: float, code: str = RUN, during: Any = None) -> RunStatus:
    """A run that is stopped after so many seconds of generating; `during` is called each second with its status."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
    )
    began = time.time()
    while process.poll() is None:
        time.sleep(1.0)
        last = status(path)
        if last is None or last.updated < began or last.state != "generating":
            continue
        if during is not None:
            during(last)
        if last.seconds >= seconds:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    last = status(path)
    assert last is not None, "no status"
    return last


def harm(number: signal.Signals, at_s: float, until_s: float = 0.0) -> Any:
    """SIGKILL or SIGSTOP for server 0 after so many seconds, SIGCONT later."""
    left = [(at_s, number), *([(until_s, signal.SIGCONT)] if until_s else [])]

    def during(last: RunStatus) -> None:
        if left and last.seconds >= left[0][0] and (pid := last.servers[0].pid):
            os.kill(pid, left.pop(0)[1])

    return during


async def bare(ports: list[int], prompts: list[list[int]], seconds: float) -> float:
    """Tokens a second of a loop that does nothing else, between its first quarter and its end."""
    came: list[tuple[float, float, int]] = []
    begin = time.monotonic()
    bodies = iter(prompts * 1000)

    async def slot(session: aiohttp.ClientSession, url: str) -> None:
        while (asked := time.monotonic()) < begin + seconds:
            body = {"prompt": next(bodies), "n_predict": TOKENS, "ignore_eos": True, "return_tokens": True}
            async with session.post(url, json=body) as reply:
                tokens = json.loads(await reply.read())["tokens_predicted"]
            came.append((asked, time.monotonic(), tokens))

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for port in ports:
            for _ in range(SLOTS):
                tasks.create_task(slot(session, f"http://127.0.0.1:{port}/completion"))
    first, last = begin + seconds / 4, begin + seconds
    # An answer's tokens came evenly while it was waited for.
    spread = [tokens * max(min(b, last) - max(a, first), 0.0) / (b - a) for a, b, tokens in came]
    return sum(spread) / (last - first)


def peak(folder: Path, seconds: float, rounds: int = 3) -> None:
    path = config(folder, 31400, keep_servers="always")
    run = RunFolder(folder / "runs" / "bench")
    told, loops = [], []
    try:
        for number in range(rounds):
            for server in run.state().servers if run.exists else ():
                assert server.peak is None or number
            last = generate(path, seconds)
            found = last.efficiency
            assert found is not None, last
            assert found.share is not None, words(found)
            entries = run.state().servers
            prompts = [json.loads(line)["prompt_ids"] for line in _journal(run)][-200:]
            rate = asyncio.run(bare([entry.port for entry in entries], prompts, seconds))
            told.append(found.peak_tokens_per_s)
            loops.append(rate)
            print(f"round {number + 1}: {words(found)}", flush=True)
            print(f"  peak {found.peak_tokens_per_s} ± {found.error:.1%}, bare loop {rate:.1f}", flush=True)
        print(f"  the meter's peak ÷ the best bare loop: {max(told) / max(loops):.3f}")
    finally:
        subprocess.run(
            [sys.executable, "-m", "tokenmill", "down", str(run.path)], cwd=ROOT, check=False, capture_output=True
        )


def _journal(run: RunFolder) -> list[str]:
    return [
        text[text.index("{") : text.rindex("}") + 1]
        for file in sorted(run.data.glob("journal-*.jsonl"))
        for text in file.read_text().splitlines()
        if '"prompt_ids"' in text
    ]


def _leave(number: int, frame: object) -> None:
    """SIGTERM, which a time limit sends, must end the servers that are kept between rounds, too."""
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, _leave)
    parser = argparse.ArgumentParser(prog="python -m bench.efficiency")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--fake", action="store_true")
    args = parser.parse_args()
    slow = SLOW.replace("{sleep}", "0.015" if args.fake else "0.3")
    cases: dict[str, tuple[str, Any]] = {
        "full": (RUN, None),
        "stopped": (RUN, harm(signal.SIGSTOP, args.seconds / 2, args.seconds / 2 + 12)),
        "killed": (RUN, harm(signal.SIGKILL, args.seconds / 2)),
        "starved": (STARVED, None),
        "slow": (slow, None),
    }
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(args.cases or [*([] if args.fake else ["peak"]), *cases]):
            print(f"{name}: load {os.getloadavg()[0]:.1f}", flush=True)
            folder = Path(scratch) / name
            if name == "peak":
                peak(folder, args.seconds)
                continue
            code, during = cases[name]
            last = generate(config(folder, 31410 + 10 * number, fake=args.fake), args.seconds, code, during)
            assert last.efficiency is not None
            print(f"  {words(last.efficiency)}; {last.tokens / last.seconds:.1f} tok/s of", flush=True)
            found = last.efficiency
            print(f"  {found.peak_tokens_per_s} ± {found.error:.1%}; slots {last.slots_busy} busy", flush=True)


if __name__ == "__main__":
    main()

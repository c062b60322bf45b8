"""The efficiency meter: what it says of runs to which something is done, and its peak beside a bare closed loop.

Two scripted servers, which sleep instead of computing, so that no neighbour slows them down: a run that is left alone,
one whose server is stopped (SIGSTOP) for a while or killed, one without prompts for 15 of 40 s, and one whose client
sleeps over each answer. Then two real llama.cpp servers, in turns: the run, and a bare loop on the same servers and
prompts.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from bench import closed_loop
from bench.measure import ROOT, write_config
from tokenmill import dataset
from tokenmill.core.efficiency import words
from tokenmill.core.status import RunStatus
from tokenmill.core.trials import Answer, windows
from tokenmill.folder import RunFolder
from tokenmill.quickstart import find_model

Words = tuple[str, str, str, str]

SECONDS = 40.0
"""Of generating, in each run and each loop: two stretches, and as much after something was done."""

STRETCH = "10s"
"""For the peak, instead of 30: five answers of each scripted slot."""

ROUNDS = 3
"""Of a run and a loop: where others work beside, they differ more than what is measured."""

FAKE_SLOTS, SLOTS, TOKENS = 32, 4, 48
FAKE_ARGS = {"slots": FAKE_SLOTS, "latency-ms": 2000, "sigma": 0.2, "quick-canary": True}
"""Its answers have all the same tokens, so a spread in time is one in speed, which slots of one batch hardly have."""

EXTRA = {"ignore_eos": True, "cache_prompt": False}
"""The loop asks what the run has asked before it, and must read the prompts as that did: so seen, a run had 0.86."""

RUN = "from tokenmill import cli; cli.main()"
SLOW = (
    "import time; from tokenmill.core import judge; real = judge.measure; "
    "judge.measure = lambda *a: (time.sleep(0.015), real(*a))[1]; " + RUN
)
STARVED = (
    "import time; from tokenmill.generate import Pump; real = Pump.credits; "
    "Pump.credits = lambda self: 0 if time.monotonic() % 40 < 15 else real(self); " + RUN
)

During = Callable[[RunStatus], None]


@dataclass(frozen=True)
class Harm:
    """`signals` for server 0, each after so many seconds of generating; `code` runs in place of tokenmill's own."""

    name: str
    lost: str
    code: str = RUN
    signals: tuple[tuple[float, signal.Signals], ...] = ()

    def during(self) -> During:
        left = list(self.signals)

        def look(status: RunStatus) -> None:
            if left and status.seconds >= left[0][0] and (pid := status.servers[0].pid):
                os.kill(pid, left.pop(0)[1])

        return look


HARMS = (
    Harm("nothing", "0"),
    Harm("one stopped for 6 s", "7.5 %", signals=((SECONDS / 2, signal.SIGSTOP), (SECONDS / 2 + 6, signal.SIGCONT))),
    Harm("one killed in the middle", "until it is back", signals=((SECONDS / 2, signal.SIGKILL),)),
    Harm("no prompts for 15 of 40 s", "≤ 37 %", STARVED),
    Harm("15 ms more of its loop an answer", "3 %", SLOW),
)
"""What is done, and what it costs by the clock."""


def _config(folder: Path, prompts: Path, in_flight: int, **over: Any) -> Path:
    folder.mkdir(parents=True)
    fleet = {"gpus": "none", "servers": 2, "port": 31400, "stagger": "off", "stall_timeout": "20s"}
    over["fleet"] = fleet | over.get("fleet", {})
    over["generation"] = {"calibrate": STRETCH} | over.get("generation", {})
    return write_config(folder, prompts, in_flight=in_flight, **over)


def _prompts(scratch: Path) -> Path:
    path = scratch / "prompts-efficiency.jsonl"
    rows = ({"id": f"p{n}", "prompt": f"Write {n} words about the number {n}."} for n in range(100_000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _generate(path: Path, code: str = RUN, during: During = lambda status: None) -> RunStatus:
    """A run that is stopped after so many seconds of generating; `during` is called each second with its status."""
    run = RunFolder(path.parent / "runs" / "bench")
    quiet = subprocess.DEVNULL
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(path)],
        cwd=ROOT,
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        env=environment,
    )
    began = time.time()
    try:
        while process.poll() is None:
            time.sleep(1.0)
            last = run.status()
            if last is None or last.updated < began or last.state != "generating":
                continue
            during(last)
            if last.seconds >= SECONDS:
                process.send_signal(signal.SIGINT)
                process.wait(120)
    finally:
        process.kill()
    last = run.status()
    assert last is not None, "no status"
    return last


def _peak(scratch: Path, prompts: Path) -> Iterator[Words]:
    """The meter's peak, and what the run made, beside the loop's rate."""
    args = {"parallel": SLOTS, "ctx-size": 512 * SLOTS, "threads": 1, "threads-batch": 1, "threads-http": 2}
    path = _config(
        scratch / "efficiency-peak",
        prompts,
        SLOTS,
        model={"name": "smollm2", "path": str(find_model(print))},
        engine={"kind": "llamacpp", "args": args, "addresses": []},
        fleet={"keep_servers": "always"},
        generation={"thinking": False, "max_tokens": TOKENS, "extra": EXTRA},
        gate={"max_rejected": 1.0, "max_truncated": 1.0, "max_failed": 1.0},
    )
    run = RunFolder(path.parent / "runs" / "bench")
    told, made, bare = [], [], []
    try:
        for _ in range(ROUNDS):
            began = time.time()
            last = _generate(path)
            assert last.efficiency is not None, last
            records = [record for record in dataset.records(run.data) if record.started >= began]
            told.append(last.efficiency.peak_tokens_per_s)
            made.append(_rate([Answer(one.started, one.started + one.seconds, one.output_tokens) for one in records]))
            asked = [json.loads(bytes(record.prompt_ids)) for record in records]
            bare.append(_rate(_loop([entry.port for entry in run.state().servers], asked)))
    finally:
        down = [sys.executable, "-m", "tokenmill", "down", str(run.path)]
        subprocess.run(down, cwd=ROOT, check=False, capture_output=True)
    spread = f"loop {', '.join(f'{rate:.1f}' for rate in bare)} tok/s"
    what = "two llama.cpp servers, ÷ bare closed loop on them, in turns"
    for name, goal, rates in (("tokens/s of a run", "≥ 0.98", made), ("peak as the meter tells it", "1", told)):
        here = ", ".join(f"{rate / floor:.2f}" for rate, floor in zip(rates, bare, strict=True))
        yield f"{name}: {what}", goal, here, spread


def _loop(ports: list[int], prompts: list[list[int]]) -> list[Answer]:
    rest = {"n_predict": TOKENS, "return_tokens": True, **EXTRA}
    bodies = (json.dumps({"prompt": ids, **rest}).encode() for ids in cycle(prompts))
    urls = [f"http://127.0.0.1:{port}/completion" for port in ports]
    return closed_loop.loop(urls, bodies, lambda reply: reply["tokens_predicted"], width=SLOTS, seconds=SECONDS)


def _rate(answers: list[Answer]) -> float:
    """Tokens a second with all slots full: after the first quarter, until the last one is asked for."""
    begin, end = min(each.asked for each in answers) + SECONDS / 4, max(each.asked for each in answers)
    return windows(answers, begin, end, 1)[0]


def _leave(number: int, frame: object) -> None:
    """SIGTERM, which a time limit sends, must end the servers that are kept between rounds, too."""
    raise SystemExit(128 + number)


def measure_all(scratch: Path) -> Iterator[Words]:
    signal.signal(signal.SIGTERM, _leave)
    prompts = _prompts(scratch)
    for number, harm in enumerate(HARMS):
        engine = {"kind": "fake", "args": FAKE_ARGS, "addresses": []}
        path = _config(scratch / f"efficiency-{number}", prompts, FAKE_SLOTS, engine=engine)
        last = _generate(path, harm.code, harm.during())
        what = f"efficiency told, two scripted servers; done to it: {harm.name}"
        yield what, f"lost {harm.lost}", words(last.efficiency), ""
    yield from _peak(scratch, prompts)

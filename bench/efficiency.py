"""The efficiency meter: what it says of runs to which something is done, and its peak beside a bare closed loop.

Two scripted servers, which sleep instead of computing, so that no neighbour slows them down: a run that is left alone,
one whose server is stopped (SIGSTOP) for a while or killed, one without prompts for 15 of 40 s, and one whose client
sleeps over each answer. Beside it a bare closed loop on the same servers and prompts: on these, and, in turns, on two
real llama.cpp servers, where a shared machine is not as fast in one minute as in the next.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any

from bench import closed_loop, timed
from bench.measure import ROOT
from tokenmill import dataset
from tokenmill.core.efficiency import words
from tokenmill.core.status import RunStatus
from tokenmill.core.trials import Answer
from tokenmill.folder import RunFolder

Words = tuple[str, str, str, str]

SECONDS = 40.0
"""Of generating, in each run and each loop: two stretches, and as much after something was done."""

STRETCH = "10s"
"""For the peak, instead of 30: five answers of each scripted slot."""

ROUND_S, ROUNDS = 24.0, 6
"""Of a run and a loop on llama.cpp. On a shared machine equal answers took 3.4 s, and 6.8 s a minute later: so short
rounds, and their median."""

FAKE_SLOTS, SLOTS, TOKENS = 32, 4, 48
FAKE_ARGS = {"slots": FAKE_SLOTS, "latency-ms": 2000, "sigma": 0.2, "quick-canary": True}
"""Its answers have all the same tokens, so a spread in time is one in speed, which slots of one batch hardly have."""

EXTRA = {"ignore_eos": True, "cache_prompt": False}
"""The loop asks what the run has asked before it, and must read the prompts as that did."""

SLOW = (
    "import time; from tokenmill.core import judge; real = judge.measure; "
    "judge.measure = lambda *a: (time.sleep(0.015), real(*a))[1]; " + timed.RUN
)
STARVED = (
    "import time; from tokenmill.generate import Pump; real = Pump.credits; "
    "Pump.credits = lambda self: 0 if time.monotonic() % 40 < 15 else real(self); " + timed.RUN
)


@dataclass(frozen=True)
class Harm:
    """`signals` for server 0, each after so many seconds of generating; `code` runs in place of tokenmill's own."""

    name: str
    lost: str
    code: str = timed.RUN
    signals: tuple[tuple[float, signal.Signals], ...] = ()

    def during(self) -> timed.During:
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


def _peak(scratch: Path, prompts: Path) -> Iterator[Words]:
    """The meter's peak, and what the run made, beside the loop's rate."""
    args = {"parallel": SLOTS, "ctx-size": 512 * SLOTS, "threads": 1, "threads-batch": 1, "threads-http": 2}
    over = timed.llamacpp(args, TOKENS, {"cache_prompt": False})
    over["generation"]["calibrate"] = STRETCH
    path = timed.config(scratch / "efficiency-peak", prompts, SLOTS, fleet={"keep_servers": "always"}, **over)
    run = timed.folder_of(path)
    told, made, bare = [], [], []
    try:
        for _ in range(ROUNDS):
            began = time.time()
            last = timed.generate(path, ROUND_S)
            assert last.efficiency is not None, last
            told.append(last.efficiency.peak_tokens_per_s)
            made.append(timed.rate(timed.answers(run, began), ROUND_S / 4))
            records = (record for record in dataset.records(run.data) if record.started >= began)
            asked = [json.loads(bytes(record.prompt_ids)) for record in records]
            bare.append(timed.rate(_loop(run, asked), ROUND_S / 4))
    finally:
        _down(run)
    spread = f"loop {', '.join(f'{rate:.1f}' for rate in bare)} tok/s"
    what = "two llama.cpp servers, ÷ bare closed loop on them, in turns"
    ratios = [rate / floor for rate, floor in zip(made, bare, strict=True)]
    here = f"{median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    yield f"tokens/s of a run: {what}", "≥ 0.98", here, spread
    yield f"peak as the meter tells it ÷ the fastest loop: {what}", "1", f"{max(told) / max(bare):.2f}", spread


def _loop(run: RunFolder, prompts: list[list[int]]) -> list[Answer]:
    rest = {"n_predict": TOKENS, "return_tokens": True, **EXTRA}
    bodies = (json.dumps({"prompt": ids, **rest}).encode() for ids in cycle(prompts))
    urls = [f"http://127.0.0.1:{entry.port}/completion" for entry in run.state().servers]
    return closed_loop.loop(urls, bodies, lambda reply: reply["tokens_predicted"], width=SLOTS, seconds=ROUND_S)


def _down(run: RunFolder) -> None:
    down = [sys.executable, "-m", "tokenmill", "down", str(run.path)]
    subprocess.run(down, cwd=ROOT, check=False, capture_output=True)


def _scripted(run: RunFolder, last: RunStatus) -> Words:
    """A run that is left alone, and the meter's peak, beside the loop on the servers that it kept."""
    assert last.efficiency is not None, last
    made = timed.rate(timed.answers(run, 0.0), SECONDS / 4)
    asked = {"max_tokens": 8192, "chat_template_kwargs": {"enable_thinking": True}}  # without thinking it answers less
    rows = ({"messages": [{"role": "user", "content": f"Write {n} words."}], **asked} for n in count())
    urls = [f"http://127.0.0.1:{entry.port}/v1/chat/completions" for entry in run.state().servers]

    def tokens(reply: Any) -> int:
        return int(reply["usage"]["completion_tokens"])

    bodies = (json.dumps(row).encode() for row in rows)
    bare = timed.rate(closed_loop.loop(urls, bodies, tokens, width=FAKE_SLOTS, seconds=SECONDS), SECONDS / 4)
    what = "tokens/s of a run; peak as the meter tells it: two scripted servers, ÷ bare closed loop on them"
    here = f"{made / bare:.3f}; {last.efficiency.peak_tokens_per_s / bare:.3f}"
    return what, "≥ 0.98; 1", here, f"loop {bare:,.0f} tok/s"


def _leave(number: int, frame: object) -> None:
    """SIGTERM, which a time limit sends, must end the servers that are kept between rounds, too."""
    raise SystemExit(128 + number)


def measure_all(scratch: Path) -> Iterator[Words]:
    signal.signal(signal.SIGTERM, _leave)
    prompts = timed.write_prompts(scratch)
    for number, harm in enumerate(HARMS):
        engine = {"kind": "fake", "args": FAKE_ARGS, "addresses": []}
        over = {"engine": engine, "generation": {"calibrate": STRETCH}, "fleet": {"keep_servers": "always"}}
        path = timed.config(scratch / f"efficiency-{number}", prompts, FAKE_SLOTS, **over)
        try:
            last = timed.generate(path, SECONDS, harm.code, harm.during())
            if not number:
                yield _scripted(timed.folder_of(path), last)
        finally:
            _down(timed.folder_of(path))
        what = f"efficiency told, two scripted servers; done to it: {harm.name}"
        yield what, f"lost {harm.lost}", words(last.efficiency), ""
    yield from _peak(scratch, prompts)

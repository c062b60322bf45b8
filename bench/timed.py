"""Runs of so many seconds of generating on real or scripted servers that they launch, and the rate that they made."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import ROOT, write_config
from tokenmill import dataset
from tokenmill.core.status import RunStatus
from tokenmill.core.trials import Answer, windows
from tokenmill.folder import RunFolder
from tokenmill.quickstart import find_model

PORT = 31400
"""Below those of the fake servers' answers that other figures are measured with."""

RUN = "from tokenmill import cli; cli.main()"
"""The command, in whose place others may put something before it."""

During = Callable[[RunStatus], None]


def write_prompts(scratch: Path) -> Path:
    """Short ones, more than any of these runs asks for."""
    path = scratch / "prompts-short.jsonl"
    rows = ({"id": f"p{n}", "prompt": f"Write {n} words about the number {n}."} for n in range(100_000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(folder: Path, prompts: Path, in_flight: int | str, **over: Any) -> Path:
    """Two servers without GPUs, unless `over` says otherwise."""
    folder.mkdir(parents=True)
    fleet = {"gpus": "none", "servers": 2, "port": PORT, "stagger": "off", "stall_timeout": "20s"}
    over["fleet"] = fleet | over.get("fleet", {})
    over["generation"] = {"concurrency": in_flight} | over.get("generation", {})
    return write_config(folder, prompts, **over)


def llamacpp(args: dict[str, Any], tokens: int, extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a config says of the small real model, every answer of `tokens` tokens."""
    return {
        "model": {"name": "smollm2", "path": str(find_model(print))},
        "engine": {"kind": "llamacpp", "args": args, "addresses": []},
        "generation": {"thinking": False, "max_tokens": tokens, "extra": {"ignore_eos": True, **extra}},
        "gate": {"max_rejected": 1.0, "max_truncated": 1.0, "max_failed": 1.0},
    }


def folder_of(config: Path) -> RunFolder:
    """Where the run of a config lies."""
    return RunFolder(config.parent / "runs" / "bench")


def generate(path: Path, seconds: float, code: str = RUN, during: During = lambda status: None) -> RunStatus:
    """A run that is stopped after so many seconds of generating; `during` is called each second with its status."""
    run = folder_of(path)
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
            if last.seconds >= seconds:
                process.send_signal(signal.SIGINT)
                process.wait(120)
    finally:
        process.kill()
    last = run.status()
    assert last is not None, "no status"
    return last


def answers(run: RunFolder, since: float) -> list[Answer]:
    """Those that were asked for since then, by the wall clock."""
    found = (record for record in dataset.records(run.data) if record.started >= since)
    return [Answer(one.started, one.started + one.seconds, one.output_tokens) for one in found]


def rate(answers: list[Answer], skip: float) -> float:
    """Tokens a second with all slots full: after `skip` seconds, until the last one is asked for."""
    begin, end = min(each.asked for each in answers) + skip, max(each.asked for each in answers)
    return windows(answers, begin, end, 1)[0]

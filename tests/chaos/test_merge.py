"""Shards of real runs, merged: every key once, proved by the folders alone. (Refusals: tests/unit/test_shards.py.)"""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import Command
from tests.chaos.test_retry import LENIENT
from tests.conftest import write_prompts
from tests.harness import Case, wait_until
from tokenmill import asked, dataset, settings
from tokenmill.store import line_of

ROWS, SAMPLES, OF = 60, 2, 4
KEYS = {f"p{number}" for number in range(ROWS)}


def shard(case: Case, number: int, of: int = OF, **more: Any) -> Path:
    """The config of one shard, in a run folder of its own."""
    merged: dict[str, Any] = {
        "name": f"shard{number}",
        "engine": {"args": {"slots": 4, "quick-canary": True, "empty-reasoning": 0.2}},
        "fleet": {"servers": 1},
        "prompts": {"path": "prompts.jsonl", "shard": f"{number}/{of}"},
        "generation": {"samples": SAMPLES, "max_tokens": 400},
        "gate": LENIENT,
    }
    for name, value in more.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    written = case.write(**merged)
    return written.rename(case.folder / f"{merged['name']}.toml")


def folder(case: Case, number: int) -> Path:
    return case.folder / "runs" / f"shard{number}"


def journalled(run: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (run / "data").glob("journal-*"))


@pytest.fixture
def shards(case: Case, tokenmill: Command) -> list[Path]:
    """Four runs: one killed in the middle and gone on with, one with a retry, one of which an end is torn."""
    (case.folder / "prompts.jsonl").unlink()
    write_prompts(case.folder / "prompts.jsonl", ROWS)
    for number in range(OF):
        config = shard(case, number)
        if number == 1:
            slow = shard(case, number, engine={"args": {"slots": 2, "quick-canary": True, "latency-ms": 50}})
            process = case.command("run", str(slow))
            wait_until(lambda: journalled(folder(case, 1)) > 4, process)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            config = shard(case, number)
        code, said = tokenmill("run", config)
        assert code == 0, said
        if number == 2:
            plain = shard(case, number, engine={"args": {"slots": 4, "quick-canary": True}})
            code, said = tokenmill("run", plain, "--retry", "rejected", "--set", "generation.max_tokens=500")
            assert code == 0, said
    return [folder(case, number) for number in range(OF)]


def as_json(said: str) -> dict[str, Any]:
    return dict(json.loads(next(line for line in said.splitlines() if line.startswith("{"))))


@pytest.mark.timeout(240)
def test_four_shards_become_one_run(shards: list[Path], case: Case, tokenmill: Command) -> None:
    out = case.folder / "runs" / "whole"
    (case.folder / "prompts.jsonl").rename(case.folder / "away.jsonl")  # as on another machine
    parts = {path: path.stat().st_size for run in shards for path in (run / "data").glob("*")}
    code, said = tokenmill("merge", *shards, out, "--json")
    assert code == 0, said
    found = as_json(said)
    assert (found["keys"], found["prompts"]["total"], found["prompts"]["pending"]) == (ROWS, ROWS * SAMPLES, 0)
    assert sum(part["completions"] for part in found["runs"]) == ROWS * SAMPLES
    assert [part["shard"] for part in found["runs"]] == ["0/4", "1/4", "2/4", "3/4"]
    assert any("retry 1 for rejected" in line for line in found["differs"])
    assert {path: path.stat().st_size for run in shards for path in (run / "data").glob("*")} == parts

    merged = [record for run in shards for record in dataset.records(run / "data")]
    records = list(dataset.records(out / "data"))
    assert records == sorted(merged, key=lambda record: (record.row, record.sample))
    assert Counter((record.key, record.sample) for record in records) == Counter((k, s) for k in KEYS for s in (0, 1))
    superseded = found["superseded"]
    assert superseded > 0
    assert len(list(dataset.briefs(out / "data"))) == ROWS * SAMPLES + superseded
    assert len(settings.read(out / "data")) == 3  # one for slots = 2, one for the retry
    asked_for = asked.read(out / "data")
    assert asked_for is not None
    assert (asked_for.shard, asked_for.completions) == ((0, 1), ROWS * SAMPLES)

    code, said = tokenmill("status", out, "--json")
    assert (code, as_json(said)["prompts"], as_json(said)["state"]) == (0, found["prompts"], "done")
    for words in (("inspect", out), ("report", out), ("export", out, "parquet", case.folder / "out")):
        code, said = tokenmill(*words)
        assert code in ((0, 5) if words[0] == "inspect" else (0,)), said
    report = json.loads((out / "report.json").read_bytes())
    assert report["verdict"].startswith("Done")
    # Where the prompt set is, it is a run to go on with: nothing is missing, and its bad rows can be made again.
    (case.folder / "away.jsonl").rename(case.folder / "prompts.jsonl")
    code, said = tokenmill("run", out / "config.toml")
    assert (code, "every prompt has a record already" in said) == (0, True), said
    rejected = found["prompts"]["rejected"]
    assert rejected > 0
    changed = ("--set", "engine.args.empty-reasoning=0.0", "--set", "generation.max_tokens=450")
    code, said = tokenmill("run", out / "config.toml", "--retry", "rejected", *changed)
    assert (code, f"retry 2 (rejected): {rejected} completions once more" in said) == (0, True), said
    assert case.ended()


def test_a_killed_merge_leaves_nothing_that_the_next_one_minds(case: Case, tokenmill: Command) -> None:
    """The run's journal is still open, with a torn end: it was killed with its last record, before it sealed them."""
    assert tokenmill("run", shard(case, 0, 1))[0] == 0
    data, out = folder(case, 0) / "data", case.folder / "runs" / "whole"
    lines = b"".join(map(line_of, dataset.records(data)))
    next(data.glob("part-*")).unlink()
    (data / "journal-000001.jsonl").write_bytes(lines + lines[:100])
    killed = False
    while not killed:
        process = case.command("merge", str(folder(case, 0)), str(out))
        while not (begun := list(out.parent.glob(".whole.*"))) and process.poll() is None:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed = bool(begun) and not out.exists()
        shutil.rmtree(out, ignore_errors=True)
    assert len(list(out.parent.glob(".whole.*"))) == 1
    code, said = tokenmill("merge", folder(case, 0), out)
    assert (code, "every key once: 40 keys, 80 completions; " in said) == (0, True), said
    assert not list(out.parent.glob(".whole.*"))
    assert len(list(dataset.records(out / "data"))) == 40 * SAMPLES
    assert [path.name for path in sorted((out / "data").iterdir())] == [
        *("part-000001.parquet", "prompts.json", "settings.jsonl", "torn.bin")
    ]
    assert (data / "journal-000001.jsonl").read_bytes() == lines + lines[:100]

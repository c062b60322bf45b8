"""C14: a run killed twice ends with every id once, and started again when finished it asks and changes nothing."""

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import write_prompts
from tests.harness import Case, answered_prompts, assert_whole


@pytest.mark.parametrize("samples", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_twice_and_resumed_every_id_is_there_once(case: Case, samples: int) -> None:
    write_prompts(case.folder / "prompts.jsonl", 60, start=40)
    (case.folder / "prompts.jsonl").write_text("".join(_lines(case.folder / "prompts.jsonl")[: 100 // samples]))
    log = case.folder / "requests.jsonl"
    slots = 4
    args = {"slots": slots, "latency-ms": 120, "sigma": 1.0, "requests": str(log)}
    case.write(engine={"args": args}, generation={"samples": samples})
    for rows in (40, 65):
        process = case.start()
        case.until_done(rows, process)
        assert process.poll() is None, case.output()
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert rows <= case.done() < 100
    assert case.run() == 0
    assert_whole(case, {f"p{n}" for n in range(100 // samples)}, samples=samples)
    asked = answered_prompts(log).total()
    in_flight = 2 * slots
    # An answer frees its slot a moment before its row is on the disk: a slow disk loses up to one more round a kill.
    assert asked <= 100 + 2 * (in_flight + in_flight), "more was asked again than the two kills could lose"

    report = json.loads((case.run_path / "report.json").read_text())
    assert "100 of 100 completions are accepted" in report["verdict"]
    before = _digests(case.run_path / "data")
    assert case.run() == 0
    assert answered_prompts(log).total() == asked
    assert _digests(case.run_path / "data") == before


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

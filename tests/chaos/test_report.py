"""`tokenmill report` on a run while it goes on and after it was killed, and the one that the run writes at its end."""

import json
import os
import signal

from tests.chaos.conftest import Command
from tests.conftest import write_prompts
from tests.harness import Case, wait_until


def test_a_run_has_a_report_at_any_time(case: Case, tokenmill: Command) -> None:
    write_prompts(case.folder / "prompts.jsonl", 120, start=40)
    case.write(engine={"args": {"slots": 4, "latency-ms": 250, "empty-reasoning": 0.1}}, gate={"max_rejected": 1.0})
    process = case.start()
    case.until_done(20, process)
    wait_until(lambda: (found := case.run_folder.status()) is not None and found.state == "generating", process, 10.0)
    assert "Going on (generating): " in _verdict(case, tokenmill)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert _verdict(case, tokenmill).startswith("Killed: ")
    assert case.run() == 0, case.output()
    found = json.loads((case.run_path / "report.json").read_text())
    page = (case.run_path / "report.html").read_text()
    counted = (found["state"], sum(found["counts"][:3]), found["asked"], found["unknown"])
    assert counted == ("done", 160, 160, [])
    assert [row["engine"] for row in found["environment"]] == ["fake"], "both starts ran on the same"
    assert {start["server"] for start in found["course"]["starts"]} == {"0", "1"}
    assert found["course"]["slots_busy"] is not None
    assert "Rejected: " in page
    (kind, *_) = found["examples"]
    assert kind["labels"] == ["empty_reasoning"]
    assert kind["examples"][0]["thought"] == ""
    assert "ANSWER" in kind["examples"][0]["answer"]


def _verdict(case: Case, tokenmill: Command) -> str:
    code, said = tokenmill("report", case.run_path)
    assert code == 0, said
    assert str(case.run_path / "report.html") in said
    return str(json.loads((case.run_path / "report.json").read_text())["verdict"])

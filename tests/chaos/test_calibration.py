"""plan --calibrate: the run itself for a while; its rate is told, its rows and servers stay for the run."""

import json

import pytest

from tests.chaos.conftest import Command
from tests.conftest import write_prompts
from tests.harness import Case, assert_whole


@pytest.mark.long
def test_a_calibration_tells_the_rate_and_costs_nothing_that_the_run_would_not_pay_for(
    case: Case, tokenmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.planning.measured.RATE_FROM_S", 1.0)
    monkeypatch.setattr("tokenmill.planning.calibration.GENERATE_S", 2.0)
    write_prompts(case.folder / "prompts.jsonl", 260, start=40)
    case.write(engine={"args": {"slots": 4, "latency-ms": 150}})
    code, said = tokenmill("plan", case.config, "--calibrate", "--json")
    assert code == 0, said
    told = json.loads(said.splitlines()[-1])
    assert told["hours"] is not None
    assert "measured in this run" in told["hours_from"]
    stored, pids = {record.key for record in case.records()}, case.server_pids()
    assert len(stored) > 30
    assert set(case.leftovers()) == set(pids.values())
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert ": started as pid" not in said, "the calibration's servers were not taken"
    assert_whole(case, {f"p{n}" for n in range(300)})
    assert case.ended()


def test_a_calibration_whose_run_fails_says_so(case: Case, tokenmill: Command) -> None:
    case.write(prompts={"path": "gone.jsonl"})
    code, said = tokenmill("plan", case.config, "--calibrate")
    assert code == 3
    assert "the calibration's run ended with exit code 3" in said


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_run_tells_its_share_of_the_peak_and_keeps_the_peaks_of_servers_that_live_on(
    case: Case, tokenmill: Command
) -> None:
    write_prompts(case.folder / "prompts.jsonl", 260, start=40)
    kept = {"keep_servers": "always"}
    speed = {"slots": 4, "latency-ms": 60}
    case.write(engine={"args": speed}, fleet=kept, generation={"calibrate": "300ms"}, prompts={"limit": 200})
    assert case.run() == 0, case.output()  # a process of its own: what it leaves is nobody's child
    peaks = [entry.peak for entry in case.run_folder.state().servers]
    assert all(peak is not None and peak.width == 4 and peak.answers >= 8 for peak in peaks)
    known = case.run_folder.status()
    assert known is not None
    assert known.efficiency is not None
    assert known.efficiency.measured == 2
    assert known.efficiency.share is not None
    assert 0.0 < known.efficiency.share < 1.2
    assert "of the servers' peak" in case.output()
    assert "of the servers' peak" in tokenmill("status", case.run_path)[1]
    assert "Since its last start the run made" in (case.run_path / "report.html").read_text()
    longer = ("--set", "prompts.limit=220", "--set", 'generation.calibrate="1h"')
    assert case.run(*longer) == 0, case.output()
    assert [entry.peak for entry in case.run_folder.state().servers] == peaks, "no hour has passed: they are kept"
    rest = ("--set", "prompts.limit=0", "--set", 'fleet.keep_servers="no"', "--no-calibrate")
    code, said = tokenmill("run", case.config, *rest)
    assert code == 0, said
    known = case.run_folder.status()
    assert known is not None
    assert known.efficiency is None
    assert_whole(case, {f"p{n}" for n in range(300)})
    assert case.ended()

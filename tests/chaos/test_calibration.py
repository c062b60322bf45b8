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

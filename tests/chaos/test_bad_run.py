"""Bad runs end early and say why, good ones are left alone, and what was paid for is not paid for again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import Here
from tests.conftest import write_prompts
from tests.harness import Case, answered_prompts, assert_whole


def _fleet(case: Case, count: int, **flags: Any) -> Path:
    """A scripted fleet of two, wide as real ones are, over so many prompts; returns its own notes."""
    write_prompts(case.folder / "prompts.jsonl", count - 40, start=40)
    log = case.folder / "requests.jsonl"
    args = {"slots": 16, "latency-ms": 50, "sigma": 0.5, "requests": str(log), **flags}
    case.settings = {"engine": {"args": args}, "gate": {"cohort": 200}}
    return log


def _without_thoughts(here: Here, count: int) -> None:
    log = _fleet(here.case, count, **{"empty-reasoning": 0.87})
    code, said = here()
    assert code == 5, said
    begun = answered_prompts(log).total()
    print(f"{begun} of {count:,} prompts were begun")
    assert begun < 200, "it went on after the first cohort's verdict was inevitable"
    assert "of the 200 completions of cohort 0" in said
    assert "empty_reasoning" in said
    assert "gate.max_rejected = 0.2" in said
    assert "likely cause: thinking is on, but the outputs hold no thought" in said
    assert f"to go on nevertheless: tokenmill run {here.case.config} --set gate.max_rejected=" in said
    assert here.case.leftovers() == []


def test_a_model_that_does_not_think_is_stopped_within_the_first_cohort(here: Here) -> None:
    _without_thoughts(here, 5000)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_model_that_does_not_think_is_stopped_within_the_first_cohort_of_902087(here: Here) -> None:
    _without_thoughts(here, 902_087)


def test_bad_rows_that_come_back_first_do_not_stop_a_good_run(here: Here) -> None:
    log = _fleet(here.case, 300, bad=0.1, **{"bad-latency-ms": 10, "latency-ms": 100, "sigma": 0.0})
    code, said = here()
    assert code == 0, said
    assert_whole(here.case, {f"p{n}" for n in range(300)})
    rejected = sum("empty_reasoning" in record.labels for record in here.case.records())
    assert 15 < rejected < 45
    assert answered_prompts(log).total() == 300


def test_a_server_that_refuses_every_request_is_quoted(here: Here) -> None:
    log = _fleet(here.case, 1000, **{"refuse-word": "Question", "latency-ms": 0})
    code, said = here()
    assert code == 5, said
    assert "gate.max_failed = 0.05" in said
    assert "refused, as scripted" in said, "the server's own words"
    assert "request_refused" in said
    assert answered_prompts(log).most_common(1)[0][1] == 1, "what is refused is not sent again"
    assert answered_prompts(log).total() < 200


def test_a_stopped_run_goes_on_with_another_threshold_and_pays_for_nothing_twice(here: Here) -> None:
    case = here.case
    log = _fleet(case, 110, **{"empty-reasoning": 0.5})
    case.write(gate={"cohort": 60}, fleet={"keep_servers": "stopped"})
    assert case.run() == 5, case.output()
    stored = {json.loads(bytes(record.messages))[-1]["content"]: record.text for record in case.records()}
    assert 12 < len(stored) < 60
    code, said = here.command("run", case.config, "--set", "gate.max_rejected=0.8")
    assert code == 0, said
    assert_whole(case, {f"p{n}" for n in range(110)})
    assert ": started as pid" not in said, "a reload was paid for, and servers were kept"
    begun = answered_prompts(log)
    assert {begun[prompt] for prompt in stored} == {1}, "a stored row was paid for again"
    assert begun.total() <= 110 + 32, "more was begun again than was in flight at the stop"
    kept = {json.loads(bytes(record.messages))[-1]["content"]: record.text for record in case.records()}
    assert stored.items() <= kept.items()
    assert case.leftovers() == []


def test_the_last_cohort_is_as_large_at_the_next_start_as_it_was(here: Here) -> None:
    """Its 3 bad of 10 are above a fifth, and 3 of a whole cohort's 20 were not: the same command ended as done."""
    case = here.case
    rows = [{"id": f"p{number}", "prompt": f"Question {number}"} for number in range(110)]
    (case.folder / case.prompts).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (case.folder / "answers.json").write_text(json.dumps({row["prompt"]: "" for row in rows[-3:]}))
    one = {"slots": 1, "answers": str(case.folder / "answers.json")}  # so that the bad ones come last
    for _ in range(2):
        code, said = here(engine={"args": one}, fleet={"servers": 1})
        assert (code, "of the 10 completions of cohort 5" in said) == (5, True), said
        assert_whole(case, {row["id"] for row in rows})
    assert "every prompt has a record already" in said
    code, said = here.command("run", case.config, "--set", "gate.max_rejected=0.3")
    assert code == 0, said
    assert case.leftovers() == []


def test_servers_that_refuse_every_request_are_the_configs_fault_at_once(here: Here, case: Case) -> None:
    """A field that they do not take is refused for ever: that is no trouble of outside to be waited out."""
    code, said = here(engine={"args": {"slots": 2, "refuse": "no such field: grammer"}})
    assert code == 4, said
    assert "2 of 2 canary completions failed: HTTP 400" in said
    assert "no such field: grammer" in said
    assert "fix: a field of generation.extra" in said
    assert case.ended()

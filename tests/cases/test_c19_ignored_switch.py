"""C19: the thinking switch stands where servers look for it, and is known by its effect: else the run stops early."""

from typing import Any

import pytest

from tests.conftest import write_prompts
from tests.harness import Case, answered_prompts, requests, scripted_server


def _behind_an_address(case: Case, *, thinking: bool, **settings: Any) -> None:
    engine = {"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{case.port}"]}
    case.write(model={"name": "m"}, engine=engine, generation={"thinking": thinking}, **settings)


def _names(value: Any) -> set[str]:
    """Every field's name, however deep."""
    if isinstance(value, dict):
        return set(value) | {name for inner in value.values() for name in _names(inner)}
    return {name for inner in value for name in _names(inner)} if isinstance(value, list) else set()


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_is_at_the_top_of_every_request_and_shows_in_every_answer(case: Case, thinking: bool) -> None:
    log = case.folder / "requests.jsonl"
    _behind_an_address(case, thinking=thinking)
    with scripted_server(case.port, model="m", requests=str(log)):
        assert case.run() == 0, case.output()
    bodies = [entry["body"] for entry in requests(log) if "begin" in entry]
    assert len(bodies) > 40, "the canary's, too"
    assert all(body["chat_template_kwargs"] == {"enable_thinking": thinking} for body in bodies)
    assert "extra_body" not in _names(bodies)
    records = case.records()
    assert len(records) == 40
    assert all(bool(record.reasoning) == thinking and not record.labels for record in records)


def test_a_server_that_ignores_it_is_sent_none_of_the_prompts(case: Case) -> None:
    log = case.folder / "requests.jsonl"
    _behind_an_address(case, thinking=True)
    with scripted_server(case.port, model="m", ignore_thinking=True, requests=str(log)):
        assert case.run() == 5
    assert "thinking is on, but " in case.output()
    assert "canary completions show no thought" in case.output()
    assert answered_prompts(log).total() == 0
    assert case.records() == []


@pytest.mark.parametrize(
    ("thinking", "args", "label"),
    [
        pytest.param(True, {"empty_reasoning": 1.0}, "empty_reasoning", id="on, and no prompt is thought over"),
        pytest.param(False, {"text": "<think>\nSo I think.\n</think>\n\nYes."}, "foreign_mode", id="off, and all are"),
    ],
)
def test_a_server_that_obeys_for_the_canary_alone_is_seen_in_the_first_cohort(
    case: Case, thinking: bool, args: dict[str, Any], label: str
) -> None:
    write_prompts(case.folder / "prompts.jsonl", 360, start=40)
    _behind_an_address(case, thinking=thinking, gate={"cohort": 20})
    with scripted_server(case.port, model="m", slots=4, latency_ms=20, **args):
        assert case.run() == 5
    records = case.records()
    assert len(records) < 60
    assert all(label in record.labels for record in records)
    words = case.output().partition("tokenmill: the gate stopped the run")[2]
    assert f"labels: {label} " in words

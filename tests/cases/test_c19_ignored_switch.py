"""C19: the thinking switch stands where servers look for it, and is known by its effect: else the run stops early."""

from typing import Any

import pytest

from tests.chaos.conftest import Here
from tests.conftest import write_prompts
from tests.harness import answered_prompts, requests, scripted_server


def _behind_an_address(here: Here, *, thinking: bool, **settings: Any) -> tuple[int, str]:
    engine = {"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{here.case.port}"]}
    return here(model={"name": "m"}, engine=engine, generation={"thinking": thinking}, **settings)


def _names(value: Any) -> set[str]:
    """Every field's name, however deep."""
    if isinstance(value, dict):
        return set(value) | {name for inner in value.values() for name in _names(inner)}
    return {name for inner in value for name in _names(inner)} if isinstance(value, list) else set()


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_is_at_the_top_of_every_request_and_shows_in_every_answer(here: Here, thinking: bool) -> None:
    log = here.case.folder / "requests.jsonl"
    with scripted_server(here.case.port, model="m", requests=str(log)):
        code, said = _behind_an_address(here, thinking=thinking)
    assert code == 0, said
    bodies = [entry["body"] for entry in requests(log) if "begin" in entry]
    assert len(bodies) > 40, "the canary's, too"
    assert all(body["chat_template_kwargs"] == {"enable_thinking": thinking} for body in bodies)
    assert "extra_body" not in _names(bodies)
    records = here.case.records()
    assert len(records) == 40
    assert all(bool(record.reasoning) == thinking and not record.labels for record in records)


def test_a_server_that_ignores_it_is_sent_none_of_the_prompts(here: Here) -> None:
    log = here.case.folder / "requests.jsonl"
    with scripted_server(here.case.port, model="m", ignore_thinking=True, requests=str(log)):
        code, said = _behind_an_address(here, thinking=True)
    assert code == 5, said
    assert "thinking is on, but " in said
    assert "canary completions show no thought" in said
    assert answered_prompts(log).total() == 0
    assert here.case.records() == []


@pytest.mark.parametrize(
    ("thinking", "args", "label"),
    [
        pytest.param(True, {"empty_reasoning": 1.0}, "empty_reasoning", id="on, and no prompt is thought over"),
        pytest.param(False, {"text": "<think>\nSo I think.\n</think>\n\nYes."}, "foreign_mode", id="off, and all are"),
    ],
)
def test_a_server_that_obeys_for_the_canary_alone_is_seen_in_the_first_cohort(
    here: Here, thinking: bool, args: dict[str, Any], label: str
) -> None:
    write_prompts(here.case.folder / "prompts.jsonl", 360, start=40)
    with scripted_server(here.case.port, model="m", slots=4, latency_ms=20, **args):
        code, said = _behind_an_address(here, thinking=thinking, gate={"cohort": 20})
    assert code == 5, said
    records = here.case.records()
    assert len(records) < 60
    assert all(label in record.labels for record in records)
    words = said.partition("tokenmill: the gate stopped the run")[2]
    assert f"labels: {label} " in words

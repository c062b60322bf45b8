"""C18: the thought is found in whichever field it is sent; a server that hides thought or answer stops early."""

import pytest

from tests.conftest import write_prompts
from tests.harness import Case

PROMPTS = 12

ROW = ("text", "reasoning", "answer", "parts", "finish_reason", "output_tokens", "reasoning_tokens", "labels")


def _rows(case: Case, mode: str) -> dict[str, dict[str, object]]:
    """What a run stores of each prompt when the server speaks in this mode."""
    folder = case.folder / mode
    folder.mkdir()
    own = Case(folder, case.port, prompts=str(case.folder / case.prompts))
    args = {"slots": 4, "mode": mode, "no-ids": True}
    own.write(engine={"args": args}, fleet={"servers": 1}, prompts={"limit": PROMPTS})
    assert own.run() == 0, own.output()
    return {record.key: {name: getattr(record, name) for name in ROW} for record in own.records()}


def test_one_stored_row_whichever_field_the_thought_comes_in(case: Case) -> None:
    inline = _rows(case, "inline")
    assert len(inline) == PROMPTS
    for row in inline.values():
        assert row["labels"] == ()
        assert str(row["reasoning"]).startswith("The prompt")
        assert str(row["answer"]).startswith("ANSWER")
    assert _rows(case, "reasoning_content") == inline
    assert _rows(case, "reasoning") == inline


@pytest.mark.parametrize(
    ("args", "label"),
    [
        pytest.param({"mode": "all_in_reasoning"}, "empty_answer", id="all of it in the thought"),
        pytest.param({"empty-reasoning": 0.4}, "empty_reasoning", id="four in ten without a thought"),
    ],
)
def test_a_server_that_hides_thought_or_answer_stops_the_run_early(
    case: Case, args: dict[str, object], label: str
) -> None:
    write_prompts(case.folder / "prompts.jsonl", 360, start=40)
    case.write(engine={"args": {"slots": 4, "latency-ms": 20, **args}}, fleet={"servers": 1}, gate={"cohort": 50})
    assert case.run() == 5
    records = case.records()
    assert len(records) < 100, "stopped long after the first cohort"
    assert all(record.output_tokens > 0 for record in records)
    words = case.output().partition("tokenmill: the gate stopped the run")[2]
    bad = [record for record in records if label in record.labels]
    assert f"labels: {label} " in words
    samples = [record for record in bad if f"  {record.key}: " in words and repr(record.text[:100])[1:-1] in words]
    assert len(samples) == 3, "the message shows no raw outputs"
    assert "--set gate.max_rejected=" in words

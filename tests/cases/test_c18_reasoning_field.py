"""C18: the thought is found in whichever field it is sent; a server that hides thought or answer stops early."""

from contextlib import ExitStack

import pytest

from tests.conftest import write_prompts
from tests.harness import Case, last_turn, scripted_server
from tokenmill.testing.script import Script

MODES = ("inline", "reasoning_content", "reasoning")


def test_one_stored_row_whichever_field_the_thought_comes_in(case: Case) -> None:
    ports = [case.port + number for number in range(len(MODES))]
    engine = {"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{port}" for port in ports]}
    case.write(model={"name": "m"}, engine=engine, generation={"concurrency": 2}, fleet={"min_ready": len(MODES)})
    with ExitStack() as servers:
        for port, mode in zip(ports, MODES, strict=True):
            servers.enter_context(scripted_server(port, model="m", mode=mode, no_ids=True, latency_ms=50))
        assert case.run() == 0, case.output()

    records, said = case.records(), Script()
    assert {record.server for record in records} == {"0", "1", "2"}
    for record in records:
        thought, answer = said.thought(last_turn(record)), said.answer(last_turn(record))
        assert record.text == f"<think>\n{thought}\n</think>\n\n{answer}", MODES[int(record.server)]
        assert (record.reasoning, record.answer, record.labels) == (thought, answer, ())
        share = len(thought) / len(record.text)
        assert record.reasoning_tokens == round(record.output_tokens * share)


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

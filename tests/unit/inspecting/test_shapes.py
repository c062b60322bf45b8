"""One row of any shape: read right where it is known, named where it is not, and never a crash."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.inspecting.strange import ANSWER, ROWS
from tokenmill.core.judge import Rules
from tokenmill.inspecting.measuring import measure
from tokenmill.inspecting.shapes import MAX_ID, Bad, Talk, Tokens, flags, numbers, read
from tokenmill.inspecting.tally import Tally
from tokenmill.inspecting.verdict import conclude


def row(**fields: Any) -> Any:
    return read("set.jsonl:7", json.dumps(fields).encode())


# -- lists of numbers --------------------------------------------------------------------------------------------------
LISTS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300_000), max_size=300)


@settings(deadline=None)
@given(LISTS, st.sampled_from([", ", ",", " ,\n"]))
def test_numbers_are_read_as_json_reads_them(values: list[int], comma: str) -> None:
    raw = ("[" + comma.join(map(str, values)) + "]").encode()
    found = numbers(raw)
    assert found is not None
    assert found.tolist() == values


ODD = [b"[[1,2],3]", b'["1"]', b"[1.5]", b"[1e3]", b"null", b"{}", b"7", b"[1,null]", b"[true]"]


@pytest.mark.parametrize("raw", ODD)
def test_what_is_no_list_of_whole_numbers_is_none(raw: bytes) -> None:
    assert numbers(raw) is None


@pytest.mark.parametrize("value", [1 << 63, 1 << 80, -(1 << 80)])
def test_numbers_beyond_64_bits_are_no_tokens(value: int) -> None:
    found = row(input_ids=[1, value], loss_mask=[0, 1])
    assert isinstance(found, Bad)
    assert "no such token" in found.why


@given(st.lists(st.booleans(), max_size=60), st.sampled_from([int, bool]))
def test_flags_are_ones_and_zeros_or_true_and_false(values: list[bool], kind: type) -> None:
    found = flags(json.dumps([kind(value) for value in values]).encode())
    assert found is not None
    assert found.tolist() == values


@pytest.mark.parametrize(
    "raw", [b"[2]", b"[10]", b"[0,-1]", b"[0.0]", b'["1"]', b"[[1]]", b"null", b"{}", b"1", b'"[1]"']
)
def test_what_is_no_list_of_flags_is_none(raw: bytes) -> None:
    assert flags(raw) is None


# -- shapes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "mask",
    [
        {"loss_mask": [0, 0, 1]},
        {"completion_mask": [0, 0, 1]},
        {"assistant_masks": [False, False, True]},
        {"labels": [-100, -100, 9]},
    ],
)
def test_token_ids_with_any_mask(mask: dict[str, Any]) -> None:
    found = row(id="a", input_ids=[7, 8, 9], metadata={"finish_reason": "length"}, **mask)
    assert isinstance(found, Tokens)
    assert (found.name, found.ids.tolist(), found.mask.tolist()) == ("a", [7, 8, 9], [False, False, True])
    assert found.finish == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "hi"}, ANSWER]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Yes."}]},
        {"prompt": "hi", "completion": "Yes."},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [ANSWER]},
        {"prompt": "hi", "completion": [{"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]},
    ],
)
def test_conversations_of_any_make(fields: dict[str, Any]) -> None:
    found = row(**fields)
    assert isinstance(found, Talk)
    assert (found.name, found.content, found.thought, found.earlier) == ("set.jsonl:7", "Yes.", None, False)
    assert found.turns[0] == {"role": "user", "content": "hi"}


def test_an_openai_batch_answer() -> None:
    choice = {"message": {**ANSWER, "reasoning": "It is so."}, "finish_reason": "stop"}
    body = {"choices": [choice], "usage": {"completion_tokens": 12}}
    found = row(custom_id="b1", response={"status_code": 200, "body": body}, error=None)
    assert isinstance(found, Talk)
    assert (found.name, found.thought, found.field, found.finish, found.tokens) == (
        "b1",
        "It is so.",
        "reasoning",
        "stop",
        12,
    )
    assert isinstance(row(custom_id="b2", response={"body": {"error": "overloaded"}}), Bad)


def test_a_tool_call_is_an_answer() -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": "{}"}}
    found = row(
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    assert isinstance(found, Talk)
    assert "search" in found.content


@pytest.mark.parametrize("earlier", [{"reasoning_content": "So."}, {"content": "<think>So.</think>Yes."}])
def test_a_thought_in_an_earlier_turn_is_seen(earlier: dict[str, str]) -> None:
    asks = {"role": "user", "content": "hi"}
    found = row(messages=[asks, {**ANSWER, **earlier}, asks, {**ANSWER, "reasoning_content": "And so."}])
    assert isinstance(found, Talk)
    assert (found.earlier, found.thought) == (True, "And so.")


def test_a_strange_row_names_its_fields() -> None:
    found = row(question="a", answer="b")
    assert isinstance(found, Bad)
    assert (found.name, found.fields) == ("set.jsonl:7", ("question", "answer"))
    assert "question, answer" in found.why


def test_ids_no_vocabulary_has_are_named() -> None:
    found = row(input_ids=[1, MAX_ID], loss_mask=[0, 1])
    assert isinstance(found, Bad)
    assert str(MAX_ID) in found.why


# -- anything ----------------------------------------------------------------------------------------------------------
def looked(data: bytes) -> None:
    """A row by itself: read, measured, added up, concluded."""
    tally = Tally(Rules())
    tally.add(measure([read("f:1", data)], Rules(), None)[0])
    found = conclude(tally, None)
    assert found.rows == 1
    assert found.verdict in ("pass", "warn", "fail")
    assert found.bad_rows == 0 or found.verdict == "fail"
    np.testing.assert_equal(sum(found.shapes.values()), 1)


@settings(deadline=None, max_examples=150)
@given(ROWS)
@example({"messages": [{"role": "assistant", "content": "\ud835"}]})
def test_no_row_is_a_crash(fields: dict[str, Any]) -> None:
    looked(json.dumps(fields).encode("utf-8", "surrogatepass"))


WHOLE = json.dumps({"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "messages": [ANSWER], "text": "é"})


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_broken_line_is_a_crash(data: st.DataObject) -> None:
    raw = bytearray(WHOLE.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    looked(bytes(raw[: data.draw(st.integers(0, len(raw)))]))

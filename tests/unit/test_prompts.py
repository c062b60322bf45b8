"""Prompt rows: the forms they come in, and what is sent of them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.make import jsonl
from tokenmill import prompts
from tokenmill.core.records import NULL
from tokenmill.errors import BadPromptError
from tokenmill.rows import MAX_LINE


def sent(row: Any) -> list[dict[str, Any]]:
    """What is sent of a row."""
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    found: list[dict[str, Any]] = msgspec.json.decode(prompts.messages(data)[0])
    return found


USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be short."}
ASSISTANT = {"role": "assistant", "content": "hello"}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

# -- forms of rows -----------------------------------------------------------------------------------------------------
FORMS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"prompt": "hi"}, [USER]),
    ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),
    ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, [USER, ASSISTANT, USER]),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, [USER]),
    ({"conversations": [{"role": "system", "value": "Be short."}, {"from": "user", "content": "hi"}]}, [SYSTEM, USER]),
    ({"custom_id": "a", "method": "POST", "body": {"model": "m", "messages": [USER]}}, [USER]),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
        [USER],
    ),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "tool", "content": "5"},
            ]
        },
        [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "5"}],
    ),
    (
        {"messages": [USER, {**ASSISTANT, "reasoning_content": "hm", "weight": 1}, USER]},
        [USER, {**ASSISTANT, "reasoning_content": "hm"}, USER],
    ),
]


@pytest.mark.parametrize(("row", "messages"), FORMS)
def test_every_form_of_a_row_is_told_by_its_fields(row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert sent(row) == messages


@pytest.mark.parametrize("form", [{"tools": CALLS, "messages": [USER]}, {"body": {"messages": [USER], "tools": CALLS}}])
def test_tools_go_along(form: dict[str, Any]) -> None:
    assert msgspec.json.decode(prompts.messages(json.dumps(form).encode())[1]) == CALLS


def test_no_tools_are_null() -> None:
    assert prompts.messages(b'{"prompt":"hi","tools":null}')[1] == NULL


def test_escapes_pairs_and_line_separators_survive() -> None:
    assert sent(b'{"prompt":"\\ud83d\\ude42 \\u2028 \xe6\xa8\xa1 \\n"}')[0]["content"] == "🙂 \u2028 模 \n"


@pytest.mark.parametrize(
    "nulls", [{"messages": None, "conversations": None}, {"body": None, "tools": None, "id": None}]
)
def test_a_null_field_is_no_field(nulls: dict[str, None]) -> None:
    assert sent({"prompt": "hi", **nulls}) == [USER]
    whole, plain = (json.dumps(row).encode() for row in ({"prompt": "hi", **nulls}, {"prompt": "hi"}))
    assert prompts.identity(whole) == prompts.identity(plain)


def test_an_answer_that_was_lost_and_a_result_that_is_empty_are_no_faults() -> None:
    """The first is mostly what is to be written anew; many a tool returns nothing."""
    lost = {"role": "assistant", "content": None}
    assert sent({"messages": [USER, lost]}) == [USER]
    assert sent({"messages": [USER, lost, USER]}) == [USER, {"role": "assistant", "content": ""}, USER]
    assert sent({"messages": [USER, {"role": "assistant"}, USER]})[1] == {"role": "assistant", "content": ""}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    nothing = {"role": "tool", "content": "", "tool_call_id": "1"}
    assert sent({"messages": [USER, call, nothing]}) == [USER, call, nothing]
    row = json.dumps({"messages": [USER, call, nothing, lost, USER]}).encode()
    assert [msgspec.json.decode(turn) for turn in prompts.conversation(row).turns] == [[USER, call, nothing], [USER]]


def test_what_is_sent_ends_with_a_user_or_tool_turn() -> None:
    assert sent({"messages": [USER, ASSISTANT, SYSTEM]}) == [USER]


BAD: list[tuple[Any, str]] = [
    (b"not json", "not a JSON object"),
    (b"[1,2]", "not a JSON object"),
    (b'{"prompt":"half', "not a JSON object"),
    (b'{"prompt":"\xff\xfe"}', "not UTF-8: invalid start byte at byte 11"),
    (b'{"prompt":"\\ud835 alone"}', "half of a surrogate pair"),
    (b'{"prompt":"a\\u0000b"}', "a turn that holds a NUL character"),
    ({"text": "hi"}, "none of the fields messages, conversations, prompt, body"),
    ({"prompt": ""}, "the last turn is empty"),
    ({"prompt": " \n\t"}, "the last turn is empty"),
    ({"prompt": 5}, "no text but int"),
    ({"prompt": None}, "none of the fields messages, conversations, prompt, body"),
    ({"messages": []}, "none of the fields messages, conversations, prompt, body holds anything"),
    ({"messages": [ASSISTANT]}, "no user turn"),
    ({"messages": [SYSTEM]}, "no user turn"),
    ({"messages": "hi"}, "messages are no list but str"),
    ({"messages": ["hi"]}, "a turn is no object but str"),
    ({"messages": [{"role": "user"}]}, "no text but NoneType"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "a turn with the role 'wizard'; known: assistant, developer"),
    ({"messages": [{"content": "hi"}]}, "a turn with the role None"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "content that is not text",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "content that is not text"),
    ({"body": "hi"}, "not a JSON object"),
    ({"body": {}}, "none of the fields"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "a turn with the role"),
    (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a JSON object: "),
    (b'{"prompt":"a","tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a JSON object: "),
    (bytes(MAX_LINE), "longer than 64 MiB"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_row_that_cannot_be_used_says_why(row: Any, reason: str) -> None:
    with pytest.raises(BadPromptError, match=reason.replace("(", r"\(")):
        sent(row)


def test_rows_that_cannot_be_used_have_keys_all_the_same(tmp_path: Path) -> None:
    rows = [row if isinstance(row, bytes) else json.dumps(row).encode() for row, _ in BAD]
    keys = [prompts.identity(row).key for row in rows]
    assert {len(key) for key in keys} == {16}
    index = prompts.scan(jsonl(tmp_path / "a.jsonl", rows))
    final = [index.key(row, key) for row, key in enumerate(keys)]
    assert [key.partition("~")[0] for key in final] == keys
    assert len(set(final)) == len(rows)


def test_a_row_of_a_parquet_file_is_a_row_like_others(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    table = pa.table({"id": [7, None], "messages": turns, "prompt": [None, None], "when": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = (raw.data for raw in prompts.rows(tmp_path))
    assert prompts.identity(first).key == "7"
    assert [sent(row)[0]["content"] for row in (first, second)] == ["hi", "ho"]

"""Prompt rows of any content, and good ones damaged at random: messages as they stand in the row, or a reason."""

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.test_mutated_replies import mutated
from tokenmill import prompts
from tokenmill.errors import BadPromptError

USER = {"role": "user", "content": "Why is the sky blue? 🙂 \u2028 模型"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
GOOD: list[dict[str, Any]] = [
    {"id": "a", "prompt": "Why?"},
    {"id": 7, "messages": [{"role": "system", "content": "Be brief."}, USER, CALL, {"role": "tool", "content": "42"}]},
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}], "tools": [{"type": "f"}]},
    {"custom_id": "b", "method": "POST", "body": {"model": "m", "messages": [USER], "tools": None}},
    {"uuid": "c", "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]},
]
ROWS = [json.dumps(row, ensure_ascii=number % 2 == 0).encode() for number, row in enumerate(GOOD)]


def check(data: bytes) -> bool:
    """Whether the row can be used; then what is sent stands in it, and ends with somebody's turn to be answered."""
    own = prompts.identity(data)
    assert len(own.digest) == 16
    try:
        sent = msgspec.json.decode(prompts.messages(data)[0])
    except BadPromptError:
        return False
    assert sent[-1]["role"] in ("user", "tool")
    assert {turn["role"] for turn in sent} <= {"system", "developer", "user", "assistant", "tool"}
    texts = "".join(strings(json.loads(data.decode("utf-8", "replace"))))
    assert all((turn["content"] or "")[:50] in texts for turn in sent)
    return True


def strings(value: Any) -> list[str]:
    """All texts of a JSON value, in order."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in strings(item)]


names = st.sampled_from(
    ["id", "custom_id", "prompt", "messages", "conversations", "body", "tools", "role", "from", "content", "value"]
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(row=st.one_of(anything, st.dictionaries(names, anything, max_size=5)))
def test_a_row_of_any_content_is_messages_or_has_a_reason(row: Any) -> None:
    check(json.dumps(row).encode())


def damaged_rows(rounds: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    for number in range(rounds):
        data = mutated(ROWS[number % len(ROWS)], rng).replace(b"\n", b" ")
        try:
            check(data)
        except Exception:
            print(f"seed {seed}, {data!r}")
            raise


def test_the_good_rows_are_used() -> None:
    assert all(map(check, ROWS))


def test_a_damaged_row_is_messages_or_has_a_reason() -> None:
    damaged_rows(3000)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_thousand_damaged_rows_are_messages_or_have_a_reason() -> None:
    damaged_rows(100_000)

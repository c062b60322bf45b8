"""A conversation as turns: where an answer is due, what each is asked with, and how a template renders it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import thinker
from tests.unit.make import TEXT, record
from tokenmill import prompts
from tokenmill.core import turns
from tokenmill.core.judge import Rules
from tokenmill.core.records import NULL, Parts
from tokenmill.errors import BadPromptError
from tokenmill.render import TokenizerRenderer

S, U, A, T = "system", "user", "assistant", "tool"


@pytest.mark.parametrize(
    ("roles", "found"),
    [
        ([U], [[0]]),
        ([U, A], [[0]]),
        ([S, U, A, U], [[0, 1], [3]]),
        ([U, A, U, A], [[0], [2]]),
        ([U, U, U], [[0], [1], [2]]),  # questions alone: each is answered before the next is asked
        ([A, U, A], [[0, 1]]),  # nobody asked for a greeting
        ([U, A, A, U, A], [[0], [3]]),
        ([U, A, S, U, A], [[0], [2, 3]]),
        ([U, A, S], [[0]]),
        # A call that its results follow is history; the answer to the results is written anew.
        ([U, A, T, A, U, A], [[0, 1, 2], [4]]),
        ([U, A, T, T, A, T, A], [[0, 1, 2, 3, 4, 5]]),
        ([U, A, T, U, A], [[0, 1, 2], [3]]),
        ([U, A, A, T, A], [[0], [2, 3]]),
        ([S, A, T, A, U], [[0, 1, 2, 3, 4]]),
        ([S], []),
        ([A, T], []),
    ],
)
def test_an_answer_is_due_where_one_stands_or_lacks(roles: list[str], found: list[list[int]]) -> None:
    assert turns.segments(roles) == found


@given(st.lists(st.sampled_from([S, U, A, T]), max_size=12))
def test_every_message_is_asked_with_once_and_every_question_gets_one_answer(roles: list[str]) -> None:
    found = turns.segments(roles)
    places = [place for own in found for place in own]
    assert places == sorted(set(places))
    assert all(roles[own[-1]] in (U, T, S) for own in found)
    assert len(found) >= roles.count(U)
    for own in found:
        assert {U, T} & {roles[place] for place in own}
        assert sum(roles[place] == U for place in own) <= 1
    kept = [place for place in places if roles[place] == A]
    first_user = roles.index(U) if U in roles else len(roles)
    assert all(place < first_user or roles[place + 1 : place + 2] == [T] for place in kept)
    given_up = [place for place in range(len(roles)) if place not in places and roles[place] != A]
    assert not found or all(place > found[-1][-1] for place in given_up)


_MESSAGE = st.sampled_from([S, U, A, T]).map(lambda role: {"role": role, "content": f"the {role}'s"})
_ROWS = st.lists(_MESSAGE, max_size=9).flatmap(
    lambda said: st.sampled_from(
        [
            {"messages": said},
            {"conversations": [{"from": "gpt" if m["role"] == A else m["role"], "value": m["content"]} for m in said]},
            {"prompt": said},
            {"custom_id": "a", "body": {"messages": said, "tools": None}},
        ]
    )
)


@given(_ROWS)
def test_as_many_turns_are_counted_as_are_asked_for(row: dict[str, Any]) -> None:
    data = json.dumps(row).encode()
    try:
        found = prompts.conversation(data)
    except BadPromptError:
        assert prompts.count_turns(data) == 1
        return
    assert prompts.count_turns(data) == len(found.turns) == len(prompts.as_given(data))
    if len(found.turns) == 1 and A not in str(row):
        assert (found.turns[0], found.tools) == prompts.messages(data)


@pytest.mark.parametrize("data", [b"not json", b"[1]", b'{"prompt":"hi"}', b'{"prompt":5}', b'{"messages":[1]}', b"{}"])
def test_a_row_without_turns_counts_as_one(data: bytes) -> None:
    assert prompts.count_turns(data) == 1


def test_a_turn_that_answers_nothing_says_which() -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": " "}]}
    with pytest.raises(BadPromptError, match="what turn 1 is to answer is empty"):
        prompts.conversation(json.dumps(row).encode())


def test_the_next_turn_is_asked_with_the_history_as_it_was_the_answer_and_its_thought() -> None:
    said = record(turn=1, messages=msgspec.Raw(b'[{"role":"user","content":"hi"}]'))
    asked = turns.following(said, msgspec.Raw(b'[{"role":"user","content":"and?"}]'))
    thought = "It is a greeting, so a greeting is due."
    assert msgspec.json.decode(asked) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello there!", "reasoning_content": thought},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        (
            {"labels": ("truncated_in_answer",), "finish_reason": "length"},
            "turn 2 of this conversation was cut off: trun",
        ),
        ({"repetition": 9.0}, "turn 2 of this conversation was rejected: repetition"),
        ({"labels": ("prompt_too_long",)}, "turn 2 of this conversation has failed: prompt_too_long"),
    ],
)
def test_a_conversation_goes_on_after_a_whole_and_accepted_answer_only(fields: dict[str, Any], why: str) -> None:
    assert turns.why_broken_off(record(turn=2, **fields), Rules()).startswith(why)
    assert bool(turns.why_broken_off(record(turn=2, **fields), Rules())) == bool(why)


def test_a_template_that_drops_earlier_thoughts_is_given_them_and_drops_them(tmp_path: Path) -> None:
    """By our tokenizer: the ids of the second turn's prompt are the first answer's without its thought."""
    renderer = TokenizerRenderer(thinker.folder(tmp_path, [TEXT, "hi and?"]), thinking=True)
    said = record(messages=msgspec.Raw(b'[{"role":"user","content":"hi"}]'), text=TEXT, parts=Parts(8, 47, 58, 70))
    asked = turns.following(said, msgspec.Raw(b'[{"role":"user","content":"and?"}]'))

    async def ids() -> list[int]:
        rendered = await renderer.render(asked, NULL, client=None)  # type: ignore[arg-type]
        return list(msgspec.json.decode(rendered.ids))

    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello there!<|im_end|>\n"
    text += "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert asyncio.run(ids()) == renderer._tokenizer(text, add_special_tokens=False)["input_ids"]

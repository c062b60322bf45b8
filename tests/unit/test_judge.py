"""What a completion is worth: thought and answer found, facts labelled, the verdict a pure function of both."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.make import completion
from tokenmill.core import judge
from tokenmill.core.judge import BROKEN, REJECT_FOR, TRUNCATED, Reading, Rules, Verdict
from tokenmill.core.records import FAILURES

ON = Reading(thinking=True)
OFF = Reading(thinking=False)
OPENED = Reading(thinking=True, opened=True)
CLOSED = Reading(thinking=True, opened=False)
IGNORED = Reading(thinking=False, opened=True)
"""Thinking is off, and the template opens a thought all the same."""

SHUT = Reading(thinking=False, opened=False, shut=True)
"""Thinking is off, and the prompt says so with an empty think block."""

THOUGHT = "First I look at it from one side, then from the other."
ANSWER = "It is forty-two."
WORDS = "stone river window letter garden seven under bright morning cloud paper music winter bread glass".split()  # noqa: SIM905


def verdict(labels: Sequence[str], tokens: int, ratio: float, thinking: bool, rules: Rules) -> Verdict:
    return judge.verdict(judge.effective_labels(tuple(labels), tokens, ratio, thinking, rules), rules)


def prose(words: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def labels(text: str, reading: Reading, finish: str = "stop", **fields: object) -> tuple[str, ...]:
    return judge.measure(completion(text, finish, **fields), reading, Rules()).labels  # type: ignore[arg-type]


# -- thought and answer ------------------------------------------------------------------------------------------------
SPLITS = [
    (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", ON, "stop", THOUGHT, ANSWER),
    (f"  \n<think>{THOUGHT}</think>{ANSWER}", OFF, "stop", THOUGHT, ANSWER),
    (f"{THOUGHT}\n</think>\n\n{ANSWER}\n", OPENED, "stop", THOUGHT, ANSWER),
    (f"{THOUGHT}\n</think>\n\n{ANSWER}\n", ON, "stop", THOUGHT, ANSWER),
    (f"<think>\n\n</think>\n\n{ANSWER}", ON, "stop", "", ANSWER),
    (ANSWER, ON, "stop", "", ANSWER),
    (ANSWER, CLOSED, "length", "", ANSWER),
    (THOUGHT, OPENED, "length", THOUGHT, ""),
    (THOUGHT, ON, "length", THOUGHT, ""),
    (f"<think>\n{THOUGHT}", CLOSED, "length", THOUGHT, ""),
    (f"<think>\n{THOUGHT}</think>", ON, "length", THOUGHT, ""),
    (THOUGHT, OFF, "length", "", THOUGHT),
    ("", ON, "stop", "", ""),
]


@pytest.mark.parametrize(("text", "reading", "finish", "thought", "answer"), SPLITS)
def test_thought_and_answer_are_found(text: str, reading: Reading, finish: str, thought: str, answer: str) -> None:
    a, b, c, d = judge.split(text, finish, reading)
    assert (text[a:b], text[c:d]) == (thought, answer)


@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "think>", "a", " ", "\n", "模", "\0", "🙂"]), max_size=9),
    finish=st.sampled_from(["stop", "length"]),
    thinking=st.booleans(),
    opened=st.sampled_from([None, True, False]),
)
def test_any_output_is_measured(pieces: list[str], finish: str, thinking: bool, opened: bool | None) -> None:
    text = "".join(pieces)
    measured = judge.measure(completion(text, finish), Reading(thinking, opened), Rules())
    a, b, c, d = measured.parts
    assert 0 <= a <= b <= c <= d <= len(text) or (a, b) == (0, 0)
    assert text[a:b] == text[a:b].strip()
    assert (set(measured.labels) & TRUNCATED != set()) == (finish == "length")
    assert ("empty" in measured.labels) == (a == b and c == d)
    assert measured.parts == judge.split(text, finish, Reading(thinking, opened))  # by characters, not by bytes
    closing, wrote_open = text.count("</think>"), text.lstrip().startswith("<think>")
    unclosed = not closing and (wrote_open or b > a)
    orphan = closing > 1 or text.count("<think>") > wrote_open or (finish == "stop" and unclosed)
    assert ("orphan_think_tag" in measured.labels) == orphan


# -- facts -------------------------------------------------------------------------------------------------------------
FACTS = [
    (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", ON, "stop", set()),
    (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", ON, "length", {"truncated_in_answer"}),
    (f"<think>\n{THOUGHT}</think>", ON, "length", {"truncated_in_answer"}),
    (f"<think>\n{THOUGHT}", ON, "length", {"truncated_in_thinking"}),
    (THOUGHT, OPENED, "length", {"truncated_in_thinking"}),
    (THOUGHT, OFF, "length", {"truncated_in_answer"}),
    ("<think>\n\n</think>\n\nOK.", ON, "stop", {"empty_reasoning"}),
    (ANSWER, ON, "stop", {"empty_reasoning"}),
    (f"<think>\n{THOUGHT}\n</think>\n\n", ON, "stop", {"empty_answer"}),
    ("", OFF, "stop", {"empty", "empty_answer"}),
    (" \n", ON, "stop", {"empty", "empty_answer", "empty_reasoning"}),
    (THOUGHT, OPENED, "stop", {"empty_answer", "orphan_think_tag"}),
    (f"<think>{THOUGHT}</think>b</think>{ANSWER}", ON, "stop", {"orphan_think_tag"}),
    (f"<think>{THOUGHT}<think>b</think>{ANSWER}", ON, "stop", {"orphan_think_tag"}),
    (f"<think>{THOUGHT} rethink></think>{ANSWER} rethink> think>", ON, "stop", set()),
    (f"{THOUGHT} <bethink></think>{ANSWER} </bethink>", OPENED, "stop", set()),
    (f"{THOUGHT} rethink>", OPENED, "stop", {"empty_answer", "orphan_think_tag"}),
    (f"<think>{THOUGHT} rethink>", ON, "stop", {"empty_answer", "orphan_think_tag"}),
    (f"<think>{THOUGHT}</think>{ANSWER}", OFF, "stop", {"foreign_mode"}),
    (f"<think>\n\n</think>\n\n{ANSWER}", OFF, "stop", set()),
    (f"<think>\n\n</think>\n\n{ANSWER}", SHUT, "stop", {"foreign_mode"}),
    (f"</think>\n\n{ANSWER}", OFF, "stop", {"foreign_mode"}),
    (ANSWER, SHUT, "stop", set()),
    (THOUGHT, IGNORED, "length", {"foreign_mode", "truncated_in_thinking"}),
    (f"<think>\n{THOUGHT}", OFF, "length", {"foreign_mode", "truncated_in_thinking"}),
    (f"{THOUGHT}</think>{ANSWER}", IGNORED, "stop", {"foreign_mode"}),
    (f"{ANSWER}\0", OFF, "stop", {"bad_text"}),
    (ANSWER + "\ufffd" * 4, OFF, "stop", set()),
    (ANSWER + "\ufffd" * 5, OFF, "stop", {"bad_text"}),
    (f"{ANSWER} 🙂 \u2028 模型", OFF, "stop", set()),
]


@pytest.mark.parametrize(("text", "reading", "finish", "expected"), FACTS)
def test_what_a_completion_shows_becomes_labels(text: str, reading: Reading, finish: str, expected: set[str]) -> None:
    assert set(labels(text, reading, finish)) == expected


def test_a_damaged_answer_is_bad_text() -> None:
    assert labels(ANSWER, OFF, damaged=True) == ("bad_text",)


@pytest.mark.parametrize(
    ("ids", "finish", "missing"),
    [
        (b"[5,9]", "stop", False),
        (b"[9]", "stop", False),
        (b"[9,5]", "stop", True),
        (b"[5,19]", "stop", True),
        (b"[5]", "length", False),
        (b"null", "stop", False),
    ],
)
def test_a_stop_without_its_end_token_is_named(ids: bytes, finish: str, missing: bool) -> None:
    reading = Reading(thinking=False, end_ids=frozenset({b"9", b"10"}))
    assert ("missing_end_token" in labels(ANSWER, reading, finish, output_ids=msgspec.Raw(ids))) == missing


LINE = "| garden | seven | 1.25 |"
TABLE = "\n".join(f"| {prose(2, n)} | {n * 37 % 101} | {n * 53 % 97}.{n % 7} |" for n in range(60))
CJK = "".join(random.Random(3).choices([chr(0x4E00 + n * 7) for n in range(900)], k=1500))


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("I should check this again. " * 300, True),
        ("!" * 2000, True),
        ("First one.\nThen the other.\n" * 200, True),
        (prose(3000) + " " + "and so on, " * 500, True),
        (f"<think>\n{prose(500)} {'and so on, ' * 500}\n</think>\n\n{prose(200)}", True),  # the thought, not the answer
        (f"<think>\n{prose(900)}\n</think>\n\n{prose(200)} {'and so on, ' * 500}", True),
        (f"{prose(900)} {'and so on, ' * 800} {prose(1500, 1)}", True),  # it came out of it
        (f"{prose(900)} {(prose(300, 1) + '. ') * 10}", True),  # a paragraph, ten times
        (f"{prose(900)} {(prose(300, 1) + '. ') * 2} {prose(500)}", False),
        (prose(2000), False),
        (TABLE, False),
        (CJK, False),
        (LINE * 3, False),
        ("=" * 199, False),
    ],
)
def test_loops_are_told_from_text(text: str, loops: bool) -> None:
    assert ("repetition" in labels(text, OFF)) == loops


# -- the length of a thought -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_tokens": 17}, 17),  # the engine's own count
        ({"output_ids": msgspec.Raw(b"[1,2,3,99,4,5]")}, 3),  # up to the one token of </think>
        ({"output_ids": msgspec.Raw(b"[1,2,3,4,5]")}, 50),  # by share of characters
        ({}, 50),
        ({"tokens": 0}, 12),  # nobody counted: by characters alone
    ],
)
def test_the_thoughts_tokens_are_counted(fields: dict[str, object], expected: int) -> None:
    text = "<think>" + "a" * 50 + "</think>" + "b" * 35
    reading = Reading(thinking=True, close_id=b"99")
    measured = judge.measure(completion(text, **fields), reading, Rules())  # type: ignore[arg-type]
    assert measured.reasoning_tokens == expected


def test_a_thought_that_takes_it_all_counts_every_token() -> None:
    reading = Reading(thinking=True, opened=True, close_id=b"99")
    cut = completion(THOUGHT, "length", tokens=12, output_ids=msgspec.Raw(b"[1,2]"))
    assert judge.measure(cut, reading, Rules()).reasoning_tokens == 12


# -- verdicts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("purpose", "label", "expected"),
    [
        *(("drafter", label, Verdict.REJECTED) for label in sorted(BROKEN - judge.THRESHOLD_LABELS)),
        *(("drafter", label, Verdict.ACCEPTED) for label in sorted(TRUNCATED)),
        *(("sft", label, Verdict.REJECTED) for label in sorted(TRUNCATED)),
        *(("sft", label, Verdict.FAILED) for label in sorted(FAILURES)),
    ],
)
def test_the_purpose_says_which_labels_reject(purpose: str, label: str, expected: Verdict) -> None:
    assert verdict([label], 100, 2.0, True, Rules(REJECT_FOR[purpose])) is expected


def test_thresholds_judge_stored_measurements_anew() -> None:
    stored = ("empty_reasoning", "repetition", "truncated_in_answer")
    lenient = Rules(min_reasoning_tokens=5, max_repetition=50.0)
    strict = Rules(min_reasoning_tokens=11, max_repetition=2.0)
    assert judge.effective_labels(stored, 10, 9.0, True, lenient) == ("truncated_in_answer",)
    assert set(judge.effective_labels(("truncated_in_answer",), 10, 9.0, True, strict)) == set(stored)
    assert verdict(stored, 10, 9.0, True, lenient) is Verdict.ACCEPTED
    assert verdict((), 10, 9.0, True, strict) is Verdict.REJECTED


def test_no_thought_is_too_short_even_where_none_is_asked_for() -> None:
    rules = Rules(min_reasoning_tokens=0)
    assert judge.effective_labels((), 0, 0.0, True, rules) == ("empty_reasoning",)
    assert judge.effective_labels((), 0, 0.0, False, rules) == ()


def test_a_failed_record_stays_failed_under_any_rules() -> None:
    rules = Rules(reject=frozenset(), min_reasoning_tokens=0)
    assert verdict(("aborted",), 0, 0.0, True, rules) is Verdict.FAILED
    assert judge.effective_labels(("aborted",), 0, 0.0, True, rules) == ("aborted",)

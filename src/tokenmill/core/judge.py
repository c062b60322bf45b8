"""What a completion is worth. Labels and measurements are facts; the verdict is a pure function of them and the rules.

Two labels depend on thresholds, `empty_reasoning` and `repetition`: they are computed anew from the record's
measurements whenever a verdict is asked for, so that [judge] may change in mid-run without generating anything again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from tokenmill.core.agree import disagree
from tokenmill.core.loops import repetition
from tokenmill.core.records import FAILURES, NULL, Completion, Parts, count_commas

OPEN, CLOSE = "<think>", "</think>"
_OPEN, _CLOSE, _EITHER = OPEN.encode(), CLOSE.encode(), b"think>"

MAX_REPLACEMENTS = 4
"""U+FFFD in one completion: a cut in mid-character gives one, bytes that were never text give many."""

CHARS = 4
"""Of a token, where a server gives neither ids nor a count: so many in English, fewer in most other languages."""

THRESHOLD_LABELS = frozenset({"empty_reasoning", "repetition"})

BROKEN = frozenset(
    {
        "empty",
        "empty_reasoning",
        "empty_answer",
        "repetition",
        "orphan_think_tag",
        "missing_end_token",
        "foreign_mode",
        "bad_text",
        "ids_disagree",
        "short_mask",
    }
)
TRUNCATED = frozenset({"truncated_in_thinking", "truncated_in_answer"})

GROUPS: Mapping[str, frozenset[str]] = {"truncated": TRUNCATED}
"""Words for several labels at once, wherever a person names labels."""

REJECT_FOR: dict[str, frozenset[str]] = {"drafter": BROKEN, "sft": BROKEN | TRUNCATED}
"""A cut-off completion is valid on-policy text for a drafter, and a bad example for fine-tuning."""


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Rules:
    """[judge]: which labels reject, and the two thresholds (tokens; zlib ratio)."""

    reject: frozenset[str] = BROKEN
    min_reasoning_tokens: int = 16
    max_repetition: float = 8.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a completion's ids and tags.

    `opened` says whether the prompt already holds the opening think tag (Qwen3.5 and later), None where nobody knows;
    `shut`, whether it holds an empty think block (thinking is off). `end_ids` are the end tokens, `close_id` the one
    token of `</think>` and `never` those that no output holds (pad, mask), as decimal digits, empty where unknown.
    """

    thinking: bool
    opened: bool | None = None
    end_ids: frozenset[bytes] = frozenset()
    close_id: bytes = b""
    shut: bool = False
    never: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    parts: Parts
    reasoning_tokens: int
    repetition: float
    labels: tuple[str, ...]


def split(text: str, finish_reason: str, reading: Reading, close: int | None = None) -> Parts:
    """Finds thought and answer in an output. A thought without its closing tag takes all of the rest.

    `close` is where its first closing tag begins, -1 where it has none, for who knows it already."""
    if close is None:
        close = text.find(CLOSE)
    start, end = 0, len(text)
    while start < end and text[start].isspace():
        start += 1
    wrote_open = text.startswith(OPEN, start)
    if wrote_open:
        start += len(OPEN)
    if close >= 0:
        return Parts(*_strip(text, start if wrote_open else 0, close), *_strip(text, close + len(CLOSE), len(text)))
    in_thought = wrote_open or reading.opened or (reading.thinking and _cut_before_any_tag(finish_reason, reading))
    if in_thought:
        return Parts(*_strip(text, start, len(text)), len(text), len(text))
    return Parts(0, 0, *_strip(text, 0, len(text)))


def _cut_before_any_tag(finish_reason: str, reading: Reading) -> bool:
    return reading.opened is None and finish_reason == "length"


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    """The bounds without white space; by the character, since a long text takes long to copy."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return (start, end)


def measure(completion: Completion, reading: Reading, rules: Rules) -> Measured:
    """All that a single completion shows. `completion.finish_reason` must be stop or length."""
    text, finish = completion.text, completion.finish_reason
    raw = _as_bytes(text)  # searching bytes takes a tenth of searching a text that holds an emoji
    tags = _look_for_tags(raw)
    parts = split(text, finish, reading, _close_in(text, raw, tags.first_close))
    reasoning_tokens = _reasoning_tokens(completion, parts, reading)
    ratio = repetition(text, raw, parts)
    cut_in_thought = finish == "length" and _unclosed(text, parts)
    facts = [
        label
        for label, holds in (
            ("empty", parts.a == parts.b and parts.c == parts.d),
            ("empty_answer", parts.c == parts.d and finish == "stop"),
            ("truncated_in_thinking", cut_in_thought),
            ("truncated_in_answer", finish == "length" and not cut_in_thought),
            ("orphan_think_tag", _orphan_tag(raw, tags, finish, parts)),
            ("missing_end_token", finish == "stop" and _lacks_end(completion.output_ids, reading.end_ids)),
            ("foreign_mode", not reading.thinking and _thinks(raw, tags, parts, reading)),
            ("bad_text", completion.damaged or _is_bad_text(raw)),
            ("ids_disagree", disagree(completion, reading.never)),
        )
        if holds
    ]
    labels = effective_labels(facts, reasoning_tokens, ratio, reading.thinking, rules)
    return Measured(parts, reasoning_tokens, ratio, labels)


def _as_bytes(text: str) -> bytes:
    """A text in UTF-8. By way of msgspec the text keeps a copy, so that the record's JSON need not make one more."""
    try:
        return bytes(msgspec.Raw(text))
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


class _Tags(NamedTuple):
    """The think tags of a text: where its first closing one begins, in bytes, -1 where there is none; how many."""

    first_close: int
    closing: int
    opening: int


_NO_TAGS = _Tags(-1, 0, 0)


def _look_for_tags(raw: bytes) -> _Tags:
    """One look at the whole text where it holds no more than one tag, as nearly all do."""
    first = raw.find(_EITHER)
    if first < 0:
        return _NO_TAGS
    if raw.find(_EITHER, first + len(_EITHER)) < 0:
        begins = first + len(_EITHER) - len(_CLOSE)
        if raw.startswith(_CLOSE, max(begins, 0)):
            return _Tags(begins, 1, 0)
        return _Tags(-1, 0, int(raw.startswith(_OPEN, max(begins + 1, 0))))
    return _Tags(raw.find(_CLOSE), raw.count(_CLOSE), raw.count(_OPEN))  # "rethink>" is no tag


def _close_in(text: str, raw: bytes, at: int) -> int:
    """Where the first closing tag begins in characters, told where it does in bytes: before it, no more bytes are
    further ones of a character than there are in all."""
    return at if at < 0 or len(raw) == len(text) else text.find(CLOSE, max(0, at - (len(raw) - len(text))))


def _unclosed(text: str, parts: Parts) -> bool:
    return parts.b > parts.a and parts.c == len(text) and not text.endswith(CLOSE) and CLOSE not in text[parts.b :]


def _orphan_tag(raw: bytes, tags: _Tags, finish: str, parts: Parts) -> bool:
    """Not one pair of think tags: a second closing one, an opening one inside, or a thought never closed."""
    wrote_open = raw.lstrip().startswith(_OPEN)
    unclosed = tags.closing == 0 and (wrote_open or parts.b > parts.a)
    return tags.closing > 1 or tags.opening > wrote_open or (finish == "stop" and unclosed)


def _thinks(raw: bytes, tags: _Tags, parts: Parts, reading: Reading) -> bool:
    """A trace of a thought. An empty block is one where the prompt holds one already; where it does not, it is how a
    model says that it will not think."""
    if parts.b > parts.a:
        return True
    return reading.shut if raw.lstrip().startswith(_OPEN) else tags.closing > 0


def _is_bad_text(raw: bytes) -> bool:
    return b"\0" in raw or (b"\xef" in raw and raw.count(b"\xef\xbf\xbd") > MAX_REPLACEMENTS)


def _lacks_end(ids: msgspec.Raw, end_ids: frozenset[bytes]) -> bool:
    if not end_ids or ids == NULL:
        return False
    raw = bytes(ids)
    return raw[max(raw.rfind(b","), 0) + 1 : -1] not in end_ids


def _reasoning_tokens(completion: Completion, parts: Parts, reading: Reading) -> int:
    if parts.b <= parts.a:
        return 0
    if completion.reasoning_tokens is not None:
        return completion.reasoning_tokens
    raw = bytes(completion.output_ids)
    if reading.close_id and raw != b"null":
        at = raw.find(b"," + reading.close_id + b",")
        if at >= 0:
            return count_commas(raw[:at]) + 1
        if parts.c == len(completion.text):
            return completion.output_tokens
    tokens = completion.output_tokens or len(completion.text) / CHARS
    return round(tokens * (parts.b - parts.a) / max(1, len(completion.text)))


def effective_labels(
    labels: Sequence[str], reasoning_tokens: int, ratio: float, thinking: bool, rules: Rules
) -> tuple[str, ...]:
    """The labels with the two threshold ones computed anew under these rules."""
    if not FAILURES.isdisjoint(labels):
        return tuple(labels)
    kept = [label for label in labels if label not in THRESHOLD_LABELS]
    if thinking and (reasoning_tokens == 0 or reasoning_tokens < rules.min_reasoning_tokens):
        kept.append("empty_reasoning")
    if ratio > rules.max_repetition:
        kept.append("repetition")
    return tuple(kept)


def verdict(effective: tuple[str, ...], rules: Rules) -> Verdict:
    """Accepted, rejected or failed, by labels that are effective under these rules."""
    if not FAILURES.isdisjoint(effective):
        return Verdict.FAILED
    return Verdict.ACCEPTED if rules.reject.isdisjoint(effective) else Verdict.REJECTED


class Stored(Protocol):
    """What was stored of a completion: a record or a brief of it."""

    @property
    def labels(self) -> Sequence[str]: ...
    @property
    def reasoning_tokens(self) -> int: ...
    @property
    def repetition(self) -> float: ...
    @property
    def thinking(self) -> bool: ...


def judged(stored: Stored, rules: Rules) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict under these rules, and the labels that led to it."""
    long_enough = not stored.thinking or stored.reasoning_tokens >= max(rules.min_reasoning_tokens, 1)
    if not stored.labels and long_enough and stored.repetition <= rules.max_repetition:
        return Verdict.ACCEPTED, ()  # nearly all are, and a start asks it of each
    labels = effective_labels(stored.labels, stored.reasoning_tokens, stored.repetition, stored.thinking, rules)
    return verdict(labels, rules), labels

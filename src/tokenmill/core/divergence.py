"""Where two lists of token ids part, and of what kind that is. Pure: ids and a decoder in, a place and a word out.

One list is what an engine read or wrote, the other what a tokenizer makes of the same text. That they differ is no
fault of either: a model may write `what` as two tokens where a tokenizer takes one. Other text is another matter.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from tokenmill.core.judge import CLOSE, OPEN

Ids = Sequence[int]
Decode = Callable[[Ids], str]
"""Ids as text, special tokens included."""

WINDOW = 64
"""Tokens behind the place that are looked at: the kind shows within a few, and a row may have thousands."""

SHOWN = 40
"""Characters that must agree, white space aside, for it to be all that differs."""

BROKEN = "\ufffd"
"""What a decoder gives for a part of a character."""

MOST_BYTES = 4
"""Tokens that one character may be spread over, in UTF-8."""


class Kind(StrEnum):
    WHITESPACE = "whitespace"
    END_TOKEN = "end token"
    THINK_PREFIX = "think prefix"
    SPLIT = "BPE split"
    OTHER = "template or other text"


class Divergence(NamedTuple):
    """The first place in which two lists differ."""

    at: int
    kind: Kind


def first(one: Ids, other: Ids) -> int | None:
    """The first place where they differ, which may be the end of the shorter one; None where they are equal."""
    if one == other:
        return None
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def classify(one: Ids, other: Ids, decode: Decode, ends: frozenset[int]) -> Divergence | None:
    """The first divergence of two lists of the same type, None where there is none. `ends` are the end tokens."""
    at = first(one, other)
    if at is None:
        return None
    return Divergence(at, _kind(one, other, at, decode, ends))


def _kind(one: Ids, other: Ids, at: int, decode: Decode, ends: frozenset[int]) -> Kind:
    if _without_ends(one, ends) == _without_ends(other, ends):
        return Kind.END_TOKEN
    start = _whole_characters(one, other, at, decode)
    mine, theirs = one[start : start + WINDOW], other[start : start + WINDOW]
    text, its = decode(mine), decode(theirs)
    if _tag(text) != _tag(its):
        return Kind.THINK_PREFIX
    if (same := _same_text(mine, theirs, at - start, decode)) is not None:
        return Kind.SPLIT if same.strip() else Kind.WHITESPACE
    if _only_spaces_differ(text, its):
        return Kind.WHITESPACE
    if (bool(mine) and mine[0] in ends) != (bool(theirs) and theirs[0] in ends):
        return Kind.END_TOKEN
    return Kind.OTHER


def _without_ends(ids: Ids, ends: frozenset[int]) -> Ids:
    stop = len(ids)
    while stop and ids[stop - 1] in ends:
        stop -= 1
    return ids[:stop]


def _whole_characters(one: Ids, other: Ids, at: int, decode: Decode) -> int:
    """The place itself, or one a little in front of it, so that no character is cut in two."""
    for start in range(at, max(-1, at - MOST_BYTES), -1):
        if not any(decode(ids[start : start + MOST_BYTES]).startswith(BROKEN) for ids in (one, other)):
            return start
    return at


def _tag(text: str) -> str:
    """The think tag that a text begins with; empty where it is none."""
    start = text.lstrip()
    return next((tag for tag in (OPEN, CLOSE) if start.startswith(tag)), "")


def _same_text(mine: Ids, theirs: Ids, equal: int, decode: Decode) -> str | None:
    """The text after which both are at the same place again, cut into other tokens; None where their texts differ. The
    first `equal` ids are."""
    i = j = equal + 1
    while i <= len(mine) and j <= len(theirs):
        text, its = decode(mine[:i]), decode(theirs[:j])
        if text == its and not text.endswith(BROKEN):
            return text
        whole, part = (text, its) if len(text) >= len(its) else (its, text)
        if not whole.startswith(part.rstrip(BROKEN)):
            return None
        i, j = (i, j + 1) if len(text) > len(its) else (i + 1, j) if len(its) > len(text) else (i + 1, j + 1)
    return None


def _only_spaces_differ(text: str, its: str) -> bool:
    one, other = "".join(text.split()), "".join(its.split())
    if not one or not other:
        return not one and not other
    length = min(len(one), len(other), SHOWN)
    return one[:length] == other[:length]

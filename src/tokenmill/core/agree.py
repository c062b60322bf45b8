"""Do token ids, text and counts of a completion tell the same? What the ids spell is handed in: this is pure.

Two looks. `disagree` is for every row, and costs a pass over the bytes of the ids. `compare` needs the ids' spelling,
2 to 3 ms of processor time for 7,500 tokens, so a run asks it of some rows (tokens/spelling.py) and an audit of all.

An engine's text is not its ids' spelling byte for byte: special tokens are left out of it, a parser takes tags and the
white space around them away, a character that was cut off at the end is held back. None of these is a disagreement.
"""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from tokenmill.core.records import NULL, Completion, count_commas

MARKS = 64
"""Characters of the spelling that may be missing in the text: a stop string, the tags of a parser that we do not know.
Ids of another answer differ by more, or in what is there."""

CUT = "\ufffd"
"""What an incomplete UTF-8 character is read as."""


_ZERO, _TEN = np.uint8(ord("0")), np.uint8(10)


class Agreement(StrEnum):
    """How a text and its ids' spelling agree, the closest first; OTHER is the only disagreement."""

    EXACT = "exact"
    SPECIALS = "specials"  # but for special tokens
    CUT = "cut"  # … and characters that were cut off, at the end or by a broken token
    SPACES = "spaces"  # … and white space
    MARKS = "marks"  # all of the text is there, in its order, and a few characters more
    OTHER = "other"


def count(ids: msgspec.Raw) -> int | None:
    """How many ids a JSON list holds; None where it is no list of whole numbers without spaces."""
    raw = bytes(ids)
    if raw in (b"null", b"[]"):
        return 0
    if len(raw) < 2 or not (raw.startswith(b"[") and raw.endswith(b"]")):
        return None
    commas = count_commas(raw)
    digits = np.count_nonzero(np.frombuffer(raw, np.uint8) - _ZERO < _TEN)  # what stands before 0 wraps around
    return commas + 1 if commas + int(digits) == len(raw) - 2 else None


def miscounted(ids: msgspec.Raw, told: int) -> bool:
    """Whether an engine told another count than it gave ids. What it did not tell, ids or a count, is not compared;
    what is no list of ids is none of its count."""
    return ids != NULL and (found := count(ids)) != told and (told != 0 or found is None)


def disagree(completion: Completion, never: Sequence[bytes] = ()) -> bool:
    """Whether ids and counts differ, or an id of `never` (pad, mask; as digits) stands before the last one."""
    return (
        miscounted(completion.output_ids, completion.output_tokens)
        or miscounted(completion.prompt_ids, completion.prompt_tokens)
        or holds(completion.output_ids, never)
    )


def holds(ids: msgspec.Raw, never: Iterable[bytes]) -> bool:
    """Whether one of these ids stands before the last one: a model that pads with its end token may end with it."""
    raw = bytes(ids)
    return any(raw.startswith(b"[%b," % one) or b",%b," % one in raw for one in never)


def pattern(specials: Iterable[str]) -> "re.Pattern[str]":
    """What `compare` leaves out of both sides: the special tokens' texts, and the think tags."""
    texts = sorted({*specials, "<think>", "</think>"} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)))


def compare(text: str, spelled: str, specials: "re.Pattern[str]", pieces: Sequence[str] = ()) -> Agreement:
    """How an engine's text agrees with what its output ids spell, special tokens included.

    `pieces` are the text's thought and answer: what a server gave in two fields may have lost more than tags.
    """
    if text == spelled:
        return Agreement.EXACT
    own, ids = specials.sub("", text), specials.sub("", spelled)
    if own == ids:
        return Agreement.SPECIALS
    own, ids = _without_cuts(own), _without_cuts(ids)
    if own == ids:
        return Agreement.CUT
    own, ids = "".join(own.split()), "".join(ids.split())
    if own == ids:
        return Agreement.SPACES
    for found in ((own,), ["".join(_without_cuts(specials.sub("", piece)).split()) for piece in pieces]):
        if any(found) and _stand_in(found, ids):  # nothing at all stands in anything
            return Agreement.MARKS
    return Agreement.OTHER


def _without_cuts(text: str) -> str:
    return text.replace(CUT, "")


def _stand_in(pieces: Sequence[str], spelled: str) -> bool:
    at = 0
    for piece in pieces:
        at = spelled.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return len(spelled) - sum(map(len, pieces)) <= MARKS

"""Is it worth training on? The verdict and its reasons, each a plain sentence with its numbers; pure.

`fail` is given where training would teach something wrong or nothing; `warn` where somebody should look. What cannot be
known of a set is a note, never a guess.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tokenmill.inspecting.measuring import CUTS, SHORT_MASK
from tokenmill.inspecting.tally import Doubles, Example, Tally, is_fault

FAIL_SHARE, WARN_SHARE = 0.2, 0.05
"""Of rows with a fault: what [gate] allows of rejected and of failed ones by default."""

ZERO_SHARE = 0.01
"""Of rows whose mask is all zeros. One is an accident; more have a cause, and a trainer says nothing."""

END_SHARE = 0.005
"""Of rows that stopped and have lost their end token: a model trained on 1 % of them sometimes never stops."""

DOUBLE_FAIL, DOUBLE_WARN = 0.5, 0.05
"""Of rows whose response was there before. Sampled texts of a reasoning model hardly ever repeat; short answers of a
classifying one do, so that only half of a set is beyond doubt."""

MIXED_SHARE = 0.05
"""Of rows in the rarer mode, with thought or without: a drafter for one accepts a third as much in the other
(z-lab/dflash#60), so a mixture should be meant."""

OPEN_SHARE = 0.5
"""Of thoughts that never end: what [gate] allows of truncated ones by default."""

TOP = 32_000
"""The draft vocabulary of EAGLE-3; ids outside of it can never be drafted."""

COVERED = 0.98
"""Of supervised tokens within TOP: each one outside ends a drafted block, and blocks are 4 to 16 tokens long."""

CLIPPED_SHARE = 0.05
"""Of supervised tokens behind a usual maximum length, from which on it is worth a note."""

BOUNDS = (0, 1, 8, 16, 64, 256, 1024, 2048, 4096, 8192, 1 << 30)

MEANING = {
    "bad_row": "cannot be used",
    "empty": "train nothing",
    "empty_reasoning": "have an empty thought, or one of a few words",
    "empty_answer": "have no answer behind the thought",
    "repetition": "end in a loop",
    "orphan_think_tag": "have think tags that do not pair up",
    "missing_end_token": "stopped and have no end token",
    "foreign_mode": "think, though thinking was off",
    "bad_text": "hold bytes that are no text",
    "ids_disagree": "have token ids that do not fit their text or their counts",
    "short_mask": f"train fewer than {SHORT_MASK} tokens",
    "truncated_in_thinking": "are cut off in the thought",
    "truncated_in_answer": "are cut off in the answer",
    "thought_dropped": "have a thought that the chat template leaves out, so that nobody trains it",
}

Level = Literal["pass", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("pass", "warn", "fail")


class Reason(NamedTuple):
    level: Level
    text: str


class Inspection(msgspec.Struct, frozen=True):
    """Token counts as {"p1", "p50", "p99"}, null where no row tells; `supervised_tokens` has a histogram, too.

    `clipped`: by maximum length, the share of supervised tokens behind it, the rows longer than it, and those of them
    that would train fewer than 16 tokens. `duplicates`: rows that repeat an earlier prompt, response, or both.
    """

    rows: int
    labels: dict[str, int]
    supervised_tokens: dict[str, Any] | None
    verdict: Level
    reasons: list[str]
    examples: list[Example]
    notes: list[str]
    shapes: dict[str, int]
    bad_rows: int
    lengths: dict[str, int] | None
    thought_tokens: dict[str, int] | None
    answer_tokens: dict[str, int] | None
    characters: dict[str, int] | None
    thoughts: dict[str, int]
    closed_thoughts: float | None
    clipped: dict[str, dict[str, float]] | None
    duplicates: dict[str, int]
    vocabulary: dict[str, float] | None


def conclude(found: Tally, marked: bool | None) -> Inspection:
    """`marked`: whether the chat template has {% generation %} marks, None where no model was given."""
    doubles = found.doubles()
    vocabulary = _vocabulary(found)
    told = [*reasons(found, marked), *_double_reasons(found, doubles)]
    worst = max((LEVELS.index(reason.level) for reason in told), default=0)
    told.sort(key=lambda reason: -LEVELS.index(reason.level))
    thoughts = found.thoughts["closed"] + found.thoughts["open"] + found.thoughts["empty"]
    clipped = _clipped(found)
    return Inspection(
        rows=found.rows,
        labels=dict(found.labels.most_common()),
        supervised_tokens=_spread(found.supervised),
        verdict=LEVELS[worst],
        reasons=[reason.text for reason in told],
        examples=found.examples,
        notes=[*_notes(found, clipped, vocabulary, marked)],
        shapes=dict(found.shapes),
        bad_rows=found.labels["bad_row"],
        lengths=percentiles(found.lengths),
        thought_tokens=percentiles(found.thought_tokens),
        answer_tokens=percentiles(found.answer_tokens),
        characters=percentiles(found.characters),
        thoughts={str(kind): rows for kind, rows in found.thoughts.items()},
        closed_thoughts=round(found.thoughts["closed"] / thoughts, 4) if thoughts else None,
        clipped=clipped,
        duplicates={"prompts": doubles.prompts, "responses": doubles.responses, "rows": doubles.rows},
        vocabulary=vocabulary,
    )


# -- reasons -----------------------------------------------------------------------------------------------------------
def reasons(found: Tally, marked: bool | None) -> Iterator[Reason]:
    """All but duplicates; the worst first, as far as they stand alone."""
    yield from _masks(found, marked)
    share = found.bad / max(1, found.rows)
    if share > WARN_SHARE:
        level: Level = "fail" if share > FAIL_SHARE else "warn"
        for label, count in found.labels.most_common():
            if is_fault(label, found.rules) and label != "missing_end_token":
                yield Reason(level, f"{_of(count, found.rows)} {MEANING.get(label, 'are')} ({label})")
    yield from _thought_reasons(found)
    lost, stopped = found.labels["missing_end_token"], found.ends[True] + found.labels["missing_end_token"]
    if lost / max(1, stopped) > END_SHARE:
        yield Reason("fail", f"{lost:,} of {stopped:,} finished rows ({lost / stopped:.1%}) have lost their end token")
    invented = found.labels["invented_end_token"]
    if invented > WARN_SHARE * found.rows:
        text = "were cut off, and the chat template gives them an end token that the model never wrote"
        yield Reason("warn", f"{_of(invented, found.rows)} {text}")


def _masks(found: Tally, marked: bool | None) -> Iterator[Reason]:
    known = found.supervised.total()
    if not known:
        return
    zeros = found.supervised[0]
    if zeros > ZERO_SHARE * known:
        yield Reason("fail", f"{_of(zeros, known)} have a mask of zeros: {_zero_cause(zeros == known, marked)}")
    value, count = max(((v, n) for v, n in found.supervised.items() if v), key=lambda pair: pair[1], default=(0, 0))
    if 0 < value < SHORT_MASK and count > FAIL_SHARE * known:
        yield Reason(
            "fail",
            f"{count / known:.0%} of the rows train exactly {value} tokens: an empty think block, a word and the end "
            "token are that few, so thinking was off, or its switch was ignored, when they were generated",
        )
    if found.whole > WARN_SHARE * known:
        yield Reason("warn", f"{_of(found.whole, known)} train every token, the prompt's too")


def _zero_cause(all_of_them: bool, marked: bool | None) -> str:
    if marked is True:
        return "the model's chat template has generation marks, so a cut to a maximum length may have taken the answers"
    cause = "a mask made by the {% generation %} marks of a chat template that has none is all zeros, without an error"
    if marked is False:
        return f"this model's chat template has no generation marks, and {cause}"
    return cause if all_of_them else f"{cause}; or a cut to a maximum length took the answers"


def _thought_reasons(found: Tally) -> Iterator[Reason]:
    kinds = found.thoughts
    thinking = kinds["closed"] + kinds["open"] + kinds["empty"]
    total = thinking + kinds["none"]
    if total and min(thinking, kinds["none"]) > MIXED_SHARE * total:
        yield Reason(
            "warn",
            f"{thinking:,} rows think and {kinds['none']:,} do not: a drafter for one mode is poor in the other, so "
            "mix them on purpose only",
        )
    if kinds["open"] > OPEN_SHARE * max(1, thinking):
        yield Reason("warn", f"{kinds['open']:,} of {thinking:,} thoughts never end: max_tokens was too small")
    earlier = found.labels["thought_in_history"]
    if earlier > WARN_SHARE * found.rows:
        text = "hold a thought in an earlier turn, which chat templates drop: make each answer a row of its own"
        yield Reason("warn", f"{_of(earlier, found.rows)} {text}, of which the last turn alone is trained")


def _double_reasons(found: Tally, doubles: Doubles) -> Iterator[Reason]:
    share = doubles.responses / max(1, found.rows)
    if share > DOUBLE_WARN:
        most = f"; the most frequent one is there {doubles.most:,} times"
        level: Level = "fail" if share > DOUBLE_FAIL else "warn"
        yield Reason(level, f"{_of(doubles.responses, found.rows)} have a response that was there before{most}")
    if doubles.rows > DOUBLE_WARN * found.rows:
        yield Reason("warn", f"{_of(doubles.rows, found.rows)} repeat an earlier row, prompt and response")


def _of(count: int, rows: int) -> str:
    return f"{count:,} of {rows:,} rows ({count / rows:.1%})"


# -- notes and figures -------------------------------------------------------------------------------------------------
def _notes(
    found: Tally,
    clipped: dict[str, dict[str, float]] | None,
    vocabulary: dict[str, float] | None,
    marked: bool | None,
) -> Iterator[str]:
    for cut, figures in (clipped or {}).items():
        if figures["tokens"] > CLIPPED_SHARE:
            yield (
                f"a trainer with a maximum length of {int(cut):,} clips {figures['tokens']:.0%} of the supervised "
                f"tokens; {figures['rows_emptied']:,} rows would train fewer than {SHORT_MASK}"
            )
    if vocabulary and vocabulary["top_32k"] < COVERED:
        yield (
            f"the {TOP:,} most frequent tokens cover {vocabulary['top_32k']:.1%} of the supervised ones: a reduced "
            "draft vocabulary would never draft the rest"
        )
    if found.ends[False]:
        count = found.ends[False]
        yield f"{_of(count, found.ends.total())} do not end with an end token: cut off, or it was lost"
    if marked is None and found.shapes["tokens"]:
        yield "thoughts, loops and end tokens inside token ids are not known without a tokenizer: --model PATH"
    if marked is None and found.shapes["conversation"]:
        yield "what is supervised of conversations, and how many tokens, is not known without a tokenizer: --model PATH"
    if marked is False and found.shapes["conversation"]:
        yield (
            "the model's chat template has no {% generation %} marks: trainers that make the mask by them (TRL's "
            "assistant_only_loss) would train nothing; here the mask is what follows the prompt"
        )


def percentiles(counts: Counter[int]) -> dict[str, int] | None:
    """p1, p50 and p99 of values by how often they are there; None where there are none."""
    if not counts:
        return None
    values = np.array(sorted(counts), dtype=np.int64)
    ranks = np.cumsum([counts[int(value)] for value in values])
    at = [int(np.searchsorted(ranks, share * ranks[-1])) for share in (0.01, 0.5, 0.99)]
    return dict(zip(("p1", "p50", "p99"), (int(values[place]) for place in at), strict=True))


def _spread(counts: Counter[int]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = percentiles(counts)
    if found is None:
        return None
    bins = np.histogram(list(counts.keys()), BOUNDS, weights=list(counts.values()))[0].tolist()
    names = [f"{low}-{high - 1}" for low, high in pairwise(BOUNDS[:-1])]
    found["histogram"] = dict(zip([*names, f"{BOUNDS[-2]}-"], map(int, bins), strict=True))
    return found


def _clipped(found: Tally) -> dict[str, dict[str, float]] | None:
    if not found.lengths:
        return None
    supervised = sum(value * rows for value, rows in found.supervised.items())
    return {
        str(cut): {"tokens": round(behind / max(1, supervised), 4), "rows": rows, "rows_emptied": emptied}
        for cut, behind, rows, emptied in zip(CUTS, found.beyond, found.cut, found.emptied, strict=True)
    }


def _vocabulary(found: Tally) -> dict[str, float] | None:
    counts = found.vocabulary.counts()
    total = int(counts.sum())
    if not total:
        return None
    top = np.sort(counts)[-TOP:]
    return {"tokens": total, "distinct": int(np.count_nonzero(counts)), "top_32k": round(int(top.sum()) / total, 4)}

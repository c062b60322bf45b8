"""What one row shows: labels, counts, hashes, an example for people. Pure but for the tokenizer.

Where there is text, it is judged by the same rules as in a run. Without a tokenizer the text of token ids is not known,
and the tokens of a text are not, either: such counts are None, never guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
import xxhash

from tokenmill.core import judge
from tokenmill.core.judge import CLOSE, OPEN, Reading, Rules, Verdict
from tokenmill.core.records import NULL, Completion, Record
from tokenmill.engines.base import text_of_fields
from tokenmill.errors import PluginError
from tokenmill.inspecting.shapes import MAX_ID, Bad, Ids, Shape, Talk, Tokens, numbers
from tokenmill.inspecting.trainer import Output, Trainer

SHORT_MASK = 16
"""Supervised tokens below which a row teaches next to nothing: an empty thought, "OK." and the end token are 6."""

CUTS = (2048, 4096, 8192)
"""The maximum lengths of usual recipes: SpecForge's 2,048 to 4,096, speculators' 8,192. Trainers cut at the right."""

EXAMPLE_CHARS = 300

Thought = Literal["closed", "open", "empty", "none"]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One row. Counts are in tokens, None where nobody knows; hashes are None where there is nothing to compare.

    `beyond` are the supervised tokens behind each of CUTS; `ended` says whether the last
    supervised token is an end token, `whole` that all tokens are supervised, the prompt's too.
    """

    name: str
    shape: Literal["tokens", "conversation", "record", "bad"]
    labels: tuple[str, ...] = ()
    shown: str = ""
    length: int | None = None
    supervised: int | None = None
    thought_tokens: int | None = None
    answer_tokens: int | None = None
    characters: int | None = None
    beyond: tuple[int, ...] = ()
    prompt: int | None = None
    response: int | None = None
    thought: Thought | None = None
    ids: Ids | None = None
    ended: bool | None = None
    whole: bool = False


def measure(rows: Sequence[Shape], rules: Rules, trainer: Trainer | None) -> list[Found]:
    """Some rows, in their order. Without a trainer, what only a tokenizer can tell is left open."""
    talks = [row for row in rows if isinstance(row, Talk) and _can_be_rendered(row)] if trainer else []
    made = iter(trainer.tokens(talks) if trainer and talks else ())
    found = []
    for row in rows:
        if isinstance(row, Talk):
            found.append(
                _trained(row, *next(made), rules, trainer) if trainer and _can_be_rendered(row) else _talk(row, rules)
            )
        else:
            found.append(_tokens(row, rules, trainer) if isinstance(row, Tokens) else _bad(row))
    return found


def _can_be_rendered(row: Talk) -> bool:
    """A conversation without its prompt cannot, and what has been rendered must not be rendered again."""
    return bool(row.turns[:-1]) and not row.rendered


def _trained(row: Talk, made: Tokens | Bad, kept: bool, rules: Rules, trainer: Trainer) -> Found:
    """A conversation as a trainer renders it; `kept`: with its thought."""
    if isinstance(made, Bad):
        return _bad(made)
    found = _tokens(made, rules, trainer, shape="conversation")
    extra = [*(["thought_in_history"] if row.earlier else []), *([] if kept else ["thought_dropped"])]
    return replace(found, labels=(*extra, *found.labels)) if extra else found


def _bad(row: Bad) -> Found:
    start = row.data[:EXAMPLE_CHARS].decode("utf-8", "replace")
    return Found(row.name, "bad", ("bad_row",), f"{row.why}; {start}" if start else row.why)


# -- token ids ---------------------------------------------------------------------------------------------------------
def _tokens(
    row: Tokens, rules: Rules, trainer: Trainer | None, shape: Literal["tokens", "conversation"] = "tokens"
) -> Found:
    ids = row.ids[row.mask]
    length, supervised = len(row.ids), len(ids)
    first = int(row.mask.argmax()) if supervised else length
    if trainer is not None and supervised:
        try:
            output = trainer.output(row)
        except PluginError as error:
            return _bad(Bad(row.name, str(error)))
    else:
        output = None
    labels, thought = _judge_output(row, output, rules) if output else ((), None)
    if supervised < SHORT_MASK:
        labels = ("short_mask" if supervised else "empty", *labels)
    return Found(
        row.name,
        shape,
        labels,
        _shown(row, output, ids),
        length=length,
        supervised=supervised,
        thought_tokens=output.thought_tokens if output else None,
        answer_tokens=output.tokens - (output.thought_tokens or 0) if output else None,
        beyond=tuple(int(np.count_nonzero(row.mask[cut:])) if length > cut else 0 for cut in CUTS),
        prompt=_hash(row.ids[:first].tobytes()) if first else None,
        response=_hash(ids.tobytes()) if supervised else None,
        thought=thought,
        ids=ids,
        ended=output.ended if output else None,
        whole=supervised == length > 0,
    )


def _judge_output(row: Tokens, output: Output, rules: Rules) -> tuple[tuple[str, ...], Thought]:
    """The text behind the mask. Without a finish_reason, one without an end token was cut off."""
    finish = row.finish if row.finish in ("stop", "length") else "stop" if output.ended or output.lost else "length"
    thinking = output.opened or OPEN in output.text or CLOSE in output.text
    completion = Completion(output.text, finish, output_tokens=output.tokens, reasoning_tokens=_within(output))
    measured = judge.measure(completion, Reading(thinking, output.opened), rules)
    labels = list(measured.labels)
    if finish == "stop" and not output.ended:
        labels.append("missing_end_token")
    if row.finish == "length" and output.ended:
        labels.append("invented_end_token")
    return tuple(labels), _thought(output.text, thinking, measured.parts.b > measured.parts.a)


def _within(output: Output) -> int | None:
    """The tokens of a thought that is closed and not blank."""
    if output.thought_tokens is None or not output.text.split(CLOSE)[0].removeprefix(OPEN).strip():
        return None
    return output.thought_tokens


def _thought(text: str, thinking: bool, filled: bool) -> Thought:
    if not thinking:
        return "none"
    if not filled:
        return "empty"
    return "closed" if CLOSE in text else "open"


def _shown(row: Tokens, output: Output | None, ids: Ids) -> str:
    if output is not None:
        return output.text
    told = f"{len(ids):,} supervised tokens of {len(row.ids):,}: {ids[: EXAMPLE_CHARS // 6].tolist()}"
    return f"{told} {row.text}" if row.text else told


# -- conversations -----------------------------------------------------------------------------------------------------
def _talk(row: Talk, rules: Rules) -> Found:
    finish = "length" if row.finish == "length" else "stop"
    text = text_of_fields(row.thought or "", row.content, finish)
    thinking = row.thought is not None or OPEN in text or CLOSE in text
    # Without a tokenizer a token is taken for four bytes: enough to tell an empty thought from a short one.
    completion = Completion(text, finish, output_tokens=row.tokens or len(text.encode("utf-8", "replace")) // 4)
    measured = judge.measure(completion, Reading(thinking, opened=None), rules)
    return Found(
        row.name,
        "conversation",
        (*(["thought_in_history"] if row.earlier else []), *measured.labels),
        text,
        supervised=row.tokens,
        characters=len(text),
        prompt=_hash(msgspec.json.encode(row.turns[:-1])) if row.turns[:-1] else None,
        response=_hash(text.encode("utf-8", "replace")) if text else None,
        thought=_thought(text, thinking, measured.parts.b > measured.parts.a) if text else None,
    )


# -- records of ours ---------------------------------------------------------------------------------------------------
def measure_record(record: Record, rules: Rules) -> Found:
    """A run's record. It holds facts; labels are computed anew by these rules."""
    verdict, labels = judge.judged(record, rules)
    if verdict is Verdict.FAILED:
        return Found(record.key, "record", labels, record.error)
    length = record.prompt_tokens + record.output_tokens
    found = None if record.output_ids == NULL else numbers(bytes(record.output_ids))
    if found is not None and len(found) and not 0 <= int(found.min()) <= int(found.max()) < MAX_ID:
        labels, found = (*labels, "ids_disagree"), None
    thinking = record.thinking or CLOSE in record.text
    return Found(
        record.key,
        "record",
        labels,
        record.text,
        length=length,
        supervised=record.output_tokens,
        thought_tokens=record.reasoning_tokens if thinking else None,
        answer_tokens=record.output_tokens - (record.reasoning_tokens if thinking else 0),
        beyond=tuple(min(record.output_tokens, max(0, length - cut)) for cut in CUTS),
        prompt=_hash(bytes(record.messages)) if record.sample == 0 else None,
        response=_hash(record.text.encode("utf-8", "replace")) if record.text else None,
        thought=_thought(record.text, thinking, bool(record.reasoning)) if record.text else None,
        ids=None if found is None else found.astype(np.int32),
    )


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)

"""What a canary's completions prove of token ids: that they are those of the prompt, of the text, and of the exports.

Ids that are another prompt's or another text's would be trained on as if they were right, so such a server is not used.
What is only odd, such as a count that is off by one, is told.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tokenmill.client import Client
from tokenmill.core import agree, judge
from tokenmill.core.agree import Agreement
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import NULL, Completion, Record, count_ids
from tokenmill.core.server import Failure, FailureKind
from tokenmill.engines.base import Rendered
from tokenmill.formats.base import talk, tokens
from tokenmill.render import Renderer
from tokenmill.tokens.spelling import agreement

LOOKED_AT = 8
"""Completions whose ids are spelled: what is wrong with a server's ids is wrong with most of them."""

NO_IDS = (
    "it gives no token ids: rows are stored as text, without ids, and exports of ids leave them out "
    "(or make them from the text, with --retokenise)"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One canary completion, and what was sent for it."""

    rendered: Rendered
    completion: Completion


@dataclass(frozen=True, slots=True)
class Proof:
    """`failure` is why this server's ids cannot be used; `warnings` are for a person."""

    failure: Failure | None = None
    warnings: tuple[str, ...] = ()


async def prove(answers: Sequence[Asked], reading: Reading, renderer: Renderer, client: Client) -> Proof:
    """Where nobody can spell ids, all but their spelling."""
    if all(answer.completion.output_ids == NULL for answer in answers):
        return Proof(warnings=(NO_IDS,))
    if (wrong := _other_prompt(answers)) is not None:
        return Proof(wrong)
    looked_at = [answer for answer in answers if answer.completion.output_ids != NULL][:LOOKED_AT]
    records = [_record(answer, reading) for answer in looked_at]
    found = [
        await agreement(answer.completion, record.parts, renderer, client)
        for answer, record in zip(looked_at, records, strict=True)
    ]
    others = [record for record, how in zip(records, found, strict=True) if how is Agreement.OTHER]
    warnings = [*_odd(answers, reading), *_masks(records)]
    if others:
        words = f"the output ids of {len(others)} of {len(looked_at)} canary completions do not spell their text"
        shown = f"text {others[0].text[:120]!r}, ids {bytes(others[0].output_ids)[:80].decode()}"
        if len(others) * 2 > len(looked_at):
            fix = "is the tokenizer in model.path the server's own? does a proxy or a parser change the text?"
            return Proof(Failure(FailureKind.CONFIG, words, fix, (shown,)))
        warnings.append(f"{words}: {shown}")
    ended = [record for record in records if record.finish_reason == "stop"]
    if lost := renderer.lost_by_conversations([(talk(one), one.reasoning, one.answer) for one in ended]):
        warnings.append(lost)
    return Proof(warnings=tuple(warnings))


def _other_prompt(answers: Sequence[Asked]) -> Failure | None:
    """A server that reads another prompt than it was sent."""
    for answer in answers:
        sent, read = answer.rendered.ids, answer.completion.prompt_ids
        if NULL not in (sent, read) and bytes(sent) != bytes(read):
            words = f"it was sent a prompt of {count_ids(sent)} ids and says that it read {count_ids(read)} others"
            lines = (f"sent {bytes(sent)[:80].decode()}", f"read {bytes(read)[:80].decode()}")
            return Failure(FailureKind.CONFIG, words, "does it add tokens of its own, or cut prompts?", lines)
    return None


def _odd(answers: Sequence[Asked], reading: Reading) -> Iterator[str]:
    """Counts that are off, ids that no output holds."""
    for what, pairs in (
        ("output", [(one.completion.output_ids, one.completion.output_tokens) for one in answers]),
        ("prompt", [(_prompt_ids(one), one.completion.prompt_tokens) for one in answers]),
    ):
        wrong = [(count_ids(ids), told) for ids, told in pairs if agree.miscounted(ids, told)]
        if wrong:
            yield f"{len(wrong)} of {len(pairs)} have other {what} ids than it counts: {wrong[0][0]}, not {wrong[0][1]}"
    holding = sum(agree.holds(one.completion.output_ids, reading.never) for one in answers)
    if holding:
        yield f"{holding} of {len(answers)} hold padding or a mask inside the output"


def _masks(records: Sequence[Record]) -> Iterator[str]:
    """What the exports would mark as the engine's own: all of the output, its end token last, and nothing else."""
    others = sum(_marked(record) != msgspec.json.decode(record.output_ids, type=list[int]) for record in records)
    if others:
        yield f"the loss mask of exports covers other tokens than the output in {others} of {len(records)}"
    ended = [record for record in records if record.finish_reason == "stop"]
    endless = sum("missing_end_token" in record.labels for record in ended)
    if endless:
        yield f"{endless} of {len(ended)} that ended by themselves have no end token, so none would be trained"


def _marked(record: Record) -> list[int]:
    ids, mask = (msgspec.json.decode(raw, type=list[int]) for raw in tokens(record))
    return [number for number, on in zip(ids, mask, strict=True) if on]


def _prompt_ids(answer: Asked) -> msgspec.Raw:
    return answer.rendered.ids if answer.rendered.ids != NULL else answer.completion.prompt_ids


def _record(answer: Asked, reading: Reading) -> Record:
    """As it would be stored."""
    completion = answer.completion
    measured = judge.measure(completion, reading, Rules(min_reasoning_tokens=1))
    return Record(
        key="canary",
        sample=0,
        turn=0,
        row=0,
        cohort=0,
        digest="",
        settings="",
        messages=answer.rendered.messages,
        tools=answer.rendered.tools,
        prompt_ids=_prompt_ids(answer),
        output_ids=completion.output_ids,
        text=completion.text,
        parts=measured.parts,
        finish_reason=completion.finish_reason,
        prompt_tokens=completion.prompt_tokens,
        output_tokens=completion.output_tokens,
        thinking=reading.thinking,
        labels=measured.labels,
    )

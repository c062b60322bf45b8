"""A few completions to look at: of each kind of bad one, and good ones. Thought and answer apart."""

from collections.abc import Sequence

import msgspec
import numpy as np

from tokenmill import dataset
from tokenmill.core import judge
from tokenmill.core.judge import Verdict
from tokenmill.core.records import NULL, Record
from tokenmill.dataset import Id, turns
from tokenmill.reporting.gather import Gathered
from tokenmill.untrusted import cut

KINDS, OF_A_KIND = 14, 2
"""Sets of labels, the most frequent ones, and records of each: what a person looks at, no more."""

CHARS = 2200
"""Of a text: a page of it."""

TURNS = 2
"""The last of a prompt that are shown."""


class Example(msgspec.Struct, frozen=True):
    """Texts are cut in their middle where they are long; `prompt` are role and content of the last turns."""

    key: str
    sample: int
    turn: int
    verdict: str
    labels: list[str]
    server: str
    finish_reason: str
    thought_tokens: int
    output_tokens: int
    prompt: list[tuple[str, str]]
    thought: str
    answer: str
    error: str


class Kind(msgspec.Struct, frozen=True):
    """Records with just these labels: how many there are, and a few of them."""

    labels: list[str]
    verdict: str
    count: int
    examples: list[Example]


def kinds(found: Gathered) -> tuple[list[Kind], bool | None]:
    """Bad ones first, the most frequent first; and whether good records have token ids, None where there are none."""
    per = np.bincount(found.columns.label_set, minlength=len(found.columns.labels)).tolist()
    counted = dict(zip(found.columns.labels, per, strict=True))
    order = sorted(counted, key=lambda labels: (not labels, -counted[labels]))
    chosen = [*[labels for labels in order if labels][:KINDS], *[labels for labels in order if not labels]]
    wanted: dict[tuple[str, ...], Sequence[Id]] = {
        labels: found.columns.shown[labels][: OF_A_KIND + (not labels)] for labels in chosen
    }
    ids = {identity for each in wanted.values() for identity in each}
    whole = dataset.picked(found.folder.data, lambda *own: own in ids, found.harmed) if ids else {}
    rows = []
    for labels, each in wanted.items():
        records = [whole[identity] for identity in each if identity in whole]
        verdict = judge.verdict(labels, found.rules)
        rows.append(Kind(list(labels), verdict, counted[labels], [_example(one, verdict, labels) for one in records]))
    rows.sort(key=lambda kind: [Verdict.REJECTED, Verdict.FAILED, Verdict.ACCEPTED].index(Verdict(kind.verdict)))
    good = [record.output_ids != NULL for record in whole.values() if record.output_tokens]
    return rows, all(good) if good else None


def _example(record: Record, verdict: Verdict, labels: Sequence[str]) -> Example:
    return Example(
        key=record.key,
        sample=record.sample,
        turn=record.turn,
        verdict=verdict,
        labels=list(labels),
        server=record.server,
        finish_reason=record.finish_reason,
        thought_tokens=record.reasoning_tokens,
        output_tokens=record.output_tokens,
        prompt=[(role, cut(text, CHARS)) for role, text in turns(record)[-TURNS:]],
        thought=cut(record.reasoning, CHARS),
        answer=cut(record.answer, CHARS),
        error=cut(record.error, CHARS),
    )

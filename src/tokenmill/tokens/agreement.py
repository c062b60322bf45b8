"""audit RUN: do the ids that a run recorded agree with their texts, and what would text alone give?

Two questions, kept apart. Whether the output's ids spell the output's text is one of truth: where they do not, what is
trained on is not what was judged (exit code 5). How often rendering and tokenising the text again gives the same ids is
a fact of the model: it says what a trainer of text would train on instead. One pass, a few rows at a time.
"""

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tokenmill import dataset
from tokenmill.core import agree, divergence
from tokenmill.core.agree import Agreement
from tokenmill.core.divergence import Divergence, Kind
from tokenmill.core.records import FAILURES, NULL, Record, record_id
from tokenmill.errors import BrokenError
from tokenmill.folder import RunFolder
from tokenmill.steps import Tell, counted
from tokenmill.tokens.retokenise import Again, Retokeniser

BATCH = 16
"""Rows tokenised at once: enough for every core, and a few megabytes."""

EXAMPLES = 3
"""Of each kind and part."""

BEFORE, BEHIND = 4, 6
"""Tokens that an example shows around the place where two lists part."""

Token = tuple[int, str]


class Example(msgspec.Struct, frozen=True):
    """One divergence: `at` counts in the part's own ids; `recorded` and `again` are tokens around it, id and text."""

    id: str
    part: str
    kind: str
    at: int
    recorded: list[Token]
    again: list[Token]


class Part(msgspec.Struct):
    """Prompts, or outputs: how many were compared, how many came back the same, and how the others begin to differ."""

    compared: int = 0
    exact: int = 0
    kinds: dict[str, int] = {}

    @property
    def share(self) -> float:
        return self.exact / self.compared if self.compared else 0.0


class Contradiction(msgspec.Struct, frozen=True):
    """A row whose output ids spell another text than is stored."""

    id: str
    text: str
    spelled: str


class Audit(msgspec.Struct):
    """What was found. `spelled` counts rows by how ids and text agree (core/agree.py).

    `rows` have a completion; of them `without_ids` lack ids, `without_prompt` cannot be rendered again (`why`: the
    first reason). `counts_differ`, `no_end` (ended by itself, the last id is no end token) and `inside` (padding or a
    mask before the last id) are rows. `verdict` is agree or contradict.
    """

    run: str
    model: str
    rows: int = 0
    without_ids: int = 0
    without_prompt: int = 0
    why: str = ""
    prompt: Part = msgspec.field(default_factory=Part)
    output: Part = msgspec.field(default_factory=Part)
    spelled: dict[str, int] = {}
    counts_differ: int = 0
    no_end: int = 0
    inside: int = 0
    examples: list[Example] = []
    contradictions: list[Contradiction] = []
    verdict: str = "agree"
    seconds: float = 0.0


def audit(folder: RunFolder, model: Path, *, several: bool, sample: int = 0, tell: Tell = lambda text: None) -> Audit:
    """Compares a run's completions, or `sample` of them chosen by hash, with what their texts give."""
    began = time.monotonic()
    again = Retokeniser(model)
    found = Audit(str(folder.path), str(model))
    chosen = _chosen(folder, sample)
    asked = (record for record in dataset.records(folder.data) if _is_asked(record, chosen))
    rows = counted(asked, tell, "comparing", total=sample, unit="rows")
    look = _Look(again, found, several)
    while batch := list(islice(rows, BATCH)):
        look.at(batch)
    found.verdict = "contradict" if found.spelled.get(Agreement.OTHER) else "agree"
    found.seconds = round(time.monotonic() - began, 3)
    return found


def _chosen(folder: RunFolder, sample: int) -> int | None:
    """The greatest hash of an id that is in the sample, None for all: the same rows every time."""
    if not sample:
        return None
    hashes = (
        -_hash(brief) for brief in dataset.current(folder.data, dataset.Brief) if FAILURES.isdisjoint(brief.labels)
    )
    smallest = heapq.nlargest(sample, hashes)
    return -smallest[-1] if len(smallest) == sample else None


def _is_asked(record: Record, chosen: int | None) -> bool:
    return FAILURES.isdisjoint(record.labels) and (chosen is None or _hash(record) <= chosen)


def _hash(own: Any) -> int:
    text = f"{own.key}\0{own.sample}\0{own.turn}\0audit"
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


class _Look:
    """Fills an Audit, some records at a time."""

    def __init__(self, again: Retokeniser, found: Audit, several: bool) -> None:
        self._again = again
        self._found = found
        self._several = several
        self._shown: Counter[tuple[str, Kind]] = Counter()
        self._never = [str(number).encode() for number in sorted(again.inner)]

    def at(self, batch: list[Record]) -> None:
        self._found.rows += len(batch)
        with_ids = [record for record in batch if record.output_ids != NULL]
        self._found.without_ids += len(batch) - len(with_ids)
        for record, again in zip(with_ids, self._again.again(with_ids), strict=True):
            output = _ids(record, record.output_ids)
            self._spelling(record, output)
            self._facts(record, output)
            self._compare("output", record, output, again.output)
            self._prompt(record, again)

    def _prompt(self, record: Record, again: Again) -> None:
        if record.prompt_ids == NULL or again.problem:
            self._found.without_prompt += 1
            self._found.why = self._found.why or again.problem or "the server told no prompt ids"
        else:
            self._compare("prompt", record, _ids(record, record.prompt_ids), again.prompt)

    def _spelling(self, record: Record, output: list[int]) -> None:
        spelled = self._again.decode(output)
        how = agree.compare(record.text, spelled, self._again.specials, (record.reasoning, record.answer))
        how = how if self._again.knows(output) else Agreement.OTHER
        self._found.spelled[how] = self._found.spelled.get(how, 0) + 1
        if how is Agreement.OTHER and len(self._found.contradictions) < EXAMPLES:
            self._found.contradictions.append(Contradiction(self._id(record), record.text[:200], spelled[:200]))

    def _facts(self, record: Record, output: list[int]) -> None:
        of_output = agree.miscounted(record.output_ids, record.output_tokens)
        self._found.counts_differ += of_output or agree.miscounted(record.prompt_ids, record.prompt_tokens)
        self._found.no_end += record.finish_reason == "stop" and (not output or output[-1] not in self._again.ends)
        self._found.inside += agree.holds(record.output_ids, self._never)

    def _compare(self, part: str, record: Record, recorded: list[int], again: list[int]) -> None:
        counted: Part = getattr(self._found, part)
        counted.compared += 1
        found = divergence.classify(recorded, again, self._again.decode, self._again.ends)
        if found is None:
            counted.exact += 1
            return
        counted.kinds[found.kind] = counted.kinds.get(found.kind, 0) + 1
        if self._shown[part, found.kind] < EXAMPLES:
            self._shown[part, found.kind] += 1
            self._found.examples.append(self._example(part, record, found, recorded, again))

    def _example(self, part: str, record: Record, found: Divergence, recorded: list[int], again: list[int]) -> Example:
        around = slice(max(0, found.at - BEFORE), found.at + BEHIND)
        mine, theirs = self._tokens(recorded[around]), self._tokens(again[around])
        return Example(self._id(record), part, found.kind, found.at, mine, theirs)

    def _tokens(self, ids: Iterable[int]) -> list[Token]:
        return [(number, self._again.decode([number])) for number in ids]

    def _id(self, record: Record) -> str:
        return record_id(record.key, record.sample, record.turn, several=self._several)


_numbers = msgspec.json.Decoder(list[int])


def _ids(record: Record, raw: msgspec.Raw) -> list[int]:
    try:
        return _numbers.decode(raw)
    except msgspec.DecodeError as error:
        raise BrokenError(f"{record.key}: its token ids are no ids: {bytes(raw)[:80]!r}") from error


# -- for a person ------------------------------------------------------------------------------------------------------
def lines(found: Audit) -> Iterator[str]:
    """The audit as text."""
    compared = found.rows - found.without_ids
    yield f"{found.rows:,} rows of {found.run}, against the tokenizer of {found.model}"
    if found.without_ids:
        yield f"  {found.without_ids:,} have no token ids: their engine gave none"
    if compared:
        spelled = ", ".join(f"{how} {found.spelled[how]:,}" for how in Agreement if how in found.spelled)
        yield f"ids and text: {spelled}"
        for count, words in (
            (found.counts_differ, "have another number of ids than the engine counted"),
            (found.no_end, "ended by themselves, and their last id is no end token"),
            (found.inside, "hold padding or a mask inside the output"),
        ):
            if count:
                yield f"  {count:,} {words}"
        yield from _part("prompts rendered again", found.prompt)
        if found.without_prompt:
            yield f"  {found.without_prompt:,} not rendered: {found.why}"
        yield from _part("outputs tokenised again", found.output)
    for example in found.examples:
        yield f"{example.part} of {example.id}, {example.kind}, from token {example.at:,}:"
        yield f"  recorded  {_shown(example.recorded)}"
        yield f"  again     {_shown(example.again)}"
    for row in found.contradictions:
        yield f"{row.id}: its output ids spell another text than is stored"
        yield f"  stored    {row.text!r}"
        yield f"  spelled   {row.spelled!r}"
    yield _verdict(found, compared)


def _part(words: str, part: Part) -> Iterator[str]:
    yield f"{words}: {part.exact:,} of {part.compared:,} give the same ids ({part.share:.2%})"
    for kind, count in sorted(part.kinds.items(), key=lambda pair: -pair[1]):
        yield f"  {count:,} differ first in: {kind}"


def _shown(tokens: list[Token]) -> str:
    return " ".join(f"{number}:{text!r}" for number, text in tokens) or "(nothing)"


def _verdict(found: Audit, compared: int) -> str:
    if not compared:
        return "nothing could be compared"
    if wrong := found.spelled.get(Agreement.OTHER, 0):
        return f"contradict: of {compared:,} rows, {wrong:,} have ids that spell another text than is stored"
    return f"agree: the ids of all {compared:,} rows spell their texts, in {found.seconds:.1f} s"

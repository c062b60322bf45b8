"""All rows of a set added up. Memory: 16 bytes a row for hashes, a count for each different length; no row is kept."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.judge import Rules
from tokenmill.core.records import FAILURES
from tokenmill.inspecting.measuring import CUTS, EXAMPLE_CHARS, SHORT_MASK, Found, Thought
from tokenmill.inspecting.shapes import Ids

EXAMPLES = 3

REMEMBERED = 50_000
"""Rows whose hashes are looked up at once, to show examples of duplicates: 5 MB. All rows are compared at the end."""

CHUNK = 1 << 20
"""Supervised ids that are counted at once: counting a row alone would touch the whole vocabulary for it."""

OWN_FAULTS = frozenset({"bad_row", "thought_dropped"})
"""Labels of `inspect` alone that make a row bad, whatever [judge] says."""


class Example(msgspec.Struct, frozen=True):
    id: str
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Doubles:
    """Rows that repeat an earlier one's prompt, response, or both; `most`: how often the commonest response is."""

    prompts: int
    responses: int
    rows: int
    most: int


class Vocabulary:
    """How often each token is supervised."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)
        self._waiting: list[Ids] = []
        self._size = 0

    def add(self, ids: Ids) -> None:
        """The supervised ids of a row."""
        self._waiting.append(ids)
        self._size += len(ids)
        if self._size >= CHUNK:
            self._take()

    def _take(self) -> None:
        if not self._waiting:
            return
        counts = np.bincount(np.concatenate(self._waiting), minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts, self._waiting, self._size = counts, [], 0

    def counts(self) -> npt.NDArray[np.int64]:
        """By token id."""
        self._take()
        return self._counts


@dataclass
class Tally:
    """Counters hold values → rows. `cut` and `emptied` are the rows longer than each of CUTS, and those of them that
    keep fewer than SHORT_MASK supervised tokens then, though they had more."""

    rules: Rules
    rows: int = 0
    bad: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    supervised: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    thought_tokens: Counter[int] = field(default_factory=Counter)
    answer_tokens: Counter[int] = field(default_factory=Counter)
    characters: Counter[int] = field(default_factory=Counter)
    thoughts: Counter[Thought] = field(default_factory=Counter)
    ends: Counter[bool] = field(default_factory=Counter)
    whole: int = 0
    beyond: list[int] = field(default_factory=lambda: [0] * len(CUTS))
    cut: list[int] = field(default_factory=lambda: [0] * len(CUTS))
    emptied: list[int] = field(default_factory=lambda: [0] * len(CUTS))
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    examples: list[Example] = field(default_factory=list)
    _shown: Counter[str] = field(default_factory=Counter)
    _prompts: "array[int]" = field(default_factory=lambda: array("Q"))
    _responses: "array[int]" = field(default_factory=lambda: array("Q"))
    _seen: set[int] = field(default_factory=set)

    def add(self, found: Found) -> None:
        """One row."""
        self.rows += 1
        self.shapes[found.shape] += 1
        self.labels.update(found.labels)
        bad = [label for label in found.labels if is_fault(label, self.rules)]
        self.bad += bool(bad)
        if bad:
            self._show(found, bad)
        if found.length is not None:
            self._count(found, found.length)
        if found.supervised is not None:
            self.supervised[found.supervised] += 1
        if found.characters is not None:
            self.characters[found.characters] += 1
        if found.thought is not None:
            self.thoughts[found.thought] += 1
        if found.ended is not None:
            self.ends[found.ended] += 1
        self.whole += found.whole
        if found.ids is not None:
            self.vocabulary.add(found.ids)
        if found.response is not None:
            self._compare(found, found.response, shown=bool(bad))

    def _count(self, found: Found, length: int) -> None:
        self.lengths[length] += 1
        supervised = found.supervised or 0
        if found.thought_tokens is not None:
            self.thought_tokens[found.thought_tokens] += 1
        if found.answer_tokens is not None:
            self.answer_tokens[found.answer_tokens] += 1
        if length <= CUTS[0]:
            return
        for number, (cut, behind) in enumerate(zip(CUTS, found.beyond, strict=True)):
            self.beyond[number] += behind
            self.cut[number] += length > cut
            self.emptied[number] += supervised >= SHORT_MASK > supervised - behind

    def _show(self, found: Found, labels: list[str]) -> None:
        label = next((label for label in labels if self._shown[label] < EXAMPLES), "")
        if label:
            self._shown[label] += 1
            self.examples.append(Example(found.name, label, found.shown[:EXAMPLE_CHARS]))

    def _compare(self, found: Found, response: int, *, shown: bool) -> None:
        self._prompts.append(found.prompt or 0)
        self._responses.append(response)
        if response in self._seen and not shown:
            self._show(found, ["repeated_response"])
        if len(self._seen) < REMEMBERED:
            self._seen.add(response)

    def doubles(self) -> Doubles:
        """Over all rows that have a response."""
        prompts = np.array(self._prompts, dtype=np.uint64)
        responses = np.array(self._responses, dtype=np.uint64)
        known = prompts[prompts != 0]
        # A different odd factor for one of the two, so that equal halves do not cancel out.
        both = prompts * np.uint64(0x9E3779B97F4A7C15) ^ responses
        most = int(np.unique(responses, return_counts=True)[1].max(initial=0))
        return Doubles(_repeats(known), _repeats(responses), _repeats(both[prompts != 0]), most)


def _repeats(hashes: npt.NDArray[np.uint64]) -> int:
    return len(hashes) - len(np.unique(hashes))


def is_fault(label: str, rules: Rules) -> bool:
    """Whether a row with this label is a bad one."""
    return label in rules.reject or label in FAILURES or label in OWN_FAULTS

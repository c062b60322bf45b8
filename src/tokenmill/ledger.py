"""The accounts of a run: what became of every id. accepted + rejected + failed + pending = all ids asked for, always.

A byte an id, and the arrays of prompts.Index. Verdicts are computed anew from the stored measurements at every start,
so that [judge] may change; rows found again in the store are matched by the hash of their key.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tokenmill.core import judge
from tokenmill.core.gate import Gate
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record
from tokenmill.core.status import PromptCounts
from tokenmill.dataset import Brief
from tokenmill.prompts import Index, key_hash
from tokenmill.retry import Retry
from tokenmill.rows import Mask

PENDING, ACCEPTED, REJECTED, FAILED, NOT_ASKED, AGAIN = 0, 1, 2, 3, 4, 5
_CODES = {Verdict.ACCEPTED: ACCEPTED, Verdict.REJECTED: REJECTED, Verdict.FAILED: FAILED}

BATCH = 8192
"""Briefs matched at once: numpy's search costs less than the Python around it from here on; 5 MB."""


@dataclass
class Found:
    """What the store held: `changed` are keys whose prompt has other content now, `strangers` rows no longer asked for.

    `cohort` is the highest cohort number seen, -1 where nothing was. `redone`: made by this very retry before.
    """

    rows: int = 0
    changed: list[str] = field(default_factory=list)
    strangers: int = 0
    cohort: int = -1
    first_cohort: int = 0
    settings: set[str] = field(default_factory=set)
    redone: int = 0


class Ledger:
    """`samples` completions of each row; only rows of shard i of n count, each by the hash of its key.

    With a `retry`, ids whose record it wants are AGAIN: pending, and the only ones that are handed out, each in the
    cohort of its older record, which counts once more where no newer one comes (`settle`).
    """

    def __init__(self, index: Index, samples: int, shard: tuple[int, int] = (0, 1), retry: Retry | None = None) -> None:
        self.index = index
        self.samples = samples
        self._retry = retry
        self._open = PENDING if retry is None else AGAIN
        self._cohorts = np.zeros(0 if retry is None else len(index) * samples, dtype=np.int32)
        self.labels: dict[str, int] = {}
        self.tokens = 0
        self._bytes = bytearray(len(index) * samples)  # a byte of it is read in a third of the time of an array's item
        self._states = np.frombuffer(self._bytes, dtype=np.uint8).reshape(len(index), samples)
        part, of = shard
        if of > 1:
            self._states[index.keys % np.uint64(of) != np.uint64(part)] = NOT_ASKED

    def load(self, briefs: Iterable[Brief], rules: Rules, gate: Gate) -> Found:
        """Takes in all that is stored, newest first: older records of an id are superseded."""
        order = np.argsort(self.index.keys)
        keys = self.index.keys[order]
        found = Found()
        for batch in _batches(briefs):
            hashes = np.array([key_hash(brief.key) for brief in batch], dtype=np.uint64)
            places = np.minimum(np.searchsorted(keys, hashes), max(len(keys) - 1, 0))
            known = keys[places] == hashes if len(keys) else np.zeros(len(batch), dtype=np.bool_)
            rows = order[places] if len(keys) else np.zeros(len(batch), dtype=np.int64)
            rows[~known] = -1
            digests = self.index.digests[rows].tolist() if len(keys) else [0] * len(batch)
            for brief, row, digest in zip(batch, rows.tolist(), digests, strict=True):
                self._take_in(brief, row, digest, rules, gate, found)
        return found

    def _take_in(self, brief: Brief, row: int, digest: int, rules: Rules, gate: Gate, found: Found) -> None:
        found.rows += 1
        found.settings.add(brief.settings)
        state = NOT_ASKED if row < 0 or brief.sample >= self.samples else self._state(row, brief.sample)
        if state == NOT_ASKED:
            found.strangers += 1
            return
        if state != PENDING:
            return  # superseded: a newer record of this id was met before
        if int(brief.digest, 16) != digest:
            found.changed.append(brief.key)
            return
        verdict, labels = judge.judged(brief, rules)
        found.cohort = max(found.cohort, brief.cohort)
        found.first_cohort += brief.cohort == 0
        if self._retry is not None:
            found.redone += brief.settings in self._retry.made
            if self._retry.wants(brief.settings, verdict, labels):
                place = row * self.samples + brief.sample
                self._bytes[place], self._cohorts[place] = AGAIN, brief.cohort
                return
        self._mark(row, brief.sample, verdict, labels, brief.output_tokens)
        gate.count(brief.cohort, verdict, labels)

    def settle(self, briefs: Iterable[Brief], rules: Rules, gate: Gate) -> None:
        """The retry is over: of ids without a newer record the older one counts."""
        self._states[self._states == AGAIN] = PENDING
        self._retry, self._open = None, PENDING
        self.load(briefs, rules, gate)

    def mark(self, record: Record, verdict: Verdict) -> None:
        """A record that was just stored."""
        self._mark(record.row, record.sample, verdict, record.labels, record.output_tokens)

    def take_back(self, labels: Iterable[str], tokens: int) -> None:
        """Forgets a record's labels and tokens: a newer record of its id is about to be marked."""
        self.tokens -= tokens
        for label in labels:
            self.labels[label] -= 1
            if not self.labels[label]:
                del self.labels[label]

    def _mark(self, row: int, sample: int, verdict: Verdict, labels: Iterable[str], tokens: int) -> None:
        self._bytes[row * self.samples + sample] = _CODES[verdict]
        self.tokens += tokens
        for label in labels:
            self.labels[label] = self.labels.get(label, 0) + 1

    def pending_samples(self, row: int) -> list[int]:
        """The samples of a row that are still to be made: those without a record, or those to be made again."""
        return [sample for sample in range(self.samples) if self._state(row, sample) == self._open]

    def unrecorded(self, row: int) -> int:
        """How many samples of a row have no record at all."""
        return sum(self._state(row, sample) == PENDING for sample in range(self.samples))

    def cohort(self, row: int, sample: int) -> int | None:
        """The cohort that an id is in already, None for one without a record."""
        return int(self._cohorts[row * self.samples + sample]) if self._state(row, sample) == AGAIN else None

    @property
    def left(self) -> int:
        """Ids that this start is still to make."""
        return int(np.count_nonzero(self._states == self._open))

    def _state(self, row: int, sample: int) -> int:
        return self._bytes[row * self.samples + sample]

    def rows_pending(self) -> Mask:
        """True for rows of which any sample is still to be made."""
        return np.asarray((self._states == self._open).any(axis=1))

    def rows_asked(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """The rows of this run's shard."""
        return np.flatnonzero(self._states[:, 0] != NOT_ASKED)

    def counts(self) -> PromptCounts:
        """The ids asked for, by what became of them."""
        counts = np.bincount(self._states.ravel(), minlength=6).tolist()
        return PromptCounts(
            total=sum(counts) - counts[NOT_ASKED],
            accepted=counts[ACCEPTED],
            rejected=counts[REJECTED],
            failed=counts[FAILED],
            pending=counts[PENDING] + counts[AGAIN],
        )


def _batches(briefs: Iterable[Brief]) -> Iterator[list[Brief]]:
    stream = iter(briefs)
    while batch := list(islice(stream, BATCH)):
        yield batch

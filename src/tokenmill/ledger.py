"""The accounts of a run: what became of every id. accepted + rejected + failed + pending = all ids asked for, always.

A byte an id, and the arrays of prompts.Index; where all turns are asked for, a row has an id for each, and costs six
bytes more. Verdicts are computed anew from the stored measurements at every start, so that [judge] may change; rows
found again in the store are matched by the hash of their key.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core import judge
from tokenmill.core.gate import Gate
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record
from tokenmill.core.status import PromptCounts
from tokenmill.core.turns import goes_on
from tokenmill.dataset import Counted
from tokenmill.prompts import Index, key_hash
from tokenmill.retry import Retry
from tokenmill.rows import Mask

PENDING, ACCEPTED, REJECTED, FAILED, NOT_ASKED, CUT_OFF, BROKEN_OFF, AGAIN = 0, 1, 2, 3, 4, 5, 6, 7
"""CUT_OFF is accepted, and BROKEN_OFF failed: told apart since a conversation goes on after neither."""

_CODES = {Verdict.ACCEPTED: ACCEPTED, Verdict.REJECTED: REJECTED, Verdict.FAILED: FAILED}

BATCH = 8192
"""Briefs matched at once: numpy's search costs less than the Python around it from here on; 5 MB."""


@dataclass
class Found:
    """What the store held: `changed` are keys whose prompt has other content now, `strangers` rows no longer asked for.

    `cohorts` are the ids that each cohort has. `redone`: made by this very retry before.
    """

    rows: int = 0
    changed: list[str] = field(default_factory=list)
    strangers: int = 0
    cohorts: Counter[int] = field(default_factory=Counter)
    settings: set[str] = field(default_factory=set)
    redone: int = 0


class Ledger:
    """`samples` completions of each row, and of each of its turns where the index counts them; only rows of shard i of
    n count, each by the hash of its key.

    With a `retry`, ids whose record it wants are AGAIN: pending, and the only ones that are handed out, each in the
    cohort of its older record, which counts once more where no newer one comes (`settle`).
    """

    def __init__(self, index: Index, samples: int, shard: tuple[int, int] = (0, 1), retry: Retry | None = None) -> None:
        self.index = index
        self.samples = samples
        self._retry = retry
        self._open = PENDING if retry is None else AGAIN
        self.labels: dict[str, int] = {}
        self.tokens = 0
        self._starts: npt.NDArray[np.unsignedinteger[Any]] | None = None
        total = len(index) * samples
        if index.turns is not None:
            starts = np.concatenate(([0], np.cumsum(index.turns, dtype=np.int64) * samples))
            total = int(starts[-1])
            self._starts = starts.astype(np.min_scalar_type(total))
        self._cohorts = np.zeros(0 if retry is None else total, dtype=np.int32)
        self._bytes = bytearray(total)  # a byte of it is read in a third of the time of an array's item
        self._states = np.frombuffer(self._bytes, dtype=np.uint8)
        part, of = shard
        if of > 1:
            others = index.keys % np.uint64(of) != np.uint64(part)
            self._states[np.repeat(others, self._ids_by_row())] = NOT_ASKED

    def _ids_by_row(self) -> npt.NDArray[np.int64]:
        """How many ids each row has."""
        if self._starts is None:
            return np.full(len(self.index), self.samples)
        starts = self._starts.astype(np.int64)
        return starts[1:] - starts[:-1]

    def _row_starts(self) -> npt.NDArray[np.int64]:
        """Where each row's ids begin."""
        if self._starts is None:
            return np.arange(len(self.index), dtype=np.int64) * self.samples
        return self._starts[:-1].astype(np.int64)

    def turns(self, row: int) -> int:
        """The turns that are asked of each sample of a row."""
        if self._starts is None:
            return 1
        return (int(self._starts[row + 1]) - int(self._starts[row])) // self.samples

    def _place(self, row: int, sample: int, turn: int) -> int:
        if self._starts is None:
            return row * self.samples + sample
        return int(self._starts[row]) + sample * self.turns(row) + turn

    def _own(self, row: int, sample: int) -> bytearray:
        """The states of a row's sample, by turn."""
        start = self._place(row, sample, 0)
        return self._bytes[start : start + self.turns(row)]

    def load(self, briefs: Iterable[Counted], rules: Rules, gate: Gate) -> Found:
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
        self._reopen()
        return found

    def _take_in(self, brief: Counted, row: int, digest: int, rules: Rules, gate: Gate, found: Found) -> None:
        found.rows += 1
        found.settings.add(brief.settings)
        strange = row < 0 or brief.sample >= self.samples or brief.turn >= self.turns(row)
        place = -1 if strange else self._place(row, brief.sample, brief.turn)
        state = NOT_ASKED if strange else self._bytes[place]
        if state == NOT_ASKED:
            found.strangers += 1
            return
        if state != PENDING:
            return  # superseded: a newer record of this id was met before
        if int(brief.digest, 16) != digest:
            found.changed.append(brief.key)
            return
        verdict, labels = judge.judged(brief, rules)
        found.cohorts[brief.cohort] += 1
        if self._retry is not None:
            found.redone += brief.settings in self._retry.made
            if self._retry.wants(brief.settings, verdict, labels):
                self._bytes[place], self._cohorts[place] = AGAIN, brief.cohort
                return
        self._mark(place, verdict, brief.finish_reason, labels, brief.output_tokens)
        gate.count(brief.cohort, verdict, labels)

    def settle(self, briefs: Iterable[Counted], rules: Rules, gate: Gate) -> None:
        """The retry is over: of ids without a newer record the older one counts."""
        self._states[self._states == AGAIN] = PENDING
        self._retry, self._open = None, PENDING
        self.load(briefs, rules, gate)

    def mark(self, record: Record, verdict: Verdict) -> None:
        """A record that was just stored."""
        place = self._place(record.row, record.sample, record.turn)
        self._mark(place, verdict, record.finish_reason, record.labels, record.output_tokens)

    def take_back(self, labels: Iterable[str], tokens: int) -> None:
        """Forgets a record's labels and tokens: a newer record of its id is about to be marked."""
        self.tokens -= tokens
        for label in labels:
            self.labels[label] -= 1
            if not self.labels[label]:
                del self.labels[label]

    def _mark(self, place: int, verdict: Verdict, finish: str, labels: Iterable[str], tokens: int) -> None:
        state = _CODES[verdict]
        if state == ACCEPTED and not goes_on(verdict, finish):
            state = CUT_OFF
        elif state == FAILED and "broken_off" in labels:
            state = BROKEN_OFF
        self._bytes[place] = state
        self.tokens += tokens
        for label in labels:
            self.labels[label] = self.labels.get(label, 0) + 1

    def _reopen(self) -> None:
        """A turn that was broken off is asked for after all where the one before it is good by now: under other rules,
        or since it was generated anew. Its old record counts no more."""
        while True:
            places = np.flatnonzero(self._states == BROKEN_OFF)  # never a conversation's first turn
            back = places[np.isin(self._states[places - 1], (ACCEPTED, PENDING))]
            if not len(back):
                return
            self._states[back] = PENDING
            self.take_back(["broken_off"] * len(back), 0)

    def pending_samples(self, row: int) -> list[int]:
        """The samples of a row of which something is still to be made: what lacks a record, or is to be made again."""
        return [sample for sample in range(self.samples) if self._own(row, sample).find(self._open) >= 0]

    def unrecorded(self, row: int) -> int:
        """How many samples of a row have no record of their first turn."""
        return sum(self._own(row, sample)[0] == PENDING for sample in range(self.samples))

    def again(self, row: int, sample: int) -> dict[int, int]:
        """The turns of a row's sample that are to be made again, and the cohort that each is in."""
        if not len(self._cohorts):
            return {}
        start = self._place(row, sample, 0)
        own = self._own(row, sample)
        return {turn: int(self._cohorts[start + turn]) for turn, state in enumerate(own) if state == AGAIN}

    def later_turns_again(self) -> Iterator[tuple[int, int, int]]:
        """Row, sample and turn of all that is to be made again, but for first turns."""
        if self._starts is None or self._retry is None:
            return
        starts, turns = self._row_starts(), self._ids_by_row() // self.samples
        places = np.flatnonzero(self._states == AGAIN)
        rows = np.searchsorted(starts, places, "right") - 1
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            sample, turn = divmod(place - int(starts[row]), int(turns[row]))
            if turn:
                yield row, sample, turn

    def is_again(self, record: Record) -> bool:
        """Whether a record is of an id that is to be made again."""
        return self._bytes[self._place(record.row, record.sample, record.turn)] == AGAIN

    @property
    def left(self) -> int:
        """Ids that this start is still to make."""
        return int(np.count_nonzero(self._states == self._open))

    def reopen(self, record: Record) -> bool:
        """After a record that counts in an older one's place: the turns that the older one broke off are pending again.
        Whether there are any."""
        turns = range(record.turn + 1, self.turns(record.row))
        places = [self._place(record.row, record.sample, turn) for turn in turns]
        if not places or self._bytes[places[0]] != BROKEN_OFF:
            return False
        back = list(takewhile(lambda place: self._bytes[place] == BROKEN_OFF, places))
        for place in back:
            self._bytes[place] = PENDING
        self.take_back(["broken_off"] * len(back), 0)
        return True

    def pending_turns(self, row: int, sample: int) -> range:
        """The first turns of a row's sample, in a row, that have no record; empty where all have one."""
        start = self._place(row, sample, 0)
        own = self._bytes[start : start + self.turns(row)]
        first = own.find(PENDING)
        if first < 0:
            return range(0)
        return range(first, first + len(own[first:]) - len(own[first:].lstrip(bytes([PENDING]))))

    def asks_for(self, row: int, sample: int, turn: int) -> bool:
        """Whether this start asks for that id: of a conversation, the first turn without a record; in a retry, what is
        to be made again."""
        if sample >= self.samples or turn >= self.turns(row):
            return False
        if self._retry is not None:
            return self._bytes[self._place(row, sample, turn)] == AGAIN
        return self.pending_turns(row, sample)[:1] == range(turn, turn + 1)

    def under_way(self) -> dict[tuple[int, int], int]:
        """The conversations that were begun and are to be gone on with: row and sample → the last turn that stands."""
        if self._starts is None:
            return {}
        starts, turns = self._row_starts(), self._ids_by_row() // self.samples
        begins = np.zeros(len(self._states), dtype=np.bool_)
        for sample in range(self.samples):
            begins[starts + sample * turns] = True
        pending = self._states == PENDING
        places = np.flatnonzero(pending[1:] & ~pending[:-1] & ~begins[1:]) + 1
        found: dict[tuple[int, int], int] = {}
        for place, row in zip(places.tolist(), (np.searchsorted(starts, places, "right") - 1).tolist(), strict=True):
            sample, turn = divmod(place - int(starts[row]), int(turns[row]))
            found.setdefault((row, sample), turn - 1)
        return found

    def rows_pending(self) -> Mask:
        """True for rows of which anything is still to be made."""
        wanted = self._states == self._open
        return np.logical_or.reduceat(wanted, self._row_starts()) if len(wanted) else wanted

    def rows_asked(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """The rows of this run's shard."""
        return np.flatnonzero(self._states[self._row_starts()] != NOT_ASKED)

    def counts(self) -> PromptCounts:
        """The ids asked for, by what became of them."""
        counts = np.bincount(self._states, minlength=8).tolist()
        return PromptCounts(
            total=sum(counts) - counts[NOT_ASKED],
            accepted=counts[ACCEPTED] + counts[CUT_OFF],
            rejected=counts[REJECTED],
            failed=counts[FAILED] + counts[BROKEN_OFF],
            pending=counts[PENDING] + counts[AGAIN],
        )


def _batches(briefs: Iterable[Counted]) -> Iterator[list[Counted]]:
    stream = iter(briefs)
    while batch := list(islice(stream, BATCH)):
        yield batch

"""Which records go out, and why the others do not. Pure decisions over a stream; 16 bytes a record are kept.

The order is part of the meaning: the verdict; labels asked to be left out; ids; the cut at a length, and only then
whether enough is left of the answer (checked before it, a cut can leave rows without a single supervised token); equal
rows; last the caps, which are shares of all that is left.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from tokenmill.core import judge
from tokenmill.core.judge import GROUPS, Rules, Verdict
from tokenmill.core.records import NULL, Record, count_ids
from tokenmill.errors import GateError
from tokenmill.formats.base import CUT, Format, Split, first_ids

LEAST = 2
"""Supervised tokens of a row of ids: SpecForge's DFlash takes none with fewer than two in a row."""

LEAST_OF_A_CUT = 8
"""Of a row that was cut: what is left of an answer whose prompt nearly filled the length teaches nothing."""

MAX_UNSUPERVISED, MAX_ENDLESS = 0.01, 0.005
"""Shares of rows without a supervised token, and of finished answers without their end token, beyond which not a few
rows are odd but something is wrong with how they were made."""

NO_IDS, NO_TOKEN, NO_ROOM, EQUAL = "no token ids", "no supervised token", "no answer within --max-length", "equal rows"

RECENT = 1 << 16
"""Hashes that wait to be merged into the sorted ones: 3 MB as Python numbers."""

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a run's accepted records is wanted. `least`, `most`: supervised tokens a row; `length`: prompt and output
    together, longer rows are cut; 0 for no such limit. `caps`: label → its share of all rows at most, 0 to 1."""

    drop: frozenset[str] = frozenset()
    caps: Mapping[str, float] = field(default_factory=dict)
    least: int = 0
    most: int = 0
    length: int = 0
    dedup: bool = False
    validation: float = 0.0


def split_of(key: str, validation: float) -> Split:
    """By the key's hash: all completions of a prompt on one side, the same in every export, whatever else is there."""
    return "validation" if _hash(key) < validation * 2.0**64 else "train"


class Sieve:
    """Sieves one stream of records in the prompts' order; `reasons` counts those left out, `failures` gets the failed.

    With caps, `survey` reads the stream once before: which rows go cannot be known until all are.
    """

    def __init__(self, form: Format, rules: Rules, choice: Choice) -> None:
        self.form, self.rules, self.choice = form, rules, choice
        self.reasons: Counter[str] = Counter()
        self.read = 0
        self._seen = _Seen()
        self._over: dict[int, str] = {}

    def survey(self, records: Iterable[Record]) -> None:
        """Finds out which rows are over a cap."""
        capped: list[int] = []
        of: list[list[bool]] = []
        wanted = [_labels(name) for name in self.choice.caps]
        rows = 0
        for record in self._before_caps(records):
            rows += 1
            if any(belongs := [not labels.isdisjoint(record.labels) for labels in wanted]):
                capped.append(_id_hash(record))
                of.append(belongs)
        if capped:
            over = _over(np.array(capped, np.uint64), np.array(of), list(self.choice.caps.values()), rows)
            names = list(self.choice.caps)
            self._over = {capped[row]: names[cap] for row, cap in over.items()}
        self.reasons.clear()
        self.read, self._seen = 0, _Seen()

    def sieve(self, records: Iterable[Record], failures: Any = None) -> Iterator[Record]:
        """The records that go out, cut where they must be. `failures(record)` is called for each failed one."""
        for record in self._before_caps(records, failures):
            cap = self._over.get(_id_hash(record)) if self._over else None
            if cap is None:
                yield record
            else:
                self.reasons[f"over the cap of {cap}"] += 1

    def _before_caps(self, records: Iterable[Record], failures: Any = None) -> Iterator[Record]:
        for record in records:
            self.read += 1
            verdict, labels = judge.judged(record, self.rules)
            if verdict is Verdict.FAILED and failures is not None:
                failures(record)
            reason = self._by_label(verdict, labels)
            if not reason:
                record, reason = self._by_length(replace(record, labels=labels))
            if not reason and self.choice.dedup and not self._seen.add(_content_hash(record)):
                reason = EQUAL
            if reason:
                self.reasons[reason] += 1
            else:
                yield record

    def _by_label(self, verdict: Verdict, labels: tuple[str, ...]) -> str:
        if verdict is Verdict.FAILED:
            return f"failed: {labels[0]}"
        if verdict is Verdict.REJECTED:
            return f"rejected: {next(label for label in labels if label in self.rules.reject)}"
        for name in sorted(self.choice.drop):
            if not _labels(name).isdisjoint(labels):
                return f"dropped: {name}"
        return ""

    def _by_length(self, record: Record) -> tuple[Record, str]:
        if self.form.is_closed and record.finish_reason != "stop":
            return record, "cut off: a template would invent their end"
        least, supervised = self.choice.least, record.output_tokens
        if self.form.needs_ids:
            if record.prompt_ids == NULL or record.output_ids == NULL:
                return record, NO_IDS
            if count_ids(record.output_ids) == 0:
                return record, NO_TOKEN
            record = _cut(record, self.choice.length)
            supervised = count_ids(record.output_ids)
            least = least or (LEAST_OF_A_CUT if record.finish_reason == CUT else LEAST)
            if supervised == 0:
                return record, NO_ROOM
        if supervised < least:
            return record, f"fewer than {least} tokens"
        if self.choice.most and supervised > self.choice.most:
            return record, f"more than {self.choice.most} tokens"
        return record, ""


def _cut(record: Record, length: int) -> Record:
    """A row as a trainer of this length would see it. What is cut has no end token, and gets none."""
    room = max(0, length - count_ids(record.prompt_ids))
    if not length or count_ids(record.output_ids) <= room:
        return record
    return replace(record, output_ids=first_ids(record.output_ids, room), finish_reason=CUT)


def _labels(name: str) -> frozenset[str]:
    return GROUPS.get(name, frozenset({name}))


def _over(hashes: Hashes, of: npt.NDArray[np.bool_], shares: list[float], rows: int) -> dict[int, int]:
    """The places of rows that must go, with the cap they are over, so that each share holds of what is left.

    By hash, so that a label's rows stay spread over the set. Every row that goes lowers what the others may have:
    again, until nothing changes.
    """
    order = np.argsort(hashes)
    here = np.ones(len(hashes), dtype=np.bool_)
    gone: dict[int, int] = {}
    changed = True
    while changed:
        changed = False
        for cap, share in enumerate(shares):
            mine = order[(here & of[:, cap])[order]]
            allowed = int(share * (rows - len(gone)) + 1e-9)  # 0.1 × 30 is a little less than 3
            if len(mine) > allowed:
                last = mine[allowed - len(mine) :]
                here[last] = False
                gone.update(dict.fromkeys(last.tolist(), cap))
                changed = True
    return gone


# -- hashes ------------------------------------------------------------------------------------------------------------
def _hash(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


def _id_hash(record: Record) -> int:
    return _hash(f"{record.key}\0{record.sample}\0{record.turn}\0cap")


def _content_hash(record: Record) -> int:
    """Of prompt and output as ids; as text where there are none."""
    if record.output_ids != NULL and record.prompt_ids != NULL:
        return int(xxhash.xxh3_64_intdigest(bytes(record.prompt_ids) + bytes(record.output_ids)))
    return _hash(f"{bytes(record.messages).decode()}\0{bytes(record.tools).decode()}\0{record.text}")


class _Seen:
    """A set of 64-bit hashes at eight bytes each."""

    def __init__(self) -> None:
        self._sorted: Hashes = np.empty(0, np.uint64)
        self._recent: set[int] = set()

    def add(self, value: int) -> bool:
        """Whether it is new."""
        at = int(np.searchsorted(self._sorted, np.uint64(value)))
        if value in self._recent or (at < len(self._sorted) and int(self._sorted[at]) == value):
            return False
        self._recent.add(value)
        if len(self._recent) == RECENT:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.union1d(self._sorted, recent)
            self._recent.clear()
        return True


# -- what went out -----------------------------------------------------------------------------------------------------
class Tally:
    """What is told of the rows that went out. `lengths` are supervised tokens, `shares` these by all tokens of a row:
    as they stand in the row for a format of ids, as the engine counted them for others."""

    def __init__(self, form: Format) -> None:
        self._by_ids = form.needs_ids
        self.rows = self.finished = self.endless = 0
        self.labels: Counter[str] = Counter()
        self.finish: Counter[str] = Counter()
        self.lengths = array("I")
        self.shares = array("f")
        self.accepted = self.steps = 0.0
        self.settings: Counter[str] = Counter()
        self._digest = xxhash.xxh3_64()

    def add(self, record: Record, split: Split = "train") -> None:
        self.rows += 1
        told = (record.key, record.sample, record.turn, record.attempt, record.finish_reason, split)
        for part in (repr(told).encode(), bytes(record.prompt_ids), bytes(record.output_ids), record.text.encode()):
            self._digest.update(part)
        self.labels.update(record.labels)
        self.finish[record.finish_reason] += 1
        self.settings[record.settings] += 1
        supervised, whole = record.output_tokens, record.prompt_tokens + record.output_tokens
        if self._by_ids:
            supervised = count_ids(record.output_ids)
            whole = count_ids(record.prompt_ids) + supervised
        self.lengths.append(supervised)
        self.shares.append(supervised / whole if whole else 0.0)
        if record.finish_reason == "stop":
            self.finished += 1
            self.endless += "missing_end_token" in record.labels
        if record.accept_length:
            self.accepted += record.output_tokens
            self.steps += record.output_tokens / record.accept_length

    @property
    def digest(self) -> str:
        """Of all that went out, so that two exports of unlike content can be told apart."""
        return self._digest.hexdigest()

    @property
    def accept_length(self) -> float | None:
        """Tokens a step of the target model, over all rows that tell; None where none does."""
        return self.accepted / self.steps if self.steps else None

    def gate(self, sieve: Sieve) -> None:
        """Raises GateError where what goes out, or what is left of it, shows that something is wrong with all of it."""
        unsupervised = sieve.reasons[NO_TOKEN]
        if unsupervised > MAX_UNSUPERVISED * (self.rows + unsupervised):
            raise GateError(
                f"{unsupervised:,} of {self.rows + unsupervised:,} rows have no supervised token",
                fix="tokenmill inspect RUN   shows them: what the engine gave as output ids is empty",
            )
        if self.endless > MAX_ENDLESS * max(1, self.finished):
            raise GateError(
                f"{self.endless:,} of {self.finished:,} finished answers lack their end token",
                fix="--drop missing_end_token   leaves them out; a drafter trained on them does not stop",
            )
        if sieve.read and not self.rows:
            told = ", ".join(f"{count:,} {reason}" for reason, count in sieve.reasons.most_common())
            raise GateError(f"nothing is left to export of {sieve.read:,} records: {told}", fix=_fix(sieve))


def _fix(sieve: Sieve) -> str:
    if sieve.reasons[NO_IDS]:
        return "export messages or parquet, which need no ids; or --retokenise, which tells how far such ids are off"
    return "tokenmill inspect RUN   shows why"

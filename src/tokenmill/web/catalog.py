"""Finds single records among any number of them, newest, worst or by key, while a run goes on. Reads only.

Never the whole run at once: 16 bytes a record say where each key lies, taken in file by file, the newest first, from
the columns that it takes. What is found is read again by its place. A sealed journal's places end with it, and its part
is taken in anew.
"""

import heapq
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill import linefile, store
from tokenmill.core import judge
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record
from tokenmill.dataset import Id, Measured, from_row, opened
from tokenmill.prompts import key_hash

KEPT = 200
"""Of the worst, for each label: ten times what is shown, since some will have been made anew."""

CHUNKS = 16
"""Of a journal that grows, before they are put together: a search looks into each."""

STEP_BYTES = 32 << 20
"""Of a journal, taken in at once: half a second."""

ALL = ""
"""The label under which all that is not accepted stands."""


_measured = msgspec.json.Decoder(Measured)
_record = msgspec.json.Decoder(Record)


class Found(NamedTuple):
    """A record with its verdict under the run's rules; `superseded` by a newer one of its id."""

    record: Record
    verdict: Verdict
    labels: tuple[str, ...]
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Hashes of keys in order, and where each lies: a row of a part, a byte of a journal."""

    hashes: NDArray[np.uint64]
    places: NDArray[np.uint64]

    @classmethod
    def of(cls, hashes: "list[int] | NDArray[np.uint64]", places: "list[int] | NDArray[np.uint64]") -> "_Chunk":
        keys, where = np.asarray(hashes, dtype=np.uint64), np.asarray(places, dtype=np.uint64)
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], where[order])

    def find(self, value: int) -> list[int]:
        wanted = np.uint64(value)
        low, high = np.searchsorted(self.hashes, wanted, "left"), np.searchsorted(self.hashes, wanted, "right")
        return [int(place) for place in self.places[low:high]]


@dataclass(slots=True)
class _File:
    """What is known of one file; `end` is the byte of a journal up to which it was taken in, `seen` up to which it was
    looked at: a line without its end waits for it."""

    chunks: tuple[_Chunk, ...] = ()
    end: int = 0
    seen: int = 0
    rows: int = 0


class Catalog:
    """Of a run's data folder. `step` takes in what is new, on one thread; everything else may be asked on others."""

    def __init__(self, data: Path, rules: Rules) -> None:
        self.rules = rules
        self._data = data
        self._files: dict[Path, _File] = {}
        self._worst: dict[str, dict[Id, float]] = {}
        self._left = 1

    # -- taking in ---------------------------------------------------------------------------------------------------
    @property
    def left(self) -> int:
        """Files that are not taken in yet."""
        return self._left

    @property
    def rows(self) -> int:
        """Records that are taken in."""
        return sum(file.rows for file in list(self._files.values()))

    def step(self) -> bool:
        """Takes in one file, or what came to one journal; whether there was anything. Raises StoreError."""
        journals, parts = self._present()
        sealed = {path for path in self._files if path.suffix == ".jsonl"} - set(journals)
        for path in sealed:
            del self._files[path]
        growing = [path for path in reversed(journals) if self._has_grown(path)]
        new = [path for path in reversed(parts) if path not in self._files]
        self._left = len(growing) + len(new)
        if growing:
            self._take_journal(growing[0])
        elif new:
            self._take_part(new[0])
        return self._left > 0

    def _present(self) -> tuple[list[Path], list[Path]]:
        """Journals and parts, the oldest first; a journal whose part stands is about to go."""
        journals = store.journals(self._data)
        parts = store.parts(self._data)
        return [path for path in journals if store.part_of(path) not in parts], parts

    def _has_grown(self, path: Path) -> bool:
        known = self._files.get(path)
        try:
            return path.stat().st_size > (known.seen if known else 0)
        except FileNotFoundError:
            return False  # sealed this moment

    def _take_journal(self, path: Path) -> None:
        file = self._files.setdefault(path, _File())
        hashes: list[int] = []
        places: list[int] = []
        at, enough = file.end, file.end + STEP_BYTES
        try:
            with path.open("rb") as lines:
                file.seen = lines.seek(0, os.SEEK_END)
                lines.seek(at)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    if at > enough:
                        file.seen = at
                        break
                    if store.is_whole(line):
                        found = _measured.decode(store.plain(line))
                        hashes.append(key_hash(found.key))
                        places.append(at)
                        self._rate(found)
                    at += len(line)
        except FileNotFoundError:
            return
        chunks = (*file.chunks, _Chunk.of(hashes, places)) if hashes else file.chunks
        if len(chunks) > CHUNKS:
            chunks = (
                _Chunk.of(*(np.concatenate([getattr(c, name) for c in chunks]) for name in ("hashes", "places"))),
            )
        file.chunks, file.end, file.rows = chunks, at, file.rows + len(hashes)

    def _take_part(self, path: Path) -> None:
        self._files[path] = _File()  # a damaged one is told once
        hashes: list[int] = []
        with opened(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(Measured.__struct_fields__))
                hashes += map(key_hash, table.column("key").to_pylist())
                suspicious = np.flatnonzero(_may_be_labelled(table, self.rules))
                for row in table.take(suspicious).to_pylist() if len(suspicious) else ():
                    self._rate(Measured(**row))
        self._files[path] = _File((_Chunk.of(hashes, np.arange(len(hashes), dtype=np.uint64)),), rows=len(hashes))

    def _rate(self, found: Measured) -> None:
        verdict, labels = judge.judged(found, self.rules)
        if not labels:
            return
        rejecting = len(self.rules.reject.intersection(labels)) if verdict is Verdict.REJECTED else 0
        for label in (ALL, *labels) if verdict is not Verdict.ACCEPTED else labels:
            kept = self._worst.setdefault(label, {})
            kept[found.key, found.sample, found.turn] = 1000.0 * rejecting + min(found.repetition, 999.0)
            if len(kept) > 2 * KEPT:
                self._worst[label] = dict(heapq.nlargest(KEPT, kept.items(), key=itemgetter(1)))

    # -- asking ------------------------------------------------------------------------------------------------------
    def labels(self) -> list[str]:
        """The labels that were met."""
        return sorted(set(self._worst) - {ALL})

    def newest(self, count: int) -> list[Found]:
        """The records that were stored last; needs nothing taken in."""
        found: list[Found] = []
        journals, parts = self._present()
        for path in reversed(journals):
            found += self._judged(_tail(path, count - len(found)))
        for path in reversed(parts):
            if len(found) >= count:
                break
            found += self._judged(_rows(path, _last(path, count - len(found))))
        return found

    def worst(self, label: str, count: int) -> list[Found]:
        """Records that were rejected or failed, or that have a label: those with the most to object to first."""
        found: list[Found] = []
        kept = sorted(self._worst.get(label, {}).items(), key=itemgetter(1), reverse=True)
        for (key, sample, turn), _ in kept:
            if len(found) == count:
                break
            newest = next(iter(self.find(key, sample, turn)), None)
            if newest is not None and (
                label in newest.labels or (label == ALL and newest.verdict is not Verdict.ACCEPTED)
            ):
                found.append(newest)
        return found

    def find(self, key: str, sample: int | None = None, turn: int | None = None) -> list[Found]:
        """All records of a key, the newest of each id first."""
        found: list[Record] = []
        wanted = key_hash(key)
        for path, file in sorted(self._files.items(), key=lambda item: -store.number_of(item[0])):
            places = sorted({place for chunk in file.chunks for place in chunk.find(wanted)})
            if places:
                # In a part the newest of an id stands first, in a journal last.
                read = reversed(_lines(path, places)) if path.suffix == ".jsonl" else _rows(path, places)
                found += [record for record in read if record.key == key]
        seen: set[Id] = set()
        told = []
        for record in found:
            if sample in (None, record.sample) and turn in (None, record.turn):
                own = (record.key, record.sample, record.turn)
                told += [one._replace(superseded=own in seen) for one in self._judged([record])]
                seen.add(own)
        return sorted(told, key=lambda one: (one.record.sample, one.record.turn, one.superseded))

    def _judged(self, records: Iterable[Record]) -> list[Found]:
        return [Found(record, *judge.judged(record, self.rules)) for record in records]


def _may_be_labelled(table: Any, rules: Rules) -> NDArray[np.bool_]:
    """Rows whose labels are worth a look in Python: as a rule one in a hundred."""
    import pyarrow.compute as pc

    columns = {name: table.column(name) for name in ("reasoning_tokens", "repetition", "thinking", "labels")}
    tokens, ratio = columns["reasoning_tokens"].to_numpy(), columns["repetition"].to_numpy()
    thinking = columns["thinking"].to_numpy()
    labelled = pc.list_value_length(columns["labels"]).to_numpy() > 0
    shallow = thinking & ((tokens == 0) | (tokens < rules.min_reasoning_tokens))
    return np.asarray(labelled | shallow | (ratio > rules.max_repetition), dtype=np.bool_)


def _tail(path: Path, count: int) -> list[Record]:
    """The last whole records of a journal, the last first."""
    found: list[Record] = []
    try:
        with path.open("rb") as file:
            for line, _ in linefile.backwards(file):
                if len(found) >= count:
                    break
                if store.is_whole(line):
                    found.append(_record.decode(store.plain(line)))
    except FileNotFoundError:
        pass  # sealed this moment: its part has them
    return found


def _lines(path: Path, places: list[int]) -> list[Record]:
    """The records of a journal that begin at these bytes."""
    found = []
    try:
        with path.open("rb") as file:
            for place in places:
                file.seek(place)
                if store.is_whole(line := file.readline()):
                    found.append(_record.decode(store.plain(line)))
    except FileNotFoundError:
        pass
    return found


def _rows(path: Path, rows: list[int]) -> list[Record]:
    """The records of a part in these rows, as they are asked for; a row group at a time is in memory."""
    by_row: dict[int, Record] = {}
    with opened(path) as file:
        for group, inside in _groups(file.metadata, rows):
            table = file.read_row_group(group, columns=list(Record.__struct_fields__))
            for row, at in inside:
                by_row[row] = from_row(table.slice(at, 1).to_pylist()[0])
    return [by_row[row] for row in rows if row in by_row]


def _groups(metadata: Any, rows: list[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Row groups that hold these rows, each with the rows and their places in it."""
    begin = 0
    for group in range(metadata.num_row_groups):
        end = begin + metadata.row_group(group).num_rows
        if inside := [(row, row - begin) for row in rows if begin <= row < end]:
            yield group, inside
        begin = end


def _last(path: Path, count: int) -> list[int]:
    """The rows of a part that were answered last, the last first: it is sorted by the prompts' order."""
    ended: list[NDArray[np.float64]] = []
    with opened(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["started", "seconds"])
            ended.append(table.column("started").to_numpy() + table.column("seconds").to_numpy())
    moments = np.concatenate(ended) if ended else np.array([])
    return [int(row) for row in np.argsort(-moments, kind="stable")[:count]]

"""A run's records as columns of numbers, 30 bytes a record, and which of them to show: one stream, read once.

Everything that a report counts is computed from these, exactly: 900,000 records take 27 MB and three seconds.
"""

from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.core import judge
from tokenmill.core.judge import Rules, Verdict
from tokenmill.dataset import Id, Measured

KEPT = 3
"""Ids of each set of labels, for the examples."""

VERDICTS = (Verdict.ACCEPTED, Verdict.REJECTED, Verdict.FAILED)
ACCEPTED, REJECTED, FAILED = range(3)
"""Their places."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.unsignedinteger[Any]]
Flags = npt.NDArray[np.bool_]


class Row(Measured, gc=False):
    """What is read of a record."""

    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    server: str
    started: float
    seconds: float
    accept_length: float | None


@dataclass(slots=True)
class _Codes:
    """Values that are few, each with a number."""

    numbers: dict[object, int] = field(default_factory=dict)

    def of(self, value: object) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


@dataclass(frozen=True, slots=True)
class Columns:
    """A place in each array is a record; `labels`, `servers` and `finishes` are what the numbers in `label_set`,
    `server` and `finish` stand for. Times in Unix seconds, `accept` NaN where no accept length was told."""

    verdict: Ints
    label_set: Ints
    server: Ints
    finish: Ints
    thinking: Flags
    prompt: Ints
    output: Ints
    thought: Ints
    began: Floats
    ended: Floats
    accept: Floats
    labels: list[tuple[str, ...]]
    servers: list[str]
    finishes: list[str]
    shown: dict[tuple[str, ...], list[Id]]

    @property
    def answered(self) -> Flags:
        """Records that hold a completion."""
        found: Flags = self.verdict != FAILED
        return found

    @property
    def truncated(self) -> Flags:
        """The records that were cut off at their length."""
        return self.has(*judge.TRUNCATED)

    def has(self, *names: str) -> Flags:
        """The records with any of these labels."""
        having = [n for n, labels in enumerate(self.labels) if not set(names).isdisjoint(labels)]
        found: Flags = np.isin(self.label_set, having)
        return found


class _Growing:
    def __init__(self) -> None:
        self.small = {name: array("H") for name in ("verdict", "label_set", "server", "finish", "thinking")}
        self.counts = {name: array("I") for name in ("prompt", "output", "thought")}
        self.times = {name: array("d") for name in ("began", "ended", "accept")}


def read(rows: Iterable[Row], rules: Rules) -> Columns:
    """Takes in all rows."""
    kept = _Growing()
    labels, servers, finishes = _Codes(), _Codes(), _Codes()
    shown: dict[tuple[str, ...], list[tuple[int, Id]]] = {}
    places = {verdict: place for place, verdict in enumerate(VERDICTS)}
    for row in rows:
        verdict, effective = judge.judged(row, rules)
        kept.small["verdict"].append(places[verdict])
        kept.small["label_set"].append(labels.of(effective))
        kept.small["server"].append(servers.of(row.server))
        kept.small["finish"].append(finishes.of(row.finish_reason))
        kept.small["thinking"].append(row.thinking)
        kept.counts["prompt"].append(row.prompt_tokens)
        kept.counts["output"].append(row.output_tokens)
        kept.counts["thought"].append(row.reasoning_tokens)
        kept.times["began"].append(row.started)
        kept.times["ended"].append(row.started + row.seconds)
        kept.times["accept"].append(np.nan if row.accept_length is None else row.accept_length)
        _show(shown.setdefault(effective, []), row)
    arrays = {name: np.asarray(values) for name, values in (kept.small | kept.counts).items()}
    thinking = arrays.pop("thinking").astype(np.bool_)
    times = {name: np.asarray(values) for name, values in kept.times.items()}
    return Columns(
        **arrays,
        **times,
        thinking=thinking,
        labels=list(labels.numbers),  # type: ignore[arg-type]
        servers=list(servers.numbers),  # type: ignore[arg-type]
        finishes=list(finishes.numbers),  # type: ignore[arg-type]
        shown={effective: [identity for _, identity in found] for effective, found in shown.items()},
    )


def _show(found: list[tuple[int, Id]], row: Row) -> None:
    """Keeps the few whose keys have the smallest hashes: any of them, and the same ones in every report."""
    order = xxhash.xxh3_64_intdigest(row.key.encode("utf-8", "surrogatepass"))
    if len(found) < KEPT or order < found[-1][0]:
        insort(found, (order, (row.key, row.sample, row.turn)))
        del found[KEPT:]

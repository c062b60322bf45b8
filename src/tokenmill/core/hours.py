"""Does a run as a whole change from hour to hour? Label shares and lengths of each hour against the hours before it,
since this start of the run.

What all servers do at once is no server's fault (drift.py), and may be right: the prompts of a later part of a file are
others. So it is told, and stops nothing. The first hour is not compared with: short answers end first, and what ends in
it is too short and too seldom cut off.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

HOUR_S = 3600.0

LEAST = 200
"""Answers of an hour, and of the hours before it: a share of fewer says nothing."""

TIMES, POINTS = 2.0, 0.02
"""A share is another from twice, or half, the one before on, where that is 2 % of the answers, too: a fault of one in a
thousand that doubles hardly changes a dataset."""

DEVIATIONS = 6.0
"""Beyond chance: one in a thousand million, were all answers alike. Hours have thousands of them, so Fisher's exact
test (drift.py) would take seconds here."""

LENGTH = 1.5
"""Of the mean length, up or down, and beyond chance, too: lengths differ tenfold, so means of 200 differ by a tenth."""


class Change(NamedTuple):
    """`hour` counts from 0; `what` is a label, or "length" (then the values are tokens, else shares of the answers)."""

    hour: int
    what: str
    now: float
    before: float
    answers: int

    def __str__(self) -> str:
        if self.what == "length":
            words = f"answers have {self.now:,.0f} tokens in the mean, {self.before:,.0f} in the hours before"
        else:
            words = f"{self.now:.1%} of the answers are {self.what}, {self.before:.1%} in the hours before"
        return f"hour {self.hour + 1} since this start: {words} ({self.answers:,} answers)"


@dataclass(slots=True)
class _Sum:
    answers: int = 0
    tokens: int = 0
    squares: int = 0
    labels: Counter[str] = field(default_factory=Counter)

    @property
    def length(self) -> float:
        return self.tokens / self.answers

    @property
    def error(self) -> float:
        """The square of its standard error."""
        return max(0.0, self.squares / self.answers - self.length**2) / self.answers

    def add(self, other: "_Sum") -> None:
        self.answers += other.answers
        self.tokens += other.tokens
        self.squares += other.squares
        self.labels.update(other.labels)


class Hours:
    """Takes answers as they end; `observe` returns what has changed once an hour is over, each change but once until
    it is over."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._hour = 0
        self._now, self._before = _Sum(), _Sum()
        self._told: set[str] = set()

    def observe(self, ended: float, labels: Iterable[str], tokens: int) -> list[Change]:
        """An answer: when it ended, in seconds of any clock, its labels and its length."""
        self._first = ended if self._first is None else self._first
        hour = int((ended - self._first) / HOUR_S)
        changes = self._close(hour) if hour > self._hour else []
        self._now.answers += 1
        self._now.tokens += tokens
        self._now.squares += tokens * tokens
        self._now.labels.update(labels)
        return changes

    def _close(self, hour: int) -> list[Change]:
        changes = list(self._changes())
        told, self._told = self._told, {change.what for change in changes}
        if self._hour > 0:
            self._before.add(self._now)
        self._hour, self._now = hour, _Sum()
        return [change for change in changes if change.what not in told]

    def _changes(self) -> Iterable[Change]:
        now, before = self._now, self._before
        if min(now.answers, before.answers) < LEAST:
            return
        for label in sorted({*now.labels, *before.labels}):
            own, old = now.labels[label] / now.answers, before.labels[label] / before.answers
            all_of_them = (now.labels[label] + before.labels[label]) / (now.answers + before.answers)
            spread = sqrt(all_of_them * (1 - all_of_them) * (1 / now.answers + 1 / before.answers))
            much = max(own, old) >= TIMES * min(own, old) and abs(own - old) >= POINTS
            if much and abs(own - old) > DEVIATIONS * spread:
                yield Change(self._hour, label, own, old, now.answers)
        length, usual = now.length, before.length
        chance = sqrt(now.error + before.error)
        if max(length, usual) > LENGTH * min(length, usual) and abs(length - usual) > DEVIATIONS * chance:
            yield Change(self._hour, "length", length, usual, now.answers)

"""A run's time as a line to draw on: hours in which nothing ran are cut out, so that a night's stop takes no room."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tokenmill.reporting.columns import Floats

IDLE_S, IDLE_SHARE = 300.0, 0.04
"""A stop that is longer than both is cut out: five minutes, and this share of the time that the run was on."""

CUT_WIDTH = 0.02
"""What a cut takes of the line."""

MOST_CUTS = 12
"""Of a run that was stopped more often only the longest stops are cut."""

BINS = 240
"""Of all time: finer than the charts' pixels on a phone, and 4 minutes of a day."""

MINUTE, HOUR, DAY = 60, 3600, 86400
STEPS = (1, 5, 10, 30, *(n * MINUTE for n in (1, 2, 5, 10, 20, 30)), *(n * HOUR for n in (1, 2, 3, 6, 12)))
DAYS = (1, 2, 5, 10, 20, 50, 100)
TICKS = 6
"""At most, or their words would run into each other on a phone."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """`place` is from 0 to 1."""

    place: float
    text: str


@dataclass(frozen=True, slots=True)
class Clock:
    """`spans` are the stretches of time that are drawn, in Unix seconds, in order; between them are the cuts."""

    spans: tuple[Span, ...]

    @property
    def on_s(self) -> float:
        """Seconds that are drawn."""
        return sum(end - start for start, end in self.spans)

    @property
    def cuts(self) -> list[tuple[float, float]]:
        """The stops: their places, and their seconds."""
        stops = [(before[1], after[0]) for before, after in pairwise(self.spans)]
        return [((self.place(a) + self.place(b)) / 2, b - a) for a, b in stops]

    def place(self, moment: float) -> float:
        """Where a moment is drawn, from 0 to 1."""
        return float(self.places(np.array([moment]))[0])

    def places(self, moments: Floats) -> Floats:
        """The same of many moments."""
        width = CUT_WIDTH * (len(self.spans) - 1)
        known, at, places = [], 0.0, []
        for number, (start, end) in enumerate(self.spans):
            room = (1 - width) * (end - start) / self.on_s
            known += [start, end]
            places += [at + number * CUT_WIDTH, at + number * CUT_WIDTH + room]
            at += room
        return np.interp(moments, known, places)

    def bins(self, count: int, least_s: float = 1.0) -> list[Floats]:
        """Edges of about so many bins, of a second or more each, per span."""
        width = max(self.on_s / count, least_s)
        return [np.linspace(start, end, max(1, round((end - start) / width)) + 1) for start, end in self.spans]

    def ticks(self) -> list[Tick]:
        """Where the time is written."""
        step = next((step for step in STEPS if self.on_s / step <= TICKS), None)
        found: list[Tick] = []
        for start, end in self.spans:
            for moment in _round_times(start, end, step or DAY * _days(self.on_s)):
                tick = Tick(self.place(moment), _words(moment, step))
                if not found or tick.place - found[-1].place > 0.5 / TICKS:
                    found.append(tick)
        return found


def clock(intervals: Sequence[tuple[Floats, Floats]], least_s: float = 10.0) -> Clock:
    """The clock of all these intervals (begins, ends): what lies between them for long is cut out."""
    begins = np.concatenate([begin for begin, _ in intervals])
    ends = np.concatenate([end for _, end in intervals])
    if not begins.size:
        return Clock(((0.0, least_s),))
    order = np.argsort(begins)
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    gaps = begins[1:] - reached[:-1]
    idle = gaps > IDLE_S
    on_s = reached[-1] - begins[0] - gaps[idle].sum()
    places = np.flatnonzero(gaps > max(IDLE_S, IDLE_SHARE * on_s))
    places = np.sort(places[np.argsort(-gaps[places])][:MOST_CUTS])
    starts = [begins[0], *begins[places + 1]]
    finishes = [*reached[places], max(reached[-1], starts[-1] + least_s)]
    return Clock(tuple((float(a), max(float(b), float(a) + 1.0)) for a, b in zip(starts, finishes, strict=True)))


def _days(on_s: float) -> int:
    return next((days for days in DAYS if on_s / (days * DAY) <= TICKS), DAYS[-1])


def _round_times(start: float, end: float, step: float) -> list[float]:
    """Multiples of a step in local time."""
    offset = time.localtime(start).tm_gmtoff
    first = int(-(-(start + offset) // step))
    last = int((end + offset) // step)
    return [number * step - offset for number in range(first, last + 1)]


def _words(moment: float, step: float | None) -> str:
    local = time.localtime(moment)
    if step is None or (local.tm_hour, local.tm_min, local.tm_sec) == (0, 0, 0):
        return time.strftime("%b %-d", local)
    return time.strftime("%H:%M:%S" if step < MINUTE else "%H:%M", local)

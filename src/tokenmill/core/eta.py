"""How long it still takes, as a range: from the rates of the last minutes and how far they can be trusted. Pure.

Three things make an early guess wrong. Rates vary: the spread of several windows says how much. Short answers come
first: what is in flight is longer than what came, so as long as little has come the true rate is lower than the one
seen (renewal theory: of n answers, between -1/2 and about 1 of what is in flight are owed to that). And the last ones
are alone: nothing comes behind them to fill their slots.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

SPAN_S, ENOUGH = 300.0, 300
"""The rate is of the newest stretch that has both: so many seconds, and so many answers. Five minutes hold short and
long answers of a fast fleet; a slow one needs more time for a rate that means anything."""

HORIZON_S = 3600.0
"""What is older says little of now: servers have come and gone since."""

KEPT = 600
"""Looks kept; with more, every second one goes: an hour is kept at 6 s or finer."""

FEW = 10
"""Looks before anything is told: ten seconds."""

WINDOWS, SPREAD = 5, 2.8
"""Windows of the stretch, and how many standard errors of their mean hold it 95 times of 100 (Student, 4 degrees)."""

EARLY_LOW, EARLY_HIGH = 0.5, 1.0
"""Shares of what is in flight by which the answers so far may be too few or too many: (CV² - 1) / 2 of the lengths,
from equal ones to a deviation of 1.7 times the mean. Reasoning models: 0.8 to 1.5."""

TAIL = 5.0
"""The longest answer, in mean ones, which the last to begin may be: max_tokens 8192 against a mean of 1,600. By
Little's law, a mean one takes as long as a full fleet takes for as many as are in flight."""

LEAST_RATE = 0.2
"""Of the mean: where the rate might be lower than that, there is no upper end worth telling."""

STEADY = 0.1
"""Half the range, as a share of its middle: then one number tells it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds to go: likely, and from when to when; `high_s` is None while nothing bounds it."""

    likely_s: float
    low_s: float
    high_s: float | None

    @property
    def steady(self) -> bool:
        return is_steady(self.low_s, self.high_s)


def is_steady(low_s: float, high_s: float | None) -> bool:
    """Whether a range is narrow enough for one number."""
    return high_s is not None and high_s - low_s <= STEADY * (high_s + low_s)


class Eta:
    """Takes in how many have ended, about once a second, and tells how long the rest will take."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()
        self._first = 0
        self._most = 0
        self._gap_s = 0.5

    def note(self, now: float, done: int) -> None:
        """So many ids have a record at this moment, a steadily growing number of seconds."""
        looks = self._looks
        if not looks:
            self._first = done
        elif now - looks[-1][0] < self._gap_s:
            return
        looks.append((now, done))
        while now - looks[0][0] > HORIZON_S:
            looks.popleft()
        if len(looks) > KEPT:
            self._looks = deque(list(looks)[::2])
            self._gap_s *= 2

    def estimate(self, pending: int, in_flight: int) -> Estimate | None:
        """None where too little is known, or nothing came in the whole stretch."""
        looks = self._stretch()
        if len(looks) < FEW or not pending:
            return None
        rates = _rates(looks)
        mean = fmean(rates)
        if mean <= 0:
            return None
        spread = SPREAD * stdev(rates) / len(rates) ** 0.5 / mean
        early = in_flight / max(1, self._looks[-1][1] - self._first)
        most = mean * (1 + spread + EARLY_LOW * early)
        least = mean * (1 - spread - EARLY_HIGH * early)
        low = max(0.0, pending - in_flight / 2) / most
        self._most = max(self._most, in_flight)
        high = pending / least + TAIL * self._most / mean if least >= LEAST_RATE * mean else None
        return Estimate(pending / mean, low, high)

    def _stretch(self) -> list[tuple[float, int]]:
        """The newest looks that are long and rich enough, or all."""
        looks = list(self._looks)
        for start in range(len(looks) - 1, -1, -1):
            if looks[-1][0] - looks[start][0] >= SPAN_S and looks[-1][1] - looks[start][1] >= ENOUGH:
                return looks[start:]
        return looks


def _rates(looks: list[tuple[float, int]]) -> list[float]:
    """Answers a second in windows of equal length."""
    times = [moment for moment, _ in looks]
    width = (times[-1] - times[0]) / WINDOWS
    edges = [bisect_right(times, times[0] + width * number) - 1 for number in range(WINDOWS)] + [len(looks) - 1]
    return [(looks[b][1] - looks[a][1]) / max(times[b] - times[a], 1e-9) for a, b in pairwise(edges) if b > a]

"""A supervisor's sense of time: seconds of looking, and tokens a second."""

import time
from collections.abc import Callable

LOOK_S = 0.25
"""How often a server is looked at: a death must be known in less than 2 s."""

RATE_WINDOW_S = 60.0
"""Tokens a second are of the last minute: answers of 8,000 tokens come in lumps."""

SAMPLE_S = 1.0
"""Between two readings of the counter."""

UNWATCHED_S = 1.0
"""Between two looks, which come every LOOK_S: in a gap so long tokenmill itself did not run."""


class WatchClock:
    """Seconds of looking: while tokenmill itself was stopped (Ctrl-Z, a frozen container) no server was silent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._unwatched = 0.0

    def look(self) -> float:
        """The time now; to be called at every look."""
        moment = self._clock()
        gap, self._last = moment - self._last, moment
        if gap > UNWATCHED_S:
            self._unwatched += gap - LOOK_S
        return moment - self._unwatched

    @property
    def seen(self) -> float:
        """The time at the last look."""
        return self._last - self._unwatched


class Rate:
    """Of a counter that only grows, over the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: list[tuple[float, float]] = []

    def clear(self) -> None:
        self._samples = []

    def note(self, count: float) -> None:
        """The counter's value now."""
        moment = self._clock()
        if not self._samples or moment - self._samples[-1][0] >= SAMPLE_S:
            kept = [sample for sample in self._samples if moment - sample[0] < RATE_WINDOW_S]
            self._samples = [*kept, (moment, count)]

    @property
    def per_s(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return round((last - first) / (end - start), 1)

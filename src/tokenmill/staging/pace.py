"""How fast bytes come, in words, every few seconds: done of all, rate, time left."""

import time
from collections import deque
from collections.abc import Callable

from tokenmill.view import duration

Tell = Callable[[str], None]
TELL_EVERY_S = 2.0
WINDOW_S = 10.0
"""The rate is of the last seconds: a mount's first seconds say little about its last."""


class Pace:
    """Tells how far something is. `total` 0: nobody knows how much it will be."""

    def __init__(
        self, what: str, tell: Tell, every_s: float = TELL_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._tell, self._every_s, self._clock = what, tell, every_s, clock
        self._told = clock()
        self._seen: deque[tuple[float, int]] = deque([(self._told, 0)])

    def seen(self, done: int, total: int, more: str = "") -> None:
        """Takes in how many bytes there are; says so where the last word is old enough."""
        moment = self._clock()
        if moment - self._told < self._every_s:
            return
        self._told = moment
        self._seen.append((moment, done))
        while len(self._seen) > 2 and moment - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        rate = max(0.0, (last - first) / (end - start))
        words = [f"{self._what} {gigabytes(done)}" + (f" of {gigabytes(total)}" if total else ""), speed(rate)]
        if total and rate:
            words.append(f"{duration(max(0, total - done) / rate)} to go")
        self._tell(", ".join([*words, more] if more else words))

    def start_at(self, done: int) -> None:
        """What was there before counts for no rate."""
        self._seen = deque([(self._clock(), done)])


def gigabytes(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def speed(rate: float) -> str:
    """Bytes a second for a person."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"

"""The fastest that a server has been seen to be with all its slots full: its own closed-loop peak. Pure.

A rate here is (tokens ÷ seconds that their requests were at the server) × slots. With all slots full that is what a
bare closed loop gets, by Little's law, and what tokenmill does between two requests is not in it: a slow client cannot
lower the reference that it is measured by. Speeds are compared, not lengths, so heavy-tailed lengths cost no accuracy:
what differs from answer to answer is how long it is, hardly how fast its slot went.
"""

from math import sqrt
from statistics import stdev

import msgspec

FULL = 0.97
"""Slots at the server, of all, in a stretch that counts: below it they are the faster for their neighbours' absence."""

TURNS = 2
"""Answers per slot in a stretch, at least: every slot has begun anew in it."""

PIECES = 6
"""Of a stretch, whose spread tells how far its mean can be trusted."""


class Peak(msgspec.Struct, frozen=True):
    """Tokens a second with `width` slots, `error` its standard error. `full`: the share of slots that worked in that
    stretch of `seconds`; below FULL the rate is too high rather than too low. `context`: mean tokens of a request, half
    of its output counted."""

    per_s: float
    error: float
    width: int
    seconds: float
    answers: int
    full: float
    context: float

    @property
    def is_full(self) -> bool:
        return self.full >= FULL


class Stretches:
    """One server's answers, cut into stretches of at least `seconds`; the best of them is `peak`.

    One that was not full counts only as long as none was: so a reference is there where a client is too slow to fill
    its server, and is then too high. Noise is not chased: a stretch is better by more than its error, or it is not.
    """

    def __init__(self, seconds: float, now: float, peak: Peak | None = None) -> None:
        self.peak = peak
        self._seconds = seconds
        self._full_since = now
        self._begin(now, 0.0, 0.0)

    def restart(self, now: float, served: float, late: float) -> None:
        """With other slots: what came of requests from before does not tell."""
        self._full_since = now
        self._begin(now, served, late)

    def _begin(self, now: float, served: float, late: float) -> None:
        self._began, self._served, self._late = now, served, late
        self._pieces: list[tuple[int, float]] = []
        self._answers, self._context = 0, 0.0

    def note(self, now: float, asked: float, tokens: int, context: float) -> None:
        """An answer came that was asked for at `asked`. One from before the slots were full tells nothing."""
        spent = now - asked
        if asked < self._full_since or spent <= 0:
            return
        piece = int((now - self._began) * PIECES / self._seconds)
        self._pieces += [(0, 0.0)] * (piece + 1 - len(self._pieces))
        self._pieces[piece] = (self._pieces[piece][0] + tokens, self._pieces[piece][1] + spent)
        self._answers += 1
        self._context += context * spent

    def look(self, now: float, width: int, served: float, late: float) -> None:
        """Ends a stretch that is long enough. `served` and `late` are seconds of the server, since its beginning."""
        passed = now - self._began
        if passed < self._seconds or self._answers < TURNS * width:
            return
        at_server = served - self._served
        worked = at_server - (late - self._late)  # meanwhile answers lay unread, and their slots were empty
        full = worked / passed
        if worked > 0:
            self._weigh(width * at_server / worked, width, passed, full)
        if full < FULL:
            self._full_since = now
        self._begin(now, served, late)

    def _weigh(self, slots: float, width: int, passed: float, full: float) -> None:
        told = [(tokens, spent) for tokens, spent in self._pieces if spent]
        spent = sum(each for _, each in told)
        per_s = slots * sum(tokens for tokens, _ in told) / spent
        rates = [slots * tokens / each for tokens, each in told]
        error = stdev(rates) / sqrt(len(rates)) if len(rates) > 1 else per_s
        new = Peak(per_s, error, width, passed, self._answers, full, self._context / spent)
        if self.peak is None or _better(new, self.peak):
            self.peak = new


def _better(new: Peak, old: Peak) -> bool:
    fuller = min(new.full, FULL) - min(old.full, FULL)
    return fuller > 0 if fuller else new.per_s - new.error > old.per_s

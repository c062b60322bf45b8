"""Stops a bad run early, judged by cohort, so that short answers that come first mislead nobody.

A cohort is a group of ids by order of dispatch; cohort 0 is spread evenly over the prompt set and dispatched first.
It stops the run as soon as its verdict is inevitable (bad so far > allowed share × size) and passes when all have
ended. The gate counts; it never waits and never holds the fleet up.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmill.core.judge import TRUNCATED, Verdict
from tokenmill.core.records import NO_COHORT, PROMPT_FAULTS
from tokenmill.core.status import GateShare

ROUNDING = 1e-9  # 0.29 × 100 is 28.999…: a cohort at exactly its share is not above it


@dataclass(frozen=True, slots=True)
class Limits:
    """[gate]: the shares of a cohort that may be rejected, failed, truncated; 0 ≤ share ≤ 1."""

    cohort: int = 200
    max_rejected: float = 0.2
    max_failed: float = 0.05
    max_truncated: float = 0.5
    later_stops: bool = True


@dataclass(slots=True)
class Tally:
    size: int
    ended: int = 0
    rejected: int = 0
    failed: int = 0
    truncated: int = 0
    warned: bool = False
    labels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alarm:
    """One cohort's verdict: bad. `what` is rejected, failed or truncated; `stops` says whether the run must end."""

    cohort: int
    what: str
    bad: int
    size: int
    ended: int
    allowed: float
    labels: dict[str, int]
    stops: bool

    def __str__(self) -> str:
        labels = ", ".join(f"{name} {count}" for name, count in sorted(self.labels.items(), key=lambda kv: -kv[1]))
        return (
            f"cohort {self.cohort}: {self.bad} of {self.size} {self.what} after {self.ended} ended "
            f"(allowed: {self.allowed:.0%}){f'; labels: {labels}' if labels else ''}"
        )


class Gate:
    """Counts records by cohort. `observe` returns an alarm at most once per cohort."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tallies: dict[int, Tally] = {}

    def expect(self, cohort: int, size: int) -> None:
        """Says how many ids a cohort has; until told, it is taken to be full."""
        self._tally(cohort).size = size

    def observe(self, cohort: int, verdict: Verdict, labels: Iterable[str]) -> Alarm | None:
        """Counts one ended id; returns the cohort's alarm if that made it inevitable."""
        self.count(cohort, verdict, labels)
        return self.check(cohort) if cohort != NO_COHORT else None

    def count(self, cohort: int, verdict: Verdict, labels: Iterable[str]) -> None:
        """Counts one ended id, and judges nothing: at a start all that is stored comes first."""
        if cohort == NO_COHORT:
            return
        tally = self._tally(cohort)
        names = tuple(labels)
        tally.ended += 1
        if verdict is Verdict.ACCEPTED and not names:
            return  # nearly all are
        for name in names:
            if verdict is not Verdict.ACCEPTED or name in TRUNCATED:
                tally.labels[name] = tally.labels.get(name, 0) + 1
        tally.rejected += verdict is Verdict.REJECTED
        tally.failed += verdict is Verdict.FAILED and PROMPT_FAULTS.isdisjoint(names)
        tally.truncated += not TRUNCATED.isdisjoint(names)

    def take_back(self, cohort: int, verdict: Verdict, labels: Iterable[str]) -> None:
        """Forgets an ended id: another record of it is about to be counted."""
        tally = self._tally(cohort)
        names = tuple(labels)
        tally.ended -= 1
        for name in names:
            if verdict is not Verdict.ACCEPTED or name in TRUNCATED:
                tally.labels[name] -= 1
        tally.labels = {name: count for name, count in tally.labels.items() if count}
        tally.rejected -= verdict is Verdict.REJECTED
        tally.failed -= verdict is Verdict.FAILED and PROMPT_FAULTS.isdisjoint(names)
        tally.truncated -= not TRUNCATED.isdisjoint(names)

    def check(self, cohort: int) -> Alarm | None:
        """The cohort's alarm, if its verdict is inevitable by now."""
        tally = self._tally(cohort)
        bad = self._bad(tally)
        if bad is None or tally.warned:
            return None
        tally.warned = True
        what, count, allowed = bad
        stops = cohort == 0 or self.limits.later_stops
        return Alarm(cohort, what, count, tally.size, tally.ended, allowed, dict(tally.labels), stops)

    def _tally(self, cohort: int) -> Tally:
        if cohort not in self.tallies:
            self.tallies[cohort] = Tally(size=self.limits.cohort)
        return self.tallies[cohort]

    def shares(self) -> tuple[GateShare, ...]:
        """How near each count is to what is allowed; empty before anything has ended."""
        tallies = [tally for tally in self.tallies.values() if tally.ended > 0]
        ended, limits, found = sum(tally.ended for tally in tallies), self.limits, list[GateShare]()
        for what, allowed in (
            ("rejected", limits.max_rejected),
            ("failed", limits.max_failed),
            ("truncated", limits.max_truncated),
        ):
            bad: list[int] = [getattr(tally, what) for tally in tallies]
            worst = max((count / max(tally.size, 1) for count, tally in zip(bad, tallies, strict=True)), default=0.0)
            found.append(GateShare(what, round(sum(bad) / max(ended, 1), 4), allowed, round(worst, 4)))
        return tuple(found) if tallies else ()

    def _bad(self, tally: Tally) -> tuple[str, int, float] | None:
        """Cohorts of merged runs hold those of all shards: more have ended than a cohort has."""
        for what, count, allowed in (
            ("failed", tally.failed, self.limits.max_failed),
            ("rejected", tally.rejected, self.limits.max_rejected),
            ("truncated", tally.truncated, self.limits.max_truncated),
        ):
            if count > allowed * max(tally.size, tally.ended) + ROUNDING:
                return what, count, allowed
        return None

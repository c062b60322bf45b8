"""Tokens a second as a share of the servers' own peak, and what the rest is: parts that add up to it, always. Pure.

share = speed × time at the servers ÷ (peak × time). So what is missing is the time in which slots were not at a server,
cause by cause, and what full slots were slower by than at their peak. Where fewer slots made the others faster, empty
ones cost less than their time, and the parts are scaled to what is missing.
"""

from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from tokenmill.core.occupancy import Work
from tokenmill.core.peak import Peak

RECENT_S, EVERY_S = 300.0, 5.0
"""What `now` means, and how finely it is kept: a minute holds few answers of 8,000 tokens."""

LONGER = 1.1
"""Contexts so many times as long as at the peak are what slows full slots down, before anything else is suspected."""

TOLD = 0.001
"""A part below this is not told."""

PARTS = {
    "queue": "no prompts waiting",
    "end": "the last prompts",
    "store": "answers waiting to be stored",
    "client": "tokenmill itself",
    "restarts": "servers away",
    "failed": "requests without answer",
    "contexts": "longer contexts",
    "slower": "servers slower",
}
"""What may be missing, and how it is called."""


class Efficiency(msgspec.Struct, frozen=True):
    """Since this start, and `now` over the last five minutes: shares of `peak_tokens_per_s`, whose relative standard
    error is `error`; None where no server has shown its peak yet. `missing` and `missing_now`: PARTS, as shares.
    `measured` of `servers` have shown their peak, the others are taken for their like. `is_full`: they were full then;
    else the peak is too high and the share too low. `context` is that of requests, as a multiple of that at the peak.
    """

    share: float | None = None
    now: float | None = None
    peak_tokens_per_s: float = 0.0
    error: float = 0.0
    measured: int = 0
    servers: int = 0
    is_full: bool = True
    context: float | None = None
    missing: dict[str, float] = {}
    missing_now: dict[str, float] = {}


class Spent(msgspec.Struct, frozen=True):
    """A server's work, and what of its idle time was the run's end."""

    work: Work = Work()
    ending: float = 0.0

    def less(self, other: "Spent") -> "Spent":
        return Spent(self.work.plus(other.work, -1), self.ending - other.ending)


class Meter:
    """Fed with what servers say of their work since they began, which a node that comes anew begins again."""

    def __init__(self) -> None:
        self._last: dict[str, Work] = {}
        self._sums: dict[str, Spent] = {}
        self._peaks: dict[str, Peak] = {}
        self._kept: deque[tuple[float, dict[str, Spent]]] = deque()

    def look(self, now: float, works: Mapping[str, tuple[Work, Peak | None]], *, ending: bool) -> None:
        """`ending`: all prompts that are left are in flight."""
        for name, (work, peak) in works.items():
            last = self._last.get(name, work)
            more = work.plus(last if work.seconds >= last.seconds else Work(), -1)
            known = self._sums.get(name, Spent())
            self._sums[name] = Spent(known.work.plus(more), known.ending + (more.idle if ending else 0.0))
            self._last[name] = work
            if peak is not None:
                self._peaks[name] = peak
        if not self._kept or now - self._kept[-1][0] >= EVERY_S:
            self._kept.append((now, dict(self._sums)))
        while len(self._kept) > 1 and now - self._kept[1][0] >= RECENT_S:
            self._kept.popleft()

    @property
    def efficiency(self) -> Efficiency | None:
        """None where no server's work is measured, or none has been seen yet."""
        if not self._sums:
            return None
        servers, peaks = len(self._sums), list(self._peaks.values())
        if not peaks:
            return Efficiency(servers=servers)
        usual = sum(peak.per_s for peak in peaks) / len(peaks)
        rates = {name: self._peaks[name].per_s if name in self._peaks else usual for name in self._sums}
        before = self._kept[0][1]
        recent = {name: spent.less(before.get(name, Spent())) for name, spent in self._sums.items()}
        context = self._context()
        share, missing = self._shares(self._sums, rates, context)
        now, missing_now = self._shares(recent, rates, context)
        return Efficiency(
            share=share,
            now=now,
            peak_tokens_per_s=round(sum(rates.values()), 1),
            error=round(sum(peak.error**2 for peak in peaks) ** 0.5 / sum(peak.per_s for peak in peaks), 4),
            measured=len(peaks),
            servers=servers,
            is_full=all(peak.is_full for peak in peaks),
            context=None if context is None else round(context, 2),
            missing=missing,
            missing_now=missing_now,
        )

    def _context(self) -> float | None:
        now = sum(self._sums[name].work.context for name in self._peaks)
        then = sum(self._sums[name].work.spent * peak.context for name, peak in self._peaks.items())
        return now / then if then else None

    def _shares(
        self, sums: Mapping[str, Spent], rates: Mapping[str, float], context: float | None
    ) -> tuple[float | None, dict[str, float]]:
        """The share of the peak, and the parts of what is missing, the greatest first."""
        possible = sum(rates[name] * spent.work.seconds for name, spent in sums.items())
        if possible <= 0:
            return None, {}
        made = sum(self._made(name, spent.work, rates[name]) for name, spent in sums.items())
        lost = dict.fromkeys(PARTS, 0.0)
        at_servers = 0.0
        for name, spent in sums.items():
            rate, work = rates[name], spent.work
            lost["queue"] += rate * (work.idle - spent.ending)
            lost["end"] += rate * spent.ending
            lost["store"] += rate * work.store
            lost["client"] += rate * (work.client + work.late)
            lost["restarts"] += rate * work.away
            lost["failed"] += rate * work.failed
            at_servers += rate * (work.served - work.late)
        lost["contexts" if context is not None and context >= LONGER else "slower"] = max(at_servers - made, 0.0)
        return made / possible, _scaled(lost, possible - made, possible)

    def _made(self, name: str, work: Work, rate: float) -> float:
        """Tokens, those of requests that go on by the speed of those that ended."""
        if work.spent > 0:
            return work.tokens / work.spent * work.slots
        whole = self._sums[name].work
        if not whole.spent or work.served > 2 * whole.spent / whole.answers:
            return 0.0 if whole.spent else rate * work.served  # nothing came, for longer than answers take
        return whole.tokens / whole.spent * work.slots


def _scaled(lost: Mapping[str, float], missing: float, possible: float) -> dict[str, float]:
    whole = sum(max(part, 0.0) for part in lost.values())
    if missing <= 0 or whole <= 0:
        return {}
    shares = {name: max(part, 0.0) * missing / whole / possible for name, part in lost.items()}
    return dict(sorted(shares.items(), key=lambda each: -each[1]))


def of_peak(found: Efficiency | None) -> Iterator[str]:
    """In words: the share, then each part of what is missing that is worth one, the greatest first."""
    if found is None or found.share is None:
        return
    now = f", now {found.now:.0%}" if found.now is not None else ""
    yield f"{'' if found.is_full else 'at least '}{found.share:.1%} of the servers' peak{now}"
    parts = [f"{PARTS[name]} {share:.1%}" for name, share in found.missing.items() if share >= TOLD]
    yield from (f"{'' if number else 'missing: '}{part}" for number, part in enumerate(parts))


def words(found: Efficiency | None) -> str:
    """In a line; empty where nothing is measured."""
    if found is None:
        return ""
    share, *parts = [*of_peak(found)] or ["the servers' peak is not known yet: none has been full for long enough"]
    return "; ".join(filter(None, (share, ", ".join(parts))))

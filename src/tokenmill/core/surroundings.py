"""Trouble that comes from outside: one cause on half the servers at once. Pure; the node feeds it and obeys.

A mount that is away for 20 minutes, a full disk, a driver that is gone: no server can help it, and each would use up
its restarts in vain. So its failures are not charged, one server at a time sees whether all is well again, and when it
is ready the others follow. How long that may go on is fleet.give_up's to say.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from tokenmill.core.server import Failure, Restart

WINDOW_S = 120.0
"""Failures so close together have one cause if they say the same: servers die of a mount one after another."""

FIRST_S = 5.0
"""Before the first try; doubles with each."""

MOST = 60.0
"""Times the first: 5 minutes. An outage of 20 minutes costs 5 more at the most."""

HOUR_S = 3600.0

SPELLS = 3
"""In an hour, of one cause: servers that are ready in between and die again of the same are charged like any other. An
outage does not come and go so often, a fault that all servers share does."""

_OF_OUTSIDE = frozenset({Restart.BACKOFF, Restart.ONCE, Restart.WAIT})
"""What other ports, less memory or another config would mend is not the surroundings'."""

_NUMBERS = re.compile(r"\d[\d.,]*")
"""Two hangs at 40 % and at 43 % are one cause."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One failure that might be of outside: `cause` is its kind and its words without numbers."""

    at: float
    index: int
    cause: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`cause` is what hits the servers, empty where all is well; `waiting` are held, the next to try first; `spells`
    when which cause began, in the last hour."""

    recent: tuple[Trouble, ...] = ()
    cause: str = ""
    words: str = ""
    since: float = 0.0
    waiting: tuple[int, ...] = ()
    trying: int | None = None
    tries: int = 0
    next_at: float = 0.0
    first_s: float = FIRST_S
    spells: tuple[tuple[float, str], ...] = ()

    @property
    def story(self) -> str:
        """For a person, and for the last words of a run that gives up; empty where all is well."""
        if not self.cause:
            return ""
        return f"one cause on {len(self.waiting) + (self.trying is not None)} servers at once: {self.words}"


Change = tuple[Surroundings, tuple[int, ...]]
"""What they are now, and the servers to hold or to release."""


def failed(now_known: Surroundings, index: int, failure: Failure, now: float, servers: Collection[int]) -> Change:
    """A server's life has ended; `servers` are all that are not given up. Returns those to hold."""
    known = without(now_known, index)
    cause = f"{failure.kind}: {_NUMBERS.sub('#', failure.cause)}"
    if known.cause == cause:
        wait = known.first_s * min(2.0 ** min(known.tries, 30), MOST)
        later = max(known.next_at, now + wait) if now_known.trying == index else known.next_at
        return replace(known, waiting=(*known.waiting, index), next_at=later), (index,)
    if failure.restart not in _OF_OUTSIDE:
        return known, ()
    recent = (*(trouble for trouble in known.recent if now - trouble.at < WINDOW_S), Trouble(now, index, cause))
    alike = tuple(t.index for t in recent if t.cause == cause and t.index in servers)
    if len(alike) < 2 or len(alike) * 2 < len(servers):
        return replace(known, recent=recent), ()
    spells = tuple(spell for spell in known.spells if now - spell[0] < HOUR_S)
    if sum(before == cause for _, before in spells) >= SPELLS:
        return replace(known, recent=recent), ()
    held = (*known.waiting, *(other for other in alike if other not in known.waiting))
    first_s, spells = known.first_s, (*spells, (now, cause))
    return Surroundings((), cause, failure.cause, now, held, None, 0, now + first_s, first_s, spells), alike


def look(known: Surroundings, now: float) -> Change:
    """Time goes on: returns the one server whose turn it is to be tried, if there is one."""
    if known.trying is not None or not known.waiting or now < known.next_at:
        return known, ()
    first, *rest = known.waiting
    return replace(known, waiting=tuple(rest), trying=first, tries=known.tries + 1), (first,)


def ready(known: Surroundings, index: int) -> Change:
    """A server is ready. The trouble is over if it was one of those that it had hit: returns all that waited."""
    if index == known.trying or index in known.waiting:
        well = Surroundings(first_s=known.first_s, spells=known.spells)
        return well, tuple(other for other in known.waiting if other != index)
    return without(known, index), ()


def without(known: Surroundings, index: int) -> Surroundings:
    """Forgets a server's trouble, and does not wait for it: its place cannot be used, or it has come back by itself."""
    return replace(
        known,
        recent=tuple(trouble for trouble in known.recent if trouble.index != index),
        waiting=tuple(other for other in known.waiting if other != index),
        trying=None if known.trying == index else known.trying,
    )

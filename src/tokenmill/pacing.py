"""How many requests one server is given at once, through all its lives: core/pace at work.

Where the config says a number, or the engine runs what it says and no more, that is it. Else trials find it.
"""

import time

from tokenmill.attempt import Lane
from tokenmill.core import capacity
from tokenmill.core.pace import Pace, Seen
from tokenmill.events import Event, now
from tokenmill.job import Job
from tokenmill.sight import Sight

TOLD = 0.1
"""A change of how many a server takes at once that is worth a line."""


class Pacing:
    """Of one server, by its `name`."""

    def __init__(self, job: Job, name: str) -> None:
        self._job = job
        self._name = name
        self._pace: Pace | None = None
        self._told = 0

    def begin(self, limits: capacity.Limits, start: int, why: str, sight: Sight) -> tuple[int, str]:
        """With how many a life begins, and what limits them: as an earlier one has come to, or `start`, `why`."""
        if self._job.config.generation.concurrency != "auto":
            return start, why
        most = self._job.most_in_flight
        ceiling = min(capacity.ceiling(limits) or most, most)
        if self._pace is not None:
            self._pace.begin(ceiling)
        elif start < ceiling:
            self._pace, self._told = Pace(start, ceiling), start
        if self._pace is not None and self._pace.base != start:
            return self._pace.base, "what trials have proved"
        if limits.guess and not sight.sighted:
            return start, f"{why}: nothing shows how many it runs. generation.concurrency = N says it"
        return start, f"{why} at first, trials follow" if self._pace is not None else why

    def look(self, lane: Lane, sight: Sight) -> None:
        """To be called at every look at a server that has a lane."""
        seen = _seen(lane, sight, time.monotonic())
        if self._pace is None or lane.held or seen is None:
            return
        target = self._pace.look(seen)
        if target != lane.capacity:
            self._job.pump.resize(lane, target)
        found = self._pace.found or self._told
        if abs(found - self._told) > TOLD * self._told:
            words = f"it takes {found} requests at once now, as trials proved; {self._told} before"
            self._job.tell(Event(now(), "pace", words, self._name))
            self._told = found


def _seen(lane: Lane, sight: Sight, at: float) -> Seen | None:
    """What shows how many it has begun, None where nothing does. An engine's counters know of everybody's requests,
    streams of ours."""
    if sight.streams:
        return Seen(at, lane.in_flight, lane.answered, lane.begun, tokens=lane.seen)
    load = sight.load
    if load is None or load.running is None:
        return None
    return Seen(at, lane.in_flight, lane.answered, load.running, queued=load.queued)

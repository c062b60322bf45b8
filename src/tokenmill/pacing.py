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


SAY = "generation.concurrency = N, as many as that server runs at once"


class Pacing:
    """Of one server, by its `name`."""

    def __init__(self, job: Job, name: str) -> None:
        self._job = job
        self._name = name
        self._pace: Pace | None = None
        self._told = 0

    def begin(self, limits: capacity.Limits, start: int, sight: Sight) -> int:
        """With how many a life begins: with what an earlier one has come to, or with `start`."""
        if self._job.config.generation.concurrency != "auto":
            return start
        if not _shows(sight):
            if limits.guess:
                words = f"nothing shows how many requests it runs: {start} at once, an assumption"
                self._job.tell(Event(now(), "pace", words, self._name, "warn", fix=SAY))
            return start
        most = self._job.most_in_flight
        ceiling = min(capacity.ceiling(limits) or most, most)
        if self._pace is not None:
            self._pace.begin(ceiling)
        elif start < ceiling:
            self._pace, self._told = Pace(start, ceiling), start
        return self._pace.base if self._pace is not None else start

    def look(self, lane: Lane, sight: Sight) -> None:
        """To be called at every look at a server that has a lane."""
        if self._pace is None or lane.held or not _shows(sight):
            return
        target = self._pace.look(_seen(lane, sight, time.monotonic()))
        if target != lane.capacity:
            self._job.pump.resize(lane, target)
        found = self._pace.found or self._told
        if abs(found - self._told) > TOLD * self._told:
            words = f"it takes {found} requests at once now, as trials proved; {self._told} before"
            self._job.tell(Event(now(), "pace", words, self._name))
            self._told = found


def _shows(sight: Sight) -> bool:
    """Whether it is seen how many requests the server has begun."""
    return sight.streams or (sight.load is not None and sight.load.running is not None)


def _seen(lane: Lane, sight: Sight, at: float) -> Seen:
    """An engine's counters know of everybody's requests, streams of ours."""
    if sight.streams:
        return Seen(at, lane.in_flight, lane.answered, lane.begun, tokens=lane.seen)
    assert sight.load is not None, "asked only where it shows"
    assert sight.load.running is not None
    return Seen(at, lane.in_flight, lane.answered, sight.load.running, queued=sight.load.queued)

"""How a run went: a line every ten seconds in history.jsonl, from which the page and the report draw their charts.

Append-only, over all starts of a run. A full disk loses a line, never the run; a torn line is skipped.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenmill import linefile
from tokenmill.core.status import RunStatus

EVERY_S = 10.0
"""0.4 KB a line with 8 servers: 3.5 MB a day. A finer view of a run of days would show nothing more."""


class ServerMoment(msgspec.Struct, frozen=True, array_like=True):
    """One server, as in core.status.ServerStatus: rates are tokens a second over the last minute."""

    name: str
    state: str
    in_flight: int
    capacity: int
    tokens_per_s: float
    accept_length: float | None = None
    restarts: int = 0


class Moment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The run at Unix time `t`. Counts are of ids, since the run's first start; `tokens` since this start.

    `slots_busy` is the share of slots in use at that moment, None where no server is ready; `efficiency` the share of
    the servers' peak over the last five minutes, None where that is not known.
    """

    t: float
    state: str
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    pending: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    slots_busy: float | None = None
    labels: dict[str, int] = {}
    efficiency: float | None = None
    servers: tuple[ServerMoment, ...] = ()


def moment(status: RunStatus) -> Moment:
    """What history keeps of a status."""
    counts = status.prompts
    in_flight = sum(server.in_flight for server in status.servers)
    capacity = sum(server.capacity for server in status.servers)
    return Moment(
        t=round(status.updated, 1),
        state=status.state,
        accepted=counts.accepted,
        rejected=counts.rejected,
        failed=counts.failed,
        pending=counts.pending,
        tokens=status.tokens,
        tokens_per_s=status.tokens_per_s,
        slots_busy=round(in_flight / capacity, 3) if capacity else None,
        labels=status.labels,
        efficiency=round(now, 3) if status.efficiency and (now := status.efficiency.now) is not None else None,
        servers=tuple(
            ServerMoment(
                server.name,
                server.state,
                server.in_flight,
                server.capacity,
                server.tokens_per_s,
                server.accept_length,
                server.restarts,
            )
            for server in status.servers
        ),
    )


class History:
    """Appends a moment when the last one is old enough, and at each change of the run's state."""

    def __init__(self, path: Path, every_s: float = EVERY_S) -> None:
        self._path = path
        self._every_s = every_s
        self._due = 0.0
        self._state = ""

    def note(self, status: RunStatus) -> None:
        """Takes in a status, at any rate."""
        if status.state == self._state and time.monotonic() < self._due:
            return
        self._state, self._due = status.state, time.monotonic() + self._every_s
        try:
            linefile.append(self._path, msgspec.json.encode(moment(status)))
        except OSError:
            pass  # the store says it if the disk is full


_decode = msgspec.json.Decoder(Moment)


def read(path: Path, start: int = 0) -> Iterator[tuple[Moment, int]]:
    """Moments from a byte offset on, each with the offset behind it."""
    return linefile.read(path, _decode, start)


class Thinned:
    """Of many moments at most `points` and at least half as many, evenly by line; the newest is always among them."""

    def __init__(self, points: int = 600) -> None:
        self._points = points
        self._step = 1
        self._seen = 0
        self._kept: list[Moment] = []
        self._newest: Moment | None = None

    def add(self, moment: Moment) -> None:
        """Takes in the next moment."""
        self._newest = moment
        if self._seen % self._step == 0:
            self._kept.append(moment)
            if len(self._kept) >= self._points:
                self._kept = self._kept[::2]
                self._step *= 2
        self._seen += 1

    def moments(self) -> list[Moment]:
        """In their order."""
        if self._newest is None or self._newest is self._kept[-1]:
            return list(self._kept)
        return [*self._kept, self._newest]


def thinned(path: Path, points: int = 600) -> list[Moment]:
    """All of a run in at most `points` moments, for charts."""
    found = Thinned(points)
    for moment, _ in read(path):
        found.add(moment)
    return found.moments()

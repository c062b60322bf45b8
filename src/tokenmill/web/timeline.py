"""When each server was in which state, from a run's events; and when nobody ran the run. Pure."""

from collections import deque

import msgspec

from tokenmill.events import Event
from tokenmill.history import EVERY_S, Moment

KEPT = 500
"""Changes kept a server: at five restarts an hour, a day of them."""

GAP_S = 6 * EVERY_S
"""Without a moment for so long, tokenmill was not there."""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """At Unix time `t` the server came into this state."""

    t: float
    state: str


class Timeline:
    """Takes in events and moments in their order."""

    def __init__(self) -> None:
        self.servers: dict[str, deque[Change]] = {}
        self.gaps: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._last = 0.0

    def event(self, event: Event) -> None:
        """An event of kind `state` is a change."""
        if event.change is not None:
            changes = self.servers.setdefault(event.server, deque(maxlen=KEPT))
            changes.append(Change(event.t, event.change[1]))

    def moment(self, moment: Moment) -> None:
        """Two moments that lie far apart have a gap between them."""
        if self._last and moment.t - self._last > GAP_S:
            self.gaps.append((self._last, moment.t))
        self._last = moment.t

"""A node's servers taken together: whether enough of them serve, whether trouble is of outside, when to give up.

Decides nothing about one server, which is core/lifecycle's to do, and nothing about trouble of outside, which is
core/surroundings': it feeds that and hands its answers to the supervisors.
"""

import time
from collections.abc import Callable, Collection

from tokenmill.config import Config
from tokenmill.core import server as core
from tokenmill.core import surroundings
from tokenmill.core.server import FailureKind, State
from tokenmill.core.surroundings import Surroundings
from tokenmill.errors import GateError, NoServerError
from tokenmill.folder import RunFolder
from tokenmill.plain import duration
from tokenmill.supervise import Supervisor

Say = Callable[[str, str, str, str], None]
"""Kind, text, level, fix of an event of the node's own."""

_FAILED = core.WAITING | {State.FAILED}
"""What a life ends in that was not ended on request."""


class Fleet:
    """`supervisors` are the node's, and may be empty until it is prepared."""

    def __init__(self, config: Config, folder: RunFolder, supervisors: list[Supervisor], say: Say) -> None:
        self._config = config
        self._folder = folder
        self._supervisors = supervisors
        self._say = say
        self._began = False
        self._without_since = time.monotonic()
        self._surroundings = Surroundings(first_s=config.fleet.backoff)

    def begins(self) -> None:
        """From now on it counts how long no server serves."""
        self._without_since = time.monotonic()

    @property
    def serves(self) -> bool:
        """Whether generation has begun: with `min_ready` servers, or with all that can still come."""
        if not self._began:
            ready = core.fleet(self.servers).ready
            coming = sum(server.state not in core.FINAL | {State.QUARANTINED} for server in self.servers)
            self._began = ready > 0 and ready >= min(self._config.fleet.min_ready, coming)
        return self._began

    @property
    def servers(self) -> tuple[core.Server, ...]:
        return tuple(supervisor.server for supervisor in self._supervisors)

    def moved(self, supervisor: Supervisor, before: State) -> bool:
        """A server's life has ended, or it is ready: is all well again? Whether its end was the doing of outside."""
        index, server, moment = supervisor.place.index, supervisor.server, time.monotonic()
        known = self._surroundings
        if before in core.LIVE and server.state in _FAILED and server.failure is not None:
            living = [other.place.index for other in self._supervisors if other.server.state not in core.FINAL]
            self._surroundings, held = surroundings.failed(known, index, server.failure, moment, living)
            self._post([other for other in held if other != index], core.Hold())
            if self._surroundings.cause != known.cause:
                words = f"{self._surroundings.story}; not charged to them: one at a time is tried until all is well"
                self._say("surroundings", words, "warn", server.failure.fix)
            return index in held
        if server.state is State.QUARANTINED:
            self._surroundings = surroundings.without(known, index)
        elif before is State.CANARY and server.state is State.READY:
            self._surroundings, released = surroundings.ready(known, index)
            self._post(released, core.Release())
            if known.story and not self._surroundings.story:
                tries = "1 try" if known.tries == 1 else f"{known.tries} tries"
                words = f"well again after {duration(moment - known.since)} and {tries}"
                self._say("surroundings", words, "info", "")
        return False

    def _post(self, indexes: Collection[int], event: core.Event) -> None:
        for supervisor in self._supervisors:
            if supervisor.place.index in indexes:
                supervisor.post(event)

    def look(self) -> None:
        """Raises NoServerError where none can be kept or give_up is over, GateError where all show the wrong mode."""
        self._surroundings, tried = surroundings.look(self._surroundings, time.monotonic())
        self._post(tried, core.Release())
        state = core.fleet(self.servers)
        if state.hopeless:
            raise self._hopeless()
        give_up = self._config.fleet.give_up
        if state.ready:
            self._without_since = time.monotonic()
        elif time.monotonic() - self._without_since > give_up:
            story = f"{self._surroundings.story}; " if self._surroundings.story else ""
            words = f"no server for give_up = {duration(give_up)}; {story}{self._last_failures()}"
            raise NoServerError(words, fix=f"tokenmill logs {self._folder.path}")

    def _hopeless(self) -> NoServerError | GateError:
        failures = [server.failure for server in self.servers if server.failure]
        first = next(iter(failures), None)
        fix = next((failure.fix for failure in failures if failure.fix), f"tokenmill logs {self._folder.path}")
        if first is not None and all(failure.kind is FailureKind.WRONG_MODE for failure in failures):
            return GateError(f"every server shows the wrong mode: {first}", fix=fix)
        return NoServerError(f"no server could be started: {self._last_failures()}", fix=fix)

    def _last_failures(self) -> str:
        found: dict[str, list[str]] = {}
        for supervisor in self._supervisors:
            if supervisor.server.failure is not None:
                found.setdefault(str(supervisor.server.failure), []).append(supervisor.name)
        told = (f"server {', '.join(names)}: {words}" for words, names in found.items())
        return "; ".join(told) or "no failure was seen"

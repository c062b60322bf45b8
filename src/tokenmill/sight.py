"""How one server's tokens are seen as they come: by the counters of its metrics page, or in answers that it streams.

Decided once a life, in the canary: counters count once they have been seen to move (some pages never do), answers are
streamed where there are none and a trial loses no ids by it.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from tokenmill.core import server as core
from tokenmill.core import speculation
from tokenmill.engines.base import Engine, Load

PATIENCE_S = 5.0
"""For a metrics page, at least; a loaded Python server may hold its loop for seconds. Up to the stall timeout:
llama.cpp's waits for the batch that is being computed."""

Ask = Callable[[str, float], Awaitable[bytes | None]]
"""A path and a time in seconds → the page, None where it does not come."""


class Sight:
    """`path` of the metrics page, empty where there is none. `load` is what it last said; `words` is how tokens are
    seen, empty until that was decided. `accept_length` as metrics tell it, None where they do not.
    """

    def __init__(
        self, engine: Engine, path: str, ask: Ask, post: Callable[[core.Event], None], stall_timeout: float
    ) -> None:
        self.streams = False
        self.counters = False
        self.words = ""
        self.load: Load | None = None
        self.accept_length: float | None = None
        self._engine = engine
        self._path = path
        self._ask = ask
        self._post = post
        self._patience_s = max(PATIENCE_S, stall_timeout)
        self._seen = self._last_seen = 0
        self._reports: list[float] = []
        self._log_reports = False

    @property
    def sighted(self) -> bool:
        """Whether this server's tokens are seen as they come."""
        return self.counters or self.streams

    @property
    def has_counters(self) -> bool:
        """Whether its page has any, moving or not."""
        return self.load is not None and self.load.tokens is not None

    async def look(self) -> None:
        """Reads its metrics page; counters that have moved are progress."""
        page = await self._ask(self._path, self._patience_s) if self._path and not self.streams else None
        if page is None:
            if self.load is not None:  # its slots may be free by now
                self.load = dataclasses.replace(self.load, running=None, queued=None)
            return
        last, self.load = self.load, self._engine.load(page.decode("utf-8", "replace"))
        if self.load.tokens is not None and last is not None and self.load.tokens != last.tokens:
            self.counters = True
            self._post(core.Progress(strong=True))
            if self.load.accept_length is not None and not self._log_reports:
                self._reports.append(self.load.accept_length)
        if self.load.accept_length is not None:
            self.accept_length = self.load.accept_length

    def see(self) -> None:
        """A piece of an answer came, with tokens."""
        self._seen += 1

    def note(self) -> None:
        """Tokens that came in pieces, in the canary and in probes, are progress; the pump's are the supervisor's."""
        if self._seen != self._last_seen:
            self._last_seen = self._seen
            self._post(core.Progress(strong=True))

    def read(self, lines: Sequence[str]) -> None:
        """New lines of its log: they may tell accept lengths, which are fresher than those of the metrics."""
        told = [length for line in lines if (length := speculation.told(line)) is not None]
        self._log_reports = self._log_reports or bool(told)
        self._reports += told

    @property
    def reported(self) -> float | None:
        """The accept length that its metrics, or the log's last reports, tell; None where nothing does."""
        if self.accept_length is not None or not self._reports:
            return self.accept_length
        return sum(self._reports) / len(self._reports)

    def take_reports(self) -> list[float]:
        """The accept lengths told since the last call."""
        told, self._reports = self._reports, []
        return told

    async def choose(self, why_not_streamed: Callable[[], Awaitable[str]]) -> None:
        """Decides; `why_not_streamed` makes a trial and says what is lost by it, empty where nothing is."""
        await self.look()
        why_not = "" if self.counters else await why_not_streamed()
        if not self.counters:
            await self.look()  # SGLang's counters stand on the page after the first generation
        self.streams = not why_not and not self.counters
        if self.counters:
            self.words = "its token counters move"
        elif self.streams:
            self.words = "it has no token counters, so its answers are streamed"
        else:
            self.words = f"its tokens are not seen: it has no counters, and {why_not}"

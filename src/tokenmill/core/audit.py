"""Does speculation pay, and does each server do what the others do? Answers and reports in, findings out.

Accept length is what an engine says of itself, in answers or in reports (log lines, metrics); 1.0 is no draft accepted.
Rates are tokens a second of one answer. A server is compared with the median of the others, so that prompts which get
harder for all of them are nobody's fault. A figure that is far off from the start is told and no more: an unlike card.
One that was like the others' and then was far below for ten minutes says that the server has gone bad: once per
figure and server, since a restart that did not help would not help again. (Rejected answers: drift.py.)
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median
from typing import NamedTuple

from tokenmill.core import speculation
from tokenmill.core.status import Finding


class FindingKind(StrEnum):
    ABSENT = "speculation_absent"  # asked for, and no sign of it
    USELESS = "speculation_useless"  # no draft is accepted: slower than without
    UNLIKE = "speculation_unlike"  # not as the other servers
    MAXIMAL = "speculation_maximal"  # every draft is accepted: too good
    SLOW = "server_slow"  # far fewer tokens a second than the others
    WENT_BAD = "server_went_bad"


LONG_TOKENS = 32
"""A shorter answer's accept length and rate are mostly chance and prefill."""

ANSWERS, LEAST_ANSWERS = 200, 50
"""Of one server: how many are looked at, and how few tell nothing."""

REPORTS, LEAST_REPORTS = 500, 200
"""Decode reports alike; the 200 are facts of SGLang's, a report each 40 steps."""

USELESS_OVER = 1.2
"""Where the alarm of speculation.USELESS ends."""

MAXIMAL, MAXIMAL_OVER = 0.97, 0.95
"""Of the longest accept length possible: text is not so foreseeable, but loops are."""

UNLIKE, UNLIKE_OVER = 0.75, 0.8
"""Of the others' median, or its inverse: means of 50 answers differ by 2 % by chance."""

SLOW, SLOW_OVER = 1 / 3, 0.4
"""Of the others' median rate: a slot of a full batch is slower than one of a half empty one, twice at most."""

SOUND = 0.8
"""From here on a figure is like the others'."""

FALLEN = {"tokens a second": SLOW, "accept length": 0.6}
"""A server that was sound and is below this share of the others' has gone bad, once that has lasted."""

LASTED_S = 600.0
"""A neighbour's load, or a minute in which the machine was frozen, is over by then."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the config asks for: the algorithm in a word, empty without speculation; the longest accept length possible,
    None where unknown; `drafter` says what is known of the draft model."""

    algorithm: str = ""
    longest: float | None = None
    drafter: str = ""


class Fallen(NamedTuple):
    """A server that has gone bad, and how that was seen."""

    server: int
    cause: str


@dataclass(slots=True)
class _Course:
    """How a figure stood to the others' in this life."""

    sound: bool = False
    low_since: float | None = None

    def lasts(self, share: float, floor: float, now: float) -> bool:
        """Whether it was sound, and has been below the floor for long."""
        self.sound = self.sound or share >= SOUND
        if share >= floor:
            self.low_since = None
            return False
        self.low_since = now if self.low_since is None else self.low_since
        return self.sound and now - self.low_since >= LASTED_S


@dataclass(slots=True)
class Window:
    """What was seen of a server in this life; `tells`: its engine would say an accept length."""

    name: str
    tells: bool
    long_answers: int = 0
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=ANSWERS))
    reports: deque[float] = field(default_factory=lambda: deque(maxlen=REPORTS))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=ANSWERS // 2))
    courses: dict[str, _Course] = field(default_factory=dict)

    @property
    def length(self) -> float | None:
        """Its accept length, by answers where they say it, else by reports; None while that is too few."""
        if len(self.lengths) >= LEAST_ANSWERS:
            return fmean(self.lengths)
        return fmean(self.reports) if len(self.reports) >= LEAST_REPORTS else None

    @property
    def seen(self) -> str:
        """What its accept length was read from."""
        few = len(self.lengths) < LEAST_ANSWERS
        return f"{len(self.reports)} reports" if few else f"{len(self.lengths)} answers"

    @property
    def whole(self) -> bool:
        """Whether there is as much as is ever looked at."""
        return len(self.lengths) == ANSWERS or len(self.reports) == REPORTS

    @property
    def rate(self) -> float | None:
        return median(self.rates) if len(self.rates) >= LEAST_ANSWERS else None


class Audit:
    """The servers that work now. Not thread-safe; `now` is any steadily growing number of seconds."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.windows: dict[int, Window] = {}
        self._told: set[tuple[FindingKind, int]] = set()
        self._restarted: set[tuple[int, str]] = set()

    def begin(self, server: int, name: str, *, tells: bool) -> None:
        """A server takes prompts from now on."""
        self.windows[server] = Window(name, tells)

    def end(self, server: int) -> None:
        """It takes none any more."""
        self.windows.pop(server, None)

    def answer(self, server: int, tokens: int, seconds: float, accept_length: float | None) -> None:
        """Takes in an answer."""
        window = self.windows.get(server)
        if window is None or tokens < LONG_TOKENS:
            return
        window.long_answers += 1
        if accept_length is not None:
            window.lengths.append(accept_length)
        if seconds > 0:
            window.rates.append(tokens / seconds)

    def report(self, server: int, accept_lengths: Iterable[float]) -> None:
        """Takes in what a server's log or metrics said."""
        if server in self.windows:
            self.windows[server].reports.extend(accept_lengths)

    def findings(self) -> tuple[Finding, ...]:
        """All that holds now."""
        lengths = {server: window.length for server, window in self.windows.items()}
        rates = {server: window.rate for server, window in self.windows.items()}
        found: list[Finding] = []
        for server, window in sorted(self.windows.items()):
            found += self._speculation(server, window, lengths[server])
            found += self._unlike(server, window, lengths)
            found += self._slow(server, window, rates)
        return tuple(found)

    def fallen(self, now: float) -> list[Fallen]:
        """Servers that have gone bad by their rate or accept length; each figure of each only once."""
        figures = {
            "tokens a second": {server: window.rate for server, window in self.windows.items()},
            "accept length": {server: window.length for server, window in self.windows.items()},
        }
        found = []
        for figure, values in figures.items():
            for server, value in values.items():
                usual = _usual(values, server)
                if value is None or usual is None:
                    continue
                course = self.windows[server].courses.setdefault(figure, _Course())
                lasts = course.lasts(value / usual, FALLEN[figure], now)
                if lasts and (server, figure) not in self._restarted:
                    self._restarted.add((server, figure))
                    cause = f"{figure}: {value:.2f} for {LASTED_S / 60:.0f} minutes, the others' median is {usual:.2f}"
                    found.append(Fallen(server, f"{cause}; it was like theirs before"))
        return found

    # -- one server --------------------------------------------------------------------------------------------------
    def _holds(self, kind: FindingKind, server: int, begins: bool, goes_on: bool) -> bool:
        """With a gap between begin and end, so that a figure at the limit is not told again and again."""
        holds = goes_on if (kind, server) in self._told else begins
        (self._told.add if holds else self._told.discard)((kind, server))
        return holds

    def _speculation(self, server: int, window: Window, length: float | None) -> Iterator[Finding]:
        asked, most = self.expected.algorithm, self.expected.longest
        absent = bool(asked) and window.tells and not window.lengths and not window.reports
        if self._holds(FindingKind.ABSENT, server, absent and window.long_answers >= LEAST_ANSWERS, absent):
            words = f"the flags ask for {asked}, and {window.long_answers} answers show no sign of speculation"
            yield self._finding(FindingKind.ABSENT, window, words, "is it in the log's first lines? tokenmill logs RUN")
        low = length is not None and length < USELESS_OVER
        if self._holds(FindingKind.USELESS, server, length is not None and length < speculation.USELESS, low):
            drafter = f"; {self.expected.drafter}" if self.expected.drafter else ""
            words = f"accept length {length:.2f} over {window.seen}: speculation does not help, it costs{drafter}"
            fix = "tokenmill doctor CONFIG   looks whether the drafter fits; or leave the speculative flags out"
            yield self._finding(FindingKind.USELESS, window, words, fix)
        share = length / most if length is not None and most else 0.0
        if self._holds(FindingKind.MAXIMAL, server, share > MAXIMAL and window.whole, share > MAXIMAL_OVER):
            words = (
                f"accept length {length:.2f} of {most:.0f} possible over {window.seen}: looping output, or a drafter"
            )
            fix = "look at its answers: tokenmill inspect RUN"
            yield self._finding(FindingKind.MAXIMAL, window, f"{words} that is the model itself", fix)

    def _unlike(self, server: int, window: Window, lengths: dict[int, float | None]) -> Iterator[Finding]:
        own, usual = lengths[server], _usual(lengths, server)
        share = own / usual if own is not None and usual else 1.0
        # Of two servers, the one with more is not to be blamed.
        high = len([length for length in lengths.values() if length is not None]) > 2
        begins = share < UNLIKE or (high and share > 1 / UNLIKE)
        goes_on = share < UNLIKE_OVER or (high and share > 1 / UNLIKE_OVER)
        if self._holds(FindingKind.UNLIKE, server, begins, goes_on):
            words = f"accept length {own:.2f} over {window.seen}, the other servers' median is {usual:.2f}"
            yield self._finding(FindingKind.UNLIKE, window, words, f"tokenmill logs RUN {window.name}")

    def _slow(self, server: int, window: Window, rates: dict[int, float | None]) -> Iterator[Finding]:
        own, usual = rates[server], _usual(rates, server)
        share = own / usual if own is not None and usual else 1.0
        if self._holds(FindingKind.SLOW, server, share < SLOW, share < SLOW_OVER):
            words = f"{own:.1f} tokens a second in a slot, the other servers' median is {usual:.1f}"
            yield self._finding(FindingKind.SLOW, window, words, "an unlike or a throttled card? nvidia-smi -q")

    @staticmethod
    def _finding(kind: FindingKind, window: Window, text: str, fix: str) -> Finding:
        return Finding(kind.value, window.name, text, fix)


def _usual(values: dict[int, float | None], server: int) -> float | None:
    """The others' median; None where there is none."""
    others = [value for index, value in values.items() if index != server and value is not None]
    return median(others) if others else None

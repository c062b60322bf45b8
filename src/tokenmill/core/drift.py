"""Has one server gone bad? Its share of bad answers against the others', over the same stretch of the run.

Three things must hold at a bad answer, for the last 25, 50, 100 or 200 answers of its server: its share is five times
the others'; Fisher's exact test gives chance less than one in a thousand million; and in the cohorts that those answers
belong to, its share is twice the others', too. Bad answers are often the longest, so unlike cards meet a hard part of
the prompts at unlike times. That a slow card's long answers come late, the cohorts tell. Those of a fast card come
before the others could have ended theirs: until then they do not count, but where nearly all answers are bad.

With four tests at each bad answer, in a sound fleet that rejects 3 % the chance that any server is blamed is below
30,000 × 4 × 1e-9 = 1.2e-4 per million answers, as far as answers that come at one time are alike for all servers.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from math import comb
from typing import NamedTuple

WINDOW = 200
"""Answers of a server that are compared, at most: what a fleet of 16 gives in minutes."""

SUFFIXES = (25, 50, 100, WINDOW)
"""A server that breaks at once is found after some 20 bad answers, one that rots slowly within 200."""

LEAST_BAD = 10
"""Fewer bad answers in a row happen: near copies of one hard prompt stand side by side in a file."""

LEAST, LEAST_OTHERS = 20, 20
"""Answers of a server, and of all others meanwhile, below which nothing is compared."""

TIMES = 5.0
"""How far a share must be above the others' (cases C25)."""

CHANCE = 1e-9
"""Of Fisher's test: see above."""

IN_COHORTS, LEAST_IN_COHORTS = 2.0, 10
"""The same cohorts must tell the same, less strictly: they hold the server's sound answers, too."""

COHORTS = 256
"""Cohorts of which counts are kept: 50,000 prompts in flight and just ended."""

FLEET_BAD = 8192
"""Bad answers of the fleet whose places are remembered; where that does not reach back, nothing is said."""

FIRST = 100
"""Answers after a server's start that tell how it was: what a server that is alone is compared with."""

FASTER = 1.25
"""A server's slot is not faster than the others' below this: rates of single answers differ as much."""

PLAIN = 0.8
"""Prompts may get harder, but no part of them is so hard: a server with this share need not be waited for."""

ALONE_WAS = 0.1
"""A server that is alone had at most this share in the beginning, and has PLAIN now."""


class Drift(NamedTuple):
    """`bad` of a server's last `answers`, against `other_bad` of `others`; `alone`: those are its own first ones."""

    bad: int
    answers: int
    other_bad: int
    others: int
    alone: bool = False

    def __str__(self) -> str:
        whose = "of its first" if self.alone else "of the other servers'"
        return (
            f"{self.bad} of its last {self.answers} answers would be rejected, "
            f"{self.other_bad} {whose} {self.others:,}{'' if self.alone else ' meanwhile'}"
        )


class Judged(NamedTuple):
    """An answer: `started` and `seconds` are its request's, in seconds of any clock; `bad`: it would be rejected."""

    row: int
    cohort: int
    tokens: int
    started: float
    seconds: float
    bad: bool


class _Seen(NamedTuple):
    place: int  # among all answers of the fleet
    answer: Judged


@dataclass(slots=True)
class _Window:
    """The last answers of a server in this life, a row once: samples of one prompt go wrong together."""

    answers: deque[_Seen] = field(default_factory=deque)
    rows: set[int] = field(default_factory=set)
    seen: int = 0
    first_bad: int = 0

    def add(self, place: int, answer: Judged) -> None:
        self.answers.append(_Seen(place, answer))
        self.rows.add(answer.row)
        if len(self.answers) > WINDOW:
            self.rows.discard(self.answers.popleft().answer.row)
        self.seen += 1
        self.first_bad += answer.bad and self.seen <= FIRST


class Rejects:
    """The answers of a fleet, as they come. Servers are numbers; `begin` at each of a server's lives."""

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}
        self._answers = 0
        self._bad_places: deque[int] = deque(maxlen=FLEET_BAD)
        self._cohorts: dict[int, dict[int, tuple[int, int]]] = {}

    def begin(self, server: int) -> None:
        """A new life: what it did in an earlier one is forgotten."""
        self._windows[server] = _Window()

    def observe(self, server: int, answer: Judged) -> Drift | None:
        """Takes in an answer; says so where its server has gone bad."""
        window = self._windows.setdefault(server, _Window())
        if answer.row in window.rows:
            return None
        self._answers += 1
        window.add(self._answers, answer)
        counts = self._cohorts.setdefault(answer.cohort, {})
        ended, rejected = counts.get(server, (0, 0))
        counts[server] = (ended + 1, rejected + answer.bad)
        if len(self._cohorts) > COHORTS:
            del self._cohorts[next(iter(self._cohorts))]
        if not answer.bad:
            return None
        self._bad_places.append(self._answers)
        return self._drift(server, window)

    def _drift(self, server: int, window: _Window) -> Drift | None:
        answers = list(window.answers)
        alone = self._others_since(answers) < LEAST_OTHERS
        for length in sorted({min(length, len(answers)) for length in SUFFIXES}):
            mine = answers[-length:]
            bad = sum(seen.answer.bad for seen in mine)
            if length < LEAST or bad < LEAST_BAD:
                continue
            found = _against_itself(window, length, bad) if alone else self._against_others(server, mine, bad)
            if found is not None:
                return found
        return None

    def _others_since(self, mine: list[_Seen]) -> int:
        """Answers of the other servers since the first of these."""
        return self._answers - mine[0].place + 1 - len(mine)

    def _against_others(self, server: int, mine: list[_Seen], bad: int) -> Drift | None:
        since, others = mine[0].place, self._others_since(mine)
        if others < LEAST_OTHERS or (len(self._bad_places) == FLEET_BAD and self._bad_places[0] > since):
            return None
        other_bad = len(self._bad_places) - bisect_left(self._bad_places, since) - bad
        found = Drift(bad, len(mine), other_bad, others)
        if not _tells(found):
            return None
        whole = [seen.answer for seen in mine]
        ripe = whole if bad >= PLAIN * len(mine) else self._ripe(server, whole)
        telling = Drift(sum(answer.bad for answer in ripe), len(ripe), other_bad, others)
        return found if _tells(telling) and self._cohorts_agree(server, {answer.cohort for answer in ripe}) else None

    def _ripe(self, server: int, mine: list[Judged]) -> list[Judged]:
        """Those that the other servers, too, would have ended by now, had they begun them at the same time."""
        others = [seen.answer for index, window in self._windows.items() if index != server for seen in window.answers]
        rate = sum(answer.tokens for answer in others) / (sum(answer.seconds for answer in others) or 1.0)
        if not rate:
            return mine
        now = max(answer.started + answer.seconds for answer in mine)
        return [answer for answer in mine if answer.tokens / rate <= max(now - answer.started, FASTER * answer.seconds)]

    def _cohorts_agree(self, server: int, cohorts: set[int]) -> bool:
        own = other = own_bad = other_bad = 0
        for cohort in cohorts:
            for index, (ended, rejected) in self._cohorts.get(cohort, {}).items():
                if index == server:
                    own, own_bad = own + ended, own_bad + rejected
                else:
                    other, other_bad = other + ended, other_bad + rejected
        return other >= LEAST_IN_COHORTS and _far_above(Drift(own_bad, own, other_bad, other), IN_COHORTS)


def _against_itself(window: _Window, length: int, bad: int) -> Drift | None:
    """A server without others: its first answers after the canary say how it was."""
    was = Drift(bad, length, window.first_bad, FIRST, alone=True)
    apart = window.seen >= FIRST + length
    sound = window.first_bad <= ALONE_WAS * FIRST and bad >= PLAIN * length
    return was if apart and sound and tail(was) < CHANCE else None


def _tells(drift: Drift) -> bool:
    return drift.bad >= LEAST_BAD and _far_above(drift, TIMES) and tail(drift) < CHANCE


def _far_above(drift: Drift, times: float) -> bool:
    """Whether its share is so many times the others', who are given one bad answer more than they had."""
    return drift.bad * (drift.others + 1) > times * (drift.other_bad + 1) * drift.answers


def tail(drift: Drift) -> float:
    """The chance of so many bad answers or more, were all answers alike: Fisher's exact test, one-sided."""
    bad, answers = drift.bad + drift.other_bad, drift.answers + drift.others
    ways = sum(
        comb(bad, mine) * comb(answers - bad, drift.answers - mine)
        for mine in range(drift.bad, min(bad, drift.answers) + 1)
    )
    return ways / comb(answers, drift.answers)

"""How many are kept in flight where nobody says how many: on simulated servers whose rate is known, in no real time.

A server makes peak · n / (n + half) tokens a second of n that it runs; beyond `limit` requests only wait.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tokenmill.core.pace import Answers, Pace, Seen

LOOK_S = 0.5
TOKENS = 400.0
AT_MOST = 1024


@dataclass
class Server:
    """`tells`: streams (what it has begun, tokens as they come) or metrics (running, queued).
    `noise` is of its rate, over seconds; A batch of more than `captured` is half as fast."""

    tells: str
    limit: int
    half: float
    noise: float = 0.01
    seed: int = 1
    captured: int = AT_MOST
    at: float = 0.0
    tokens: float = 0.0
    answers: Answers = field(default_factory=Answers)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._drift = self._due = 0.0

    def rate(self, count: int) -> float:
        runs = min(count, self.limit)
        slower = 0.5 if runs > self.captured else 1.0
        return 2000.0 * runs / (runs + self.half) * slower

    @property
    def best(self) -> float:
        """The rate at the best fixed number."""
        return max(map(self.rate, range(1, AT_MOST)))

    def go(self, pace: Pace, seconds: float, in_flight: Callable[[int], int] = lambda target: target) -> list[int]:
        """So long at work, as full as `in_flight` makes it of what is aimed at; the targets, a look each."""
        targets = []
        for _ in range(int(seconds / LOOK_S)):
            count = in_flight(pace.target)
            self._drift = 0.9 * self._drift + self._rng.gauss(0.0, self.noise)
            rate = self.rate(count) * math.exp(self._drift)
            self.at += LOOK_S
            self.tokens += rate * LOOK_S
            self._answer(count, rate)
            pace.look(self._seen(count))
            targets.append(pace.target)
        return targets

    def _answer(self, count: int, rate: float) -> None:
        """Answers of very unlike lengths; a request waits in a queue before it takes its time."""
        runs = min(count, self.limit)
        self._due += rate * LOOK_S / TOKENS
        while self._due >= 1.0:
            self._due -= 1.0
            length = int(self._rng.lognormvariate(math.log(TOKENS) - 0.5, 1.0)) + 1
            waited = (count - runs) * TOKENS / rate
            self.answers = self.answers.plus(length, waited + length * runs / rate * self._rng.uniform(0.9, 1.1))

    def _seen(self, count: int) -> Seen:
        runs, waits = min(count, self.limit), max(0, count - self.limit)
        if self.tells == "streams":
            begun = 0.95 * runs + self._rng.gauss(0.0, math.sqrt(0.05 * runs))
            return Seen(self.at, count, self.answers, max(0.0, begun), tokens=self.tokens)
        return Seen(self.at, count, self.answers, runs, queued=waits)


HOUR = 3600.0


LARGE = pytest.param(200, 60, marks=pytest.mark.long)


@pytest.mark.parametrize("tells", ["streams", "metrics"])
@pytest.mark.parametrize(("limit", "half"), [(64, 16), (8, 3), LARGE])
def test_it_comes_within_three_per_cent_of_the_best_and_stays(tells: str, limit: int, half: float) -> None:
    server, pace = Server(tells, limit, half, seed=limit), Pace(32, AT_MOST)
    server.go(pace, 0.5 * HOUR)
    found = pace.base
    targets = server.go(pace, 0.5 * HOUR)
    made = sum(map(server.rate, targets)) / len(targets)
    assert made >= 0.97 * server.best, (found, pace.base)
    assert pace.base <= max(1.1 * limit, limit + 1)
    assert abs(pace.base - found) <= max(1, 0.1 * found)
    assert max(targets) <= max(1.1 * limit, limit + 1)


def test_it_is_never_above_the_ceiling_and_takes_all_of_it_where_that_runs() -> None:
    server, pace = Server("streams", 500, 16), Pace(32, 100)
    assert max(server.go(pace, 0.5 * HOUR)) == 100
    assert pace.base >= 97


def test_a_server_that_slows_down_beyond_a_number_is_kept_at_it() -> None:
    server, pace = Server("metrics", 500, 16, captured=128), Pace(32, 256)
    server.go(pace, HOUR)
    assert server.rate(pace.base) >= 0.97 * server.best


@pytest.mark.parametrize("tells", ["streams", "metrics"])
def test_longer_prompts_in_mid_run_leave_room_for_fewer_and_shorter_ones_for_more(tells: str) -> None:
    server, pace = Server(tells, 128, 16), Pace(32, AT_MOST)
    server.go(pace, 0.5 * HOUR)
    assert pace.base > 100
    server.limit = 48
    server.go(pace, 0.25 * HOUR)
    assert 43 <= pace.base <= 53
    server.limit = 128
    server.go(pace, HOUR)
    assert server.rate(pace.base) >= 0.97 * server.best


def test_what_queues_by_its_own_word_is_taken_back_at_once_and_not_tried_again_soon() -> None:
    server, pace = Server("metrics", 40, 16), Pace(64, AT_MOST)
    server.go(pace, 70.0)
    assert pace.base == 40
    assert set(server.go(pace, 30.0)) == {40}


def test_another_life_begins_with_what_was_found() -> None:
    server, pace = Server("streams", 64, 16), Pace(32, AT_MOST)
    server.go(pace, 900.0)
    found = pace.base
    pace.begin(AT_MOST)
    server.tokens, server.answers = 0.0, Answers()
    assert found == pace.base == pace.target >= 58
    pace.begin(20)
    assert pace.base == pace.target == 20


def test_unlike_servers_are_found_each_for_itself() -> None:
    found = []
    for limit in (20, 100):
        server, pace = Server("streams", limit, limit / 4), Pace(32, AT_MOST)
        server.go(pace, 900.0)
        found.append(pace.base)
    assert found[0] <= 22
    assert found[1] >= 90


def test_nothing_is_learned_of_a_server_that_is_not_kept_full() -> None:
    server, pace = Server("streams", 64, 16), Pace(32, AT_MOST)
    assert set(server.go(pace, 600.0, lambda target: target // 2)) == {32}
    pace = Pace(8, AT_MOST)
    assert set(server.go(pace, 600.0, lambda target: 8)) == {8, 9}
    assert pace.base == 8


def test_one_that_stands_still_is_no_better_with_any_other_number() -> None:
    server, pace = Server("streams", 64, 16), Pace(32, AT_MOST)
    server.rate = lambda count: 0.0  # type: ignore[method-assign]
    assert max(server.go(pace, 600.0)) <= 40

"""How many requests to keep in flight at one server, found while it runs. No I/O, no clock; looks come with their time.

One number is believed in (`base`), another one is tried beside it, in turns, so that whatever else changes meanwhile
changes for both. Invariants: a trial goes a tenth above the base (or one request) at most, and never above the ceiling;
what is not decided leaves the base as it is; after two trials in vain it rests, longer each time.

More in flight is better as long as the server begins them and is not proven slower. How many it has begun, its metrics
say, or its streams; where neither does, there is nothing to find by (ways to tell it from the answers alone were tried:
they took hours, came to 0.75 to 1.0 of the best, and put a third more in flight than the server ran).
"""

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple

SETTLE_S = 2.0
"""After a change, at least: what was begun anew has to come to its first token."""

BLOCK_S = 5.0
"""One reading of the rate, at least: twenty looks, two or three of an engine's metrics."""

BLOCK_ANSWERS = 32
"""Where tokens are seen only with their answer, a reading is of so many answers at least."""

STEP, WIDE = 0.1, 0.25
"""Up by a tenth, since what is too much only queues; by half of that once a tenth was too much. Down by a quarter where
the server runs all it has: a rate that falls slowly with every request more shows over a distance."""

FILLED = 0.975
"""So much of a number must be in flight on average, or it was not that number: where nobody fills its slots, the one
request more of a trial never comes."""

GROWN = 0.8
"""So much of what is added must be begun, of what is begun otherwise: prompts take a while to read. A server that is
full begins none."""

QUEUED = 0.05
"""A share of those in flight that waits all the time, by the server's own word, is too much. Fewer are on their way."""

SURE = 3.0
"""Standard errors that prove a difference: there are dozens of chances to be wrong."""

FEW = 5
NOISE, NOISE_AT_FIRST = 0.01, 0.04
"""Of the quotient of two readings: at least, and at least as long as there are few."""

MOST_PAIRS = 48
"""Then it is undecided: with a noise of 2 % a difference of 0.7 % would have shown."""

REST_S, LONGEST_REST_S = 60.0, 1800.0
"""After trials in vain, doubling."""

CHANGED, RUNS_LESS = 0.15, 0.1
"""What ends a rest: another rate, or fewer running, at three readings in a row. Prompts have become longer, or other
users have come."""


class Answers(NamedTuple):
    """Sums over a server's answers: how many, their tokens, their seconds."""

    number: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> "Answers":
        """With one more."""
        return Answers(self.number + 1, self.tokens + tokens, self.seconds + seconds)

    def since(self, earlier: "Answers") -> "Answers":
        """Those that came after."""
        return Answers(self.number - earlier.number, self.tokens - earlier.tokens, self.seconds - earlier.seconds)


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a server that is to be kept full. `at` in seconds; all that is counted, since its start.

    `running` are those that the server has begun, `queued` those of which it says that they wait, None where it does
    not say. `tokens` are those seen as they come, None where they are seen with their answer.
    """

    at: float
    in_flight: int
    answers: Answers
    running: float
    tokens: float | None = None
    queued: float | None = None


@dataclass(slots=True)
class Block:
    """A reading: looks at one number in flight, from a settled moment on."""

    first: Seen
    last: Seen
    looks: list[Seen] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """Another look."""
        self.last = seen
        self.looks.append(seen)

    @property
    def is_whole(self) -> bool:
        """Whether it is long enough to count."""
        enough = self.last.tokens is not None or self._answers.number >= max(BLOCK_ANSWERS, self.last.in_flight)
        return enough and self.last.at - self.first.at >= BLOCK_S

    @property
    def _answers(self) -> Answers:
        return self.last.answers.since(self.first.answers)

    @property
    def rate(self) -> float:
        """Tokens a second. Of answers: those that the mean request makes, times the requests, since answers come in
        lumps; 0 where nothing came."""
        if self.last.tokens is not None:
            return (self.last.tokens - (self.first.tokens or 0.0)) / (self.last.at - self.first.at)
        answers = self._answers
        return self.in_flight * answers.tokens / answers.seconds if answers.seconds > 0 else 0.0

    @property
    def in_flight(self) -> float:
        """On average."""
        return fmean(look.in_flight for look in self.looks)

    @property
    def running(self) -> float:
        """How many it had begun, on average."""
        return fmean(look.running for look in self.looks)

    @property
    def queued(self) -> float:
        """How many waited, on average, by its own word; 0 where it does not say."""
        return fmean(look.queued or 0.0 for look in self.looks)


@dataclass(frozen=True, slots=True)
class Trial:
    """Two numbers in flight, the base among them, and the readings of each, one pair a turn."""

    low: int
    high: int
    pairs: tuple[tuple[Block, Block], ...] = ()

    def better(self, base: int) -> int | None:
        """The better one, None while that is not known; at the latest after MOST_PAIRS it is the base."""
        gains = [math.log(high.rate / low.rate) for low, high in self.pairs if high.rate > 0 < low.rate]
        if len(gains) < len(self.pairs) or not gains:
            return base  # nothing came: another one's to explain
        gain = fmean(gains)
        noise = max(NOISE if len(gains) > FEW else NOISE_AT_FIRST, stdev(gains) if len(gains) > 1 else 0.0)
        sure = SURE * noise / math.sqrt(len(gains))
        if gain < -sure:
            return self.low
        begun = self._begun()
        if begun < GROWN:
            return self.low + int(max(0.0, begun) * (self.high - self.low)) if len(gains) > 1 else None
        if gain > -sure / SURE:
            return self.high
        return base if len(gains) >= MOST_PAIRS else None

    def _begun(self) -> float:
        """The share that was begun of what the higher number adds, as if the lower one was begun as a whole; 0 where
        nothing was begun of either."""
        low, high = (fmean(block.running for block in blocks) for blocks in zip(*self.pairs, strict=True))
        return (high / low - 1) * self.low / (self.high - self.low) if low else 0.0


class Pace:
    """`target` is what to keep in flight now: `base`, or what is tried beside it. `ceiling` is what the engine says it
    runs, or what open files allow. `found` is the base at the last rest, None before the first."""

    def __init__(self, start: int, ceiling: int) -> None:
        self.base = self.target = start
        self._ceiling = max(ceiling, 1)
        self._up = True
        self._near = False
        self._in_vain = 0
        self._trial: Trial | None = None
        self._half: Block | None = None
        self._block: Block | None = None
        self._settled_at: float | None = None
        self._rest_s = REST_S
        self._rest_until = 0.0
        self.found: int | None = None
        self._rested: Block | None = None
        self._odd = 0
        self.begin(ceiling)

    def begin(self, ceiling: int) -> None:
        """Another life of the server: its counters begin anew; what was found holds, as far as it runs as many."""
        self._ceiling = max(ceiling, 1)
        self._trial = self._half = self._block = self._rested = None
        self._settled_at = None
        self.base = self.target = min(self.base, self._ceiling)

    def look(self, seen: Seen) -> int:
        """Takes a look in, and says how many to keep in flight from now on."""
        if not self.target * (1 - STEP / 2) - 1 <= seen.in_flight <= self.target:
            self._block, self._settled_at = None, None  # too few prompts, or too many still from before
        elif self._settled_at is None:
            self._settled_at = seen.at + self._settle_s(seen)
        elif self._block is None:
            if seen.at >= self._settled_at:
                self._block = Block(seen, seen)
        else:
            self._block.add(seen)
            if self._block.is_whole:
                if self._block.in_flight >= FILLED * self.target:
                    self._read(self._block)
                else:
                    self._block = Block(seen, seen)
        return self.target

    def _settle_s(self, seen: Seen) -> float:
        """Answers tell of the time before, too: one and a half of them must have passed."""
        if seen.tokens is not None or not seen.answers.number:
            return SETTLE_S
        return max(SETTLE_S, 1.5 * seen.answers.seconds / seen.answers.number)

    # -- what a reading leads to
    def _read(self, block: Block) -> None:
        last = block.last
        self._block = Block(last, last)
        if block.queued > max(1.0, QUEUED * self.target):
            self._cut(block, last.at)
        elif self._trial is None:
            self._half = block
            if self._is_over(block):
                self._try(block)
        elif self.target == self.base:
            self._half = block
            self._turn(self._trial)
        else:
            self._weigh(self._trial, block)

    def _cut(self, block: Block, at: float) -> None:
        """It says that some wait: what runs is what it can run, and more is tried again after a rest."""
        self.base = min(self.base, max(1, round(block.running)))
        self._trial = None
        self._rest(at)
        self._set(self.base)

    def _try(self, block: Block) -> None:
        """Another number beside the base: more, then fewer; where neither is better, a rest."""
        step = max(1, int(self.base * (STEP / 2 if self._near else STEP)))
        low, high = self.base, self.base
        if self._up:
            high = min(self._ceiling, self.base + step)
        elif block.running < self.base * (1 - RUNS_LESS):
            low = max(1, math.ceil(block.running))
        else:
            low = max(1, self.base - max(1, int(self.base * WIDE)))
        if low == high:
            self._failed(block.last.at)
            return
        self._trial = Trial(low, high)
        self._turn(self._trial)

    def _turn(self, trial: Trial) -> None:
        self._set(trial.low if self.target == trial.high else trial.high)

    def _weigh(self, trial: Trial, block: Block) -> None:
        assert self._half is not None, "a trial begins with a reading of the base"
        tried_high = self.target == trial.high
        pair = (self._half, block) if tried_high else (block, self._half)
        trial = self._trial = Trial(trial.low, trial.high, (*trial.pairs, pair))
        better = trial.better(self.base)
        if better is None:
            self._turn(trial)
            return
        self._trial = None
        if better == self.base:
            self._near = self._near or trial.low == self.base
            self._failed(block.last.at)
            self._set(self.base)
            return
        if better == trial.high:
            self._rest_s, self._near = REST_S, False
        self.base, self._half, self._in_vain = better, block, 0
        if better == self.target:
            self._try(block)
        else:
            self._set(better)

    def _failed(self, at: float) -> None:
        self._up = not self._up
        self._in_vain += 1
        if self._in_vain > 1:
            self._rest(at)

    def _rest(self, at: float) -> None:
        self._up, self._in_vain, self._rested, self._odd = True, 0, None, 0
        self._rest_until = at + self._rest_s
        self.found = self.base
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)

    def _is_over(self, block: Block) -> bool:
        """Whether the rest is: its time has passed, or the server is not what it was."""
        rested = self._rested = self._rested or block
        fewer = block.running < rested.running * (1 - RUNS_LESS)
        other = min(block.rate, rested.rate) <= 0 or abs(math.log(block.rate / rested.rate)) > CHANGED
        self._odd = self._odd + 1 if fewer or other else 0
        if self._odd < 3:
            return block.last.at >= self._rest_until
        self._up, self._rest_s, self._odd = not fewer, REST_S, 0
        return True

    def _set(self, target: int) -> None:
        self.target = target
        self._block, self._settled_at = None, None

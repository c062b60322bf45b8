"""What a trial's answers say: tokens a second in windows, whether two setups differ, who goes on, the verdict. Pure.

Two setups differ where the slowest window of one is faster than the fastest of the other: no assumption on how windows
scatter, and by chance 1 time in 10 with 3 windows each and 1 in 460 with 6. Windows of one life of a server share what
that life is like, so setups that were measured in one life each must be further apart.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from tokenmill.core.variants import Setup

WINDOWS = 3
"""Of a trial: the fewest that show a spread."""

MATTERS = 0.03
"""A gain that is worth another config: less comes and goes with the prompts."""

ONE_LIFE = 0.25
"""How far apart setups of one life each must be, at least."""

PLAIN = 2.0
"""So many times as fast needs no second look: two lives of one llama.cpp server differed 1.6 times on a machine with
fifteen times the load that its cores bear (docs/tune.md)."""

HOPELESS = 0.8
"""A setup whose fastest window is below this share of the leader's slowest is not measured again."""


class Answer(NamedTuple):
    """When it was asked for and when it was there, in seconds of one clock; its tokens, and its accept length."""

    asked: float
    came: float
    tokens: int
    accept: float | None = None


class Trial(msgspec.Struct, frozen=True):
    """One setup in one life of a server: `rates` are its windows' tokens a second, empty where it has none.

    `failure` says why, with its `fix`; `start_s` is the time to ready, `answer_s` the longest answer's, `width` the
    requests in flight.
    """

    setup: str
    round: int
    rates: tuple[float, ...] = ()
    accept: float | None = None
    width: int = 0
    answers: int = 0
    tokens: int = 0
    start_s: float = 0.0
    seconds: float = 0.0
    answer_s: float = 0.0
    failure: str = ""
    fix: str = ""


class Standing(msgspec.Struct, frozen=True):
    """A setup with all that its trials told. Nothing but a `failure` where none has windows."""

    setup: Setup
    rates: tuple[float, ...] = ()
    lives: int = 0
    width: int = 0
    accept: float | None = None
    failure: str = ""
    fix: str = ""

    @property
    def rate(self) -> float:
        """Mean tokens a second."""
        return fmean(self.rates) if self.rates else 0.0

    @property
    def low(self) -> float:
        return min(self.rates, default=0.0)

    @property
    def high(self) -> float:
        return max(self.rates, default=0.0)


def windows(answers: Sequence[Answer], begin: float, end: float, count: int = WINDOWS) -> tuple[float, ...]:
    """Tokens a second in each of `count` stretches from `begin` to `end`.

    An answer's tokens are taken as made evenly from its asking to its coming, so that long answers count where they
    were made, and not where they ended.
    """
    step = (end - begin) / count
    if step <= 0:
        return ()
    rates = []
    for number in range(count):
        low, high = begin + number * step, begin + (number + 1) * step
        made = sum(
            each.tokens * max(0.0, min(each.came, high) - max(each.asked, low)) / max(each.came - each.asked, 1e-9)
            for each in answers
        )
        rates.append(made / step)
    return tuple(rates)


def mean_s(answers: Sequence[Answer]) -> float:
    """The mean time that an answer takes."""
    return fmean(each.came - each.asked for each in answers) if answers else 0.0


def rate_by_slot(answers: Sequence[Answer], width: int) -> float:
    """Tokens a second, if all slots are as fast as those of these answers: an estimate while others are underway."""
    seconds = sum(each.came - each.asked for each in answers)
    return width * sum(each.tokens for each in answers) / seconds if seconds else 0.0


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens a step over all answers; one that drafted nothing took a step for each. None where no answer tells."""
    if all(each.accept is None for each in answers):
        return None
    steps = sum(each.tokens / (each.accept or 1.0) for each in answers)
    return sum(each.tokens for each in answers) / steps if steps else None


def standings(setups: Sequence[Setup], trials: Sequence[Trial]) -> list[Standing]:
    """Every setup that was tried, in its order."""
    found = []
    for setup in setups:
        told = [trial for trial in trials if trial.setup == setup.name]
        good = [trial for trial in told if trial.rates]
        accepts = [trial.accept for trial in good if trial.accept is not None]
        last = next((trial for trial in reversed(told) if trial.failure), None) if not good else None
        if told:
            found.append(
                Standing(
                    setup,
                    tuple(rate for trial in good for rate in trial.rates),
                    len(good),
                    good[-1].width if good else 0,
                    fmean(accepts) if accepts else None,
                    last.failure if last else "",
                    last.fix if last else "",
                )
            )
    return found


def differ(one: Standing, other: Standing) -> bool:
    """Whether they are apart beyond the spread, and by as much as matters."""
    fast, slow = (one, other) if one.rate >= other.rate else (other, one)
    if not slow.rates or slow.high >= fast.low:
        return False
    least = MATTERS if min(one.lives, other.lives) > 1 else ONE_LIFE
    return fast.rate >= slow.rate * (1 + least)


def leader(found: Sequence[Standing]) -> Standing | None:
    """The fastest; None where none has a rate."""
    return max((each for each in found if each.rates), key=lambda each: each.rate, default=None)


def survivors(found: Sequence[Standing]) -> list[Standing]:
    """Who is measured again: at most the faster half, the hopeless left out, the config as it is always in it. None
    where nobody is left to be told from the others."""
    first = leader(found)
    if first is None:
        return []
    ranked = sorted((each for each in found if each.rates), key=lambda each: -each.rate)
    kept = [each for each in ranked[: max(2, -(-len(ranked) // 2))] if each.high >= HOPELESS * first.low]
    kept += [each for each in ranked if each.setup.as_is and each not in kept]
    return kept if len(kept) > 1 else []


def winner(found: Sequence[Standing]) -> Standing | None:
    """What to run with: the config as it is, unless something differs from it and is faster; of those that cannot be
    told from the fastest, the plainest. None: nothing ran."""
    here = next((each for each in found if each.setup.as_is and each.rates), None)
    first = leader(found)
    if first is None or (here is not None and (first is here or not differ(first, here))):
        return here
    tied = [each for each in found if each.rates and not differ(first, each)]
    better = [each for each in tied if here is None or differ(each, here)]
    return min(better, key=lambda each: (_changes(each.setup), -each.rate))


def _changes(setup: Setup) -> int:
    """What a setup has that one may do without: speculation, and another number at once or share of memory."""
    return bool(setup.speculates) + (setup.aspect in ("concurrency", "memory"))


def settled(found: Sequence[Standing]) -> bool:
    """Whether another round is not needed: everybody left differs from the leader."""
    first = leader(found)
    others = [each for each in survivors(found) if first is not None and each.setup != first.setup]
    return all(
        first is not None
        and differ(first, each)
        and (min(first.lives, each.lives) > 1 or first.rate >= PLAIN * each.rate)
        for each in others
    )


# -- in words ----------------------------------------------------------------------------------------------------------
def verdict(found: Sequence[Standing]) -> list[str]:
    """What was found, in plain sentences: of the whole, of speculation, of concurrency and memory."""
    best = winner(found)
    if best is None:
        return ["no setup could be measured"]
    words = []
    here = next((each for each in found if each.setup.as_is), None)
    first = leader(found)
    if here is not None and not here.rates:
        words.append(
            f"the config as it is could not be measured: {here.failure}; the fastest of the others is the winner"
        )
    elif here is not None and best is here:
        near = first is not None and first is not here
        others = any(each.rates for each in found if each is not here)
        why = "nothing is faster" if others else "nothing else was measured"
        why = f"the fastest, {first.setup.name}, is within the spread" if near and first else why
        words.append(f"leave it as it is: {why}")
    elif here is not None:
        words.append(f"{best.setup.name} is faster: {times(best, here)} × the config as it is")
    words += [line for line in (_of_speculation(found), _of_width(found)) if line]
    return words


def times(one: Standing, other: Standing) -> str:
    """A ratio of rates, as people say it."""
    ratio = one.rate / other.rate if other.rate else 0.0
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _of_speculation(found: Sequence[Standing]) -> str:
    wanted = [each for each in found if each.setup.aspect in ("as is", "speculation")]
    plain = next((each for each in wanted if not each.setup.speculates and each.rates), None)
    with_it = [each for each in wanted if each.setup.speculates]
    best = leader(with_it)
    if plain is None or not with_it:
        return ""
    if best is None:
        return "speculation could not be measured: no setup with it came up"
    name = f"{times(best, plain)} × none" + (
        f", the best of {len(with_it)}: {best.setup.name}" if len(with_it) > 1 else ""
    )
    own = next((each for each in with_it if each.setup.as_is and each.rates and each is not best), None)
    if own is not None and differ(own, plain):
        name += f"; as the config has it ({own.setup.name}) {times(own, plain)} ×"
    if not differ(best, plain):
        return f"speculation makes no difference beyond the spread here: {name}"
    return f"speculation {'pays' if best.rate > plain.rate else 'is slower'} here: {name}"


def _of_width(found: Sequence[Standing]) -> str:
    """Whether another number of requests at once is faster or, as it should not be, makes no difference."""
    tried = [each for each in found if each.setup.aspect in ("concurrency", "memory") and each.rates]
    best = leader(tried)
    if best is None:
        return ""
    name = best.setup.name.partition("; ")[0]
    base = next((each for each in found if each.setup.name == name and each.rates), None)
    if base is None:
        return ""
    change = best.setup.name.partition("; ")[2]
    if not differ(best, base):
        return f"{change}: {times(best, base)} × {base.width} at once, within the spread"
    return f"{change}: {times(best, base)} × {base.width} at once"


# -- time --------------------------------------------------------------------------------------------------------------
LEAST_S, MOST_S = 1.0, 60.0
"""Seconds that a trial measures, three windows of them: less than a few steps of a server each tells nothing; more than
a minute only helps where answers take minutes, and then the budget must be larger, too."""


MARGIN = 1.3
"""Of the usual trial's time: one that is slower takes longer, and a trial that is cut off tells nothing."""


def measured_s(budget_s: float, setups: int) -> float:
    """How long each trial measures: a third of its share of the time, for it also starts, warms up, and ends."""
    return max(LEAST_S, min(MOST_S, budget_s / (3 * max(1, setups))))


def is_affordable(setup: str, trials: Sequence[Trial], left_s: float) -> bool:
    """Whether one more trial of a setup is likely to end in time: by its own earlier ones, else by the usual one."""
    own = [trial.seconds for trial in trials if trial.setup == setup and trial.rates]
    others = sorted(trial.seconds for trial in trials if trial.rates)
    return left_s >= (max(own) if own else MARGIN * others[len(others) // 2] if others else 0.0)

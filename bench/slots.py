"""Slots busy and the end of a set: the real pump against round robin, on a clock that jumps.

No network and no processor time are in it: what is seen is who gets which prompt when. Latencies are lognormal with
σ = 1, so the longest of 2,000 takes twenty times the mean. Servers: equal; one three times slower; one that dies in the
middle and comes back. Busy is the time that slots worked over the time that they were there.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean
from typing import Any

from tests.contract.pump_fakes import DONE, Behaviour, Scene, play, prompts

MEAN_S, SIGMA = 20.0, 1.0
SERVERS, SLOTS = 7, 64
FEEDS_S = 0.05
"""Between two looks at the pump's credits; the store's batches come as often."""

Words = tuple[str, str, str, str, str]
"""What, goal, the pump's, no floor, round robin's."""


@dataclass(frozen=True)
class Fleet:
    """`slow` is how many times slower server 0 is; `dies_s` and `back_s`: when server 1 goes away, and comes back."""

    name: str
    slots: int = SLOTS
    slow: float = 1.0
    dies_s: float | None = None
    back_s: float = 0.0

    def factor(self, index: int) -> float:
        return self.slow if index == 0 else 1.0

    def slots_until(self, at: float) -> float:
        """Slot seconds that there were until then."""
        away = 0.0 if self.dies_s is None else max(0.0, min(at, self.back_s) - self.dies_s)
        return self.slots * (SERVERS * at - away)


@dataclass
class Work:
    """`took` and `ended` of every answer, `busy` slot seconds up to a moment; `longest` and `total` of the set."""

    works: list[float]
    spans: list[tuple[float, float]] = field(default_factory=list)
    ended: float = 0.0

    def busy(self, since: float, until: float) -> float:
        return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self.spans)

    def bound(self, fleet: Fleet, makespan: float) -> float:
        """No order of whatever kind is through sooner: all slots full to the end, or the longest alone. A server that
        was away, or dies with work in hand, is counted as it was there."""
        there = fleet.slots_until(makespan) / makespan / fleet.slots - (1 - 1 / fleet.slow)
        return max(sum(self.works) / (there * fleet.slots), max(self.works))


Order = Callable[[list[float]], list[int]]
Way = Callable[[Fleet, Work, Order], Coroutine[Any, Any, None]]


def _works(count: int, seed: int = 0) -> list[float]:
    rng = random.Random(count + seed)
    return [MEAN_S * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA) for _ in range(count)]


def _server(work: Work, factor: float) -> Behaviour:
    async def answer(key: str, times: int) -> bytes:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await asyncio.sleep(work.works[int(key[1:])] * factor)
        finally:
            work.spans.append((began, loop.time()))
        return DONE

    return answer


async def _pumped(fleet: Fleet, work: Work, order: Order) -> None:
    """The pump, fed against its credits as a node is."""
    loop = asyncio.get_running_loop()
    async with Scene() as made:
        for index in range(SERVERS):
            made.lane(index, _server(work, fleet.factor(index)), fleet.slots)

        async def comes_and_goes() -> None:
            if fleet.dies_s is not None:
                await asyncio.sleep(fleet.dies_s)
                made.pump.close(1, died=True)
                await asyncio.sleep(fleet.back_s - fleet.dies_s)
                made.lane(1, _server(work, 1.0), fleet.slots)

        life = asyncio.create_task(comes_and_goes())
        waiting = prompts(len(work.works))
        waiting = [waiting[place] for place in order(work.works)]
        while len(made.records) < len(work.works):
            count = min(256, made.pump.credits())
            made.pump.offer(waiting[:count])
            del waiting[:count]
            await asyncio.sleep(FEEDS_S)
        work.ended = max(end for _, end in work.spans)
        await life
    assert loop.time() >= work.ended


async def _round_robin(fleet: Fleet, work: Work, order: Order) -> None:
    """As many in flight as there are slots, each request to the next server in turn, where the rest waits for a slot. A
    server that is away is left out, and what it had begins anew."""
    loop = asyncio.get_running_loop()
    slots = [asyncio.Semaphore(fleet.slots) for _ in range(SERVERS)]
    turns: Iterator[int] = cycle(range(SERVERS))
    room = asyncio.Semaphore(fleet.slots * SERVERS)

    def is_away() -> bool:
        return fleet.dies_s is not None and fleet.dies_s <= loop.time() < fleet.back_s

    async def one(number: int) -> None:
        while True:
            index = next(turns)
            if index == 1 and is_away():
                continue
            async with slots[index]:
                if index == 1 and is_away():
                    continue
                began, takes = loop.time(), work.works[number] * fleet.factor(index)
                dies = fleet.dies_s if index == 1 and fleet.dies_s is not None and began < fleet.dies_s else None
                if dies is not None and began + takes > dies:
                    await asyncio.sleep(dies - began)
                    work.spans.append((began, loop.time()))
                    continue
                await asyncio.sleep(takes)
                work.spans.append((began, loop.time()))
            room.release()
            return

    async with asyncio.TaskGroup() as tasks:
        for number in order(work.works):
            await room.acquire()
            tasks.create_task(one(number))
    work.ended = max(end for _, end in work.spans)


def _as_they_come(works: list[float]) -> list[int]:
    return list(range(len(works)))


def _longest_first(works: list[float]) -> list[int]:
    return sorted(range(len(works)), key=lambda place: -works[place])


def measure_all(count: int, small: int, sets: int, slots: int = SLOTS) -> list[Words]:
    """Busy in the middle of a long set, and the whole of it over the lower bound; the same of short sets, their mean:
    where the longest few prompts go decides there, and that is chance."""
    through = count * MEAN_S / slots / SERVERS
    fleets = (
        Fleet("equal servers", slots),
        Fleet("one 3 × slower", slots, slow=3.0),
        Fleet("one dies and comes back", slots, dies_s=0.3 * through, back_s=0.6 * through),
    )
    since, until = 3 * MEAN_S, 0.7 * through
    rows = []
    for fleet in fleets:
        busy, spans = [], []
        for way in (_pumped, _round_robin):
            work = Work(_works(count))
            spans.append(_makespan(way, fleet, work))
            busy.append(work.busy(since, until) / (fleet.slots_until(until) - fleet.slots_until(since)))
            stays = Fleet(fleet.name, slots, fleet.slow)
            spans.append(fmean(_makespan(way, stays, Work(_works(small, seed))) for seed in range(sets)))
        words = (f"{busy[0]:.4f}", "", f"round robin {busy[1]:.3f}")
        rows.append((f"slots busy, simulated, σ = 1, {fleet.name}", "≥ 0.99", *words))
        what = f"makespan ÷ lower bound, {fleet.name}, of {count:,}; of {small:,}, mean of {sets}"
        rows.append((what, "", f"{spans[0]:.3f}; {spans[1]:.2f}", "", f"round robin {spans[2]:.3f}; {spans[3]:.2f}"))
    what = f"the same makespan, equal servers, of {count:,}, if lengths were known and the longest went first"
    rows.append((what, "", f"{_makespan(_pumped, fleets[0], Work(_works(count)), _longest_first):.3f}", "", ""))
    return rows


def _makespan(way: Way, fleet: Fleet, work: Work, order: Order = _as_they_come) -> float:
    """Over the lower bound."""
    play(way(fleet, work, order))
    return work.ended / work.bound(fleet, work.ended)

"""The pump under servers that come, fail, fall into doubt and go at random: every prompt ends as exactly one record."""

import asyncio
import random
from collections import Counter

from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from tests.contract.pump_fakes import DONE, Scene, answers, play, prompts
from tokenmill.attempt import Lane
from tokenmill.errors import BrokenError, BusyError, GoneError, LateError, LocalLimitError, RefusedError, RequestError

FAULTS: list[RequestError | KeyError] = [
    *(BrokenError("HTTP 500"), BrokenError("HTTP 500", body="the engine is dead"), BusyError("HTTP 503")),
    *(GoneError("reset"), LateError("late"), RefusedError("HTTP 400"), LocalLimitError("EMFILE")),
    KeyError("choices"),  # a plug-in's bug
]
MOST_LANES = 4

many = settings(max_examples=150, deadline=None, derandomize=True)
seeds = given(seed=st.integers(0, 2**32))


@settings(many)
@seeds
def test_every_prompt_ends_once_when_a_new_server_does_what_is_left(seed: int) -> None:
    note(f"seed {seed}")
    play(Mayhem(random.Random(seed)).run(survivor=False))


@settings(many)
@example(seed=12)
@seeds
def test_every_prompt_ends_once_when_one_of_the_servers_survives(seed: int) -> None:
    note(f"seed {seed}")
    play(Mayhem(random.Random(seed)).run(survivor=True))


class Mayhem:
    """`calm`: from now on servers only do their work."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.calm = False
        self.offered = 0
        self.lanes: dict[int, Lane] = {}

    async def behave(self, key: str, times: int) -> bytes:
        await asyncio.sleep(self.rng.choice([0.0, 0.1, 1.0, 30.0]))
        if not self.calm and self.rng.random() < 0.4:
            raise self.rng.choice(FAULTS)
        return DONE

    async def run(self, *, survivor: bool) -> None:
        async with Scene(attempts=self.rng.randint(1, 4)) as made:
            for _ in range(self.rng.randint(5, 40)):
                await self.step(made)
            if survivor and self.lanes:
                await self.leave_one(made)
            else:
                self.close_all(made)
                made.lane(MOST_LANES, answers)
            await made.until(self.offered)
            counts = Counter(record.key for record in made.records)
            assert counts == {f"p{n}": 1 for n in range(self.offered)}
            assert (made.pump.in_flight, made.pump.queued) == (0, 0)

    async def leave_one(self, made: Scene) -> None:
        """All but one fall into doubt; they end what they have, and then they are gone."""
        last = self.lanes.pop(self.rng.choice(sorted(self.lanes)))
        made.pump.resume(last)
        for lane in self.lanes.values():
            made.pump.hold(lane)
        await asyncio.sleep(200.0)
        self.calm = True
        if last.held:
            made.pump.resume(last)
        self.close_all(made)

    def close_all(self, made: Scene) -> None:
        for index in self.lanes:
            made.pump.close(index)

    async def step(self, made: Scene) -> None:
        rng, lanes = self.rng, self.lanes
        match rng.randrange(6):
            case 0:
                credits = made.pump.credits()
                assert credits >= 0
                count = rng.randint(0, credits)
                made.pump.offer(prompts(count, self.offered))
                self.offered += count
            case 1 if len(lanes) < MOST_LANES:
                index = next(n for n in range(MOST_LANES) if n not in lanes)
                lanes[index] = made.lane(index, self.behave, capacity=rng.randint(1, 4))
            case 2 if lanes:
                made.pump.close(lanes.pop(rng.choice(sorted(lanes))).index)
            case 3 if lanes:
                made.pump.hold(lanes[rng.choice(sorted(lanes))])
            case 4 if lanes:
                made.pump.resume(lanes[rng.choice(sorted(lanes))])
            case _:
                await asyncio.sleep(rng.choice([0.0, 0.05, 0.5, 5.0]))

"""One setup's server, launched and supervised as a run does it, in a closed loop on given prompts.

The loop keeps exactly so many requests in flight: each answer asks for the next prompt. Answers are counted and thrown
away. Nothing is judged by a clock of the server's: an answer came when its record was there.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from tokenmill.config import Config
from tokenmill.core.records import Prompt, Record
from tokenmill.core.server import State
from tokenmill.core.trials import WINDOWS, Answer, Trial, accept_length, mean_s, rate_by_slot, windows
from tokenmill.errors import NoServerError, StoppedError, TokenmillError
from tokenmill.events import Event
from tokenmill.folder import RunFolder
from tokenmill.leftovers import survivors
from tokenmill.node import LocalNode
from tokenmill.plain import start_of

WARM_SHARE = 1 / 6
"""Of a measurement's time, that passes before it: prompts are read all at once at the beginning."""

STRETCH = 3
"""Times as long as planned, that it measures at most where answers take long: more would be the others' time."""

FAILED_SHARE = 0.5
"""More failed answers than this, and the rate is of something else."""


class Watch:
    """Whether anybody wants it to end, until when it may go on (`deadline`, monotonic), and what it is doing; `tick`
    hears of that once a second at least."""

    def __init__(self, tick: Callable[[str], None]) -> None:
        self.deadline = float("inf")
        self.doing = ""
        self.stopping = False
        self.bench: Bench | None = None
        self._tick = tick

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def look(self) -> None:
        """Raises StoppedError; NoServerError where the time is over."""
        self._tick(self.doing)
        if self.stopping:
            raise StoppedError("told to stop")
        if self.left_s < 0:
            raise NoServerError("the time was over before it was measured", fix="--minutes: more")


@dataclass(frozen=True, slots=True)
class Plan:
    """Of a trial: it measures for `seconds` at least, and waits for the last answers for `patience_s` at most; below
    `out_of_reach` tokens a second its spread is of no interest."""

    seconds: float
    patience_s: float
    out_of_reach: float = 0.0


class Bench:
    """A server that is ready takes `width` requests at once at most."""

    def __init__(
        self, config: Config, folder: RunFolder, messages: Sequence[tuple[msgspec.Raw, msgspec.Raw]], watch: Watch
    ) -> None:
        self.node = LocalNode(config, folder, "", survivors(folder))
        self.events: list[Event] = []
        self.width = 0
        self.start_s = 0.0
        self._messages = messages
        self._watch = watch
        self._answers: list[Answer] = []
        self._failed: list[str] = []
        self._asked: dict[str, float] = {}
        self._aim = 0
        self._next = 0
        self._running: asyncio.Task[None] | None = None

    async def start(self, name: str) -> None:
        """Returns when the server is ready. Raises what its node raises where it cannot be started."""
        began = time.monotonic()
        self._running = asyncio.create_task(self.node.run())
        while not await self.node.credits():
            await self._turn()
            for server in (await self.node.status()).servers:
                self._watch.doing = f"{name}: {server.state} {start_of(server)}".rstrip()
        self.width = (await self.node.status()).capacity
        self.start_s = time.monotonic() - began

    async def measure(self, name: str, number: int, width: int, plan: Plan) -> Trial:
        """One trial of the server: a warm-up, then a stretch in which every request's tokens count for as much of it as
        lies within, long enough that a window holds a whole answer of each slot. Answers that were asked for by its end
        are waited for with all slots still full; where one of them does not come, only what was before it counts."""
        self._aim = width
        earlier = set(self._asked)
        while earlier & self._asked.keys():
            await self._turn()
        begun, failed, came = time.monotonic(), len(self._failed), len(self._answers)
        begin = begun + plan.seconds * WARM_SHARE
        end = await self._stretch(begin, came, plan)
        bad, fresh = self._failed[failed:], self._answers[came:]
        longest = max((each.came - each.asked for each in fresh), default=0.0)
        trial = Trial(name, number, width=width, start_s=round(self.start_s, 1), answer_s=round(longest, 2))
        if len(bad) > FAILED_SHARE * (len(bad) + len(fresh)):
            return msgspec.structs.replace(trial, failure=f"{len(bad)} answers failed: {bad[0]}")
        if end - begin < plan.seconds / 2:
            words = f"its answers take too long to be measured: {len(fresh)} came in {time.monotonic() - begun:.0f} s"
            return msgspec.structs.replace(trial, failure=words, fix="--minutes: more, or --set generation.max_tokens")
        status = (await self.node.status()).servers[0]
        return msgspec.structs.replace(
            trial,
            rates=tuple(round(rate, 2) for rate in windows(self._answers, begin, end)),
            accept=accept_length(fresh) or status.accept_length,
            answers=len(fresh),
            tokens=sum(each.tokens for each in fresh),
        )

    async def _stretch(self, begin: float, came: int, plan: Plan) -> float:
        """Where it ends, once the answers that count are there; the new ones are those behind the first `came`."""
        end = begin + plan.seconds
        while True:
            while time.monotonic() < end:
                await self._turn()
            while self._outstanding(end) and time.monotonic() < end + plan.patience_s:
                await self._turn()
            if left := self._outstanding(end):
                return min(left)
            fresh = self._answers[came:]
            longer = begin + min(WINDOWS * mean_s(fresh), STRETCH * plan.seconds)
            longer = min(longer, self._watch.deadline - 2 * mean_s(fresh))
            if longer <= end or rate_by_slot(fresh, self._aim) < plan.out_of_reach:
                return end
            end = longer

    def _outstanding(self, before: float) -> list[float]:
        return [asked for asked in self._asked.values() if asked < before]

    async def _turn(self) -> None:
        """Takes what came within a second at most, and asks for as many again. Raises what ended the node."""
        self._watch.look()
        if self.width and any(each.server.state not in (State.READY, State.SUSPECT) for each in self.node.supervisors):
            raise NoServerError("the server has ended")  # it would rest for an hour: none gets another life
        await self._fill()
        results = await self.node.results()
        moment = time.monotonic()
        self.events += results.events
        for record in results.records:
            asked = self._asked.pop(record.key, None)
            if asked is not None:
                self._note(record, asked, moment)
        await self._fill()
        if results.ended:
            assert self._running is not None
            await self._running
            raise NoServerError("the server has ended")

    def _note(self, record: Record, asked: float, moment: float) -> None:
        if record.output_tokens:
            self._answers.append(Answer(asked, moment, record.output_tokens, record.accept_length))
        else:
            self._failed.append(record.error or "no token")

    async def _fill(self) -> None:
        fresh = []
        while len(self._asked) < self._aim:
            messages, tools = self._messages[self._next % len(self._messages)]
            key = str(self._next)
            self._next += 1
            self._asked[key] = time.monotonic()
            fresh.append(
                Prompt(key=key, sample=0, row=self._next, cohort=-1, digest=key, messages=messages, tools=tools)
            )
        if fresh:
            await self.node.offer(fresh)

    def why(self) -> tuple[str, str] | None:
        """Why its server has failed, and the fix; None where it has not."""
        failures = [each.server.failure for each in self.node.supervisors if each.server.failure is not None]
        return (str(failures[-1]), failures[-1].fix) if failures else None

    async def stop(self) -> None:
        """Ends the server, and proves it; at the second call it is killed."""
        await self.node.stop(0.0, keep=False)

    async def ended(self) -> None:
        """Waits for its end; what the node raised is known already."""
        if self._running is not None:
            try:
                await self._running
            except TokenmillError:
                pass  # a bug is raised here
        self.events += (await self.node.results()).events


@asynccontextmanager
async def serving(bench: Bench, name: str, watch: Watch) -> AsyncIterator[Bench]:
    """A server that is ready, for the scope; it has ended, with all its processes, at the end of it."""
    watch.bench = bench
    try:
        await bench.start(name)
        yield bench
    finally:
        await bench.stop()
        await bench.ended()
        watch.bench = None

"""The pump: prompts in, judged records out. A server takes the next prompt when it has room: no round robin, no wait.

Invariants: a prompt offered ends as exactly one record or stays with the pump; it is never with two servers at once,
since it moves on only after its request has ended or was aborted. A server's own trouble (gone, full, engine dead) is
never charged to the prompt; an error that is the request's own is, and after `attempts` the prompt has failed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
import xxhash

from tokenmill.client import Client
from tokenmill.core import judge
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import NULL, Completion, Label, Prompt, Record, failed
from tokenmill.engines.base import Engine, Rendered, Sampling, ServerInfo, Spec
from tokenmill.errors import (
    BadPromptError,
    BrokenError,
    BusyError,
    GoneError,
    LateError,
    LocalLimitError,
    PluginError,
    RefusedError,
    RequestError,
    boundary,
)
from tokenmill.render import fit

MIN_TIMEOUT_S = 600.0
"""A request is never given up earlier, whatever the rates seen: nothing is lost by waiting in a healthy server."""

TIMEOUT_FACTOR = 3.0
"""Slots slow down as a batch fills: the slowest rate seen so far is not the slowest there will be."""

MIN_RATE_TOKENS = 32
"""A shorter output's time is mostly the prompt's and says nothing of the rate."""

BUSY_PAUSE_S, BUSY_PAUSE_MAX_S = 0.5, 10.0
"""After "queue full": each slot waits for itself, twice as long at each refusal."""

BROKEN_IN_ROW = 3
"""So many server errors without one answer between them are the server's trouble, not the prompts'. No more than the
attempts of a prompt, or a sick server that is alone would use them up."""

ABORT_TIMEOUT_S = 5.0

LOOKAHEAD = 16
"""Prompts a node holds beyond its slots, at least: the time until the next offer."""


@dataclass(slots=True)
class Lane:
    """One ready server's side of the pump. The supervisor opens and closes it; counters only grow."""

    name: str
    index: int
    engine: Engine
    spec: Spec
    client: Client
    info: ServerInfo
    reading: Reading
    capacity: int
    on_trouble: Callable[[RequestError], None]
    in_flight: int = 0
    answers: int = 0
    tokens: int = 0
    broken_in_row: int = 0
    held: bool = False
    accept_length: float | None = None
    slots: set["asyncio.Task[None]"] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Orders:
    """What every request of a run has in common."""

    sampling: Sampling
    thinking: bool
    rules: Rules
    settings: str
    attempts: int = 3
    seed: int | None = None
    timeout_s: float | None = None


Render = Callable[[msgspec.Raw, msgspec.Raw, Client], Awaitable[Rendered]]
"""Messages, tools and the server's client → what to send; see render.py."""


class Pump:
    """`deliver` takes each record as it is judged; it must not block. `clock` is Unix time.

    `room` is waited for before an answer is read: as long as the store is behind, answers stay the bytes they came as.
    """

    def __init__(
        self,
        orders: Orders,
        render: Render,
        deliver: Callable[[Record], None],
        clock: Callable[[], float] = time.time,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.orders = orders
        self.lanes: dict[int, Lane] = {}
        self._render = render
        self._deliver = deliver
        self._clock = clock
        self._room = room
        self._queue: deque[Prompt] = deque()
        self._again: list[tuple[Prompt, int]] = []
        self._hungry: deque[tuple[asyncio.Future[Prompt], Lane]] = deque()
        self._slowest: float | None = None
        self._life = f"tm-{int(clock() * 1000):x}"
        self._requests = count()
        self.draining = False

    # -- the node's side ---------------------------------------------------------------------------------------------
    def offer(self, prompts: Sequence[Prompt]) -> None:
        if self.draining:
            return  # too late: they have no record, so the next start asks for them again
        self._queue.extend(prompts)
        self._feed()

    @property
    def capacity(self) -> int:
        return sum(lane.capacity for lane in self.lanes.values())

    @property
    def in_flight(self) -> int:
        return sum(lane.in_flight for lane in self.lanes.values())

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self._again)

    def credits(self) -> int:
        """How many more prompts can be used now: free slots, and as many waiting as the slots would take at once."""
        if self.draining or not self.lanes:
            return 0
        slots = self.capacity
        return max(0, slots + max(LOOKAHEAD, slots) - self.in_flight - self.queued)

    def drain(self) -> None:
        """No more prompts are begun; those that wait are forgotten."""
        self.draining = True
        self._again.clear()
        self._queue.clear()

    # -- the supervisors' side ---------------------------------------------------------------------------------------
    def open(self, lane: Lane) -> None:
        """Begins to give a server prompts, as many at once as its capacity."""
        self.lanes[lane.index] = lane
        loop = asyncio.get_running_loop()
        lane.slots = {loop.create_task(self._slot(lane), name=f"{lane.name} slot {n}") for n in range(lane.capacity)}

    def close(self, index: int) -> None:
        """Takes a server's prompts back, uncharged, and gives it no more."""
        lane = self.lanes.pop(index, None)
        if lane is None:
            return
        lane.held = True
        for task in lane.slots:
            task.cancel()
        self._feed()  # what waited for this server is for whoever is left

    def hold(self, lane: Lane) -> None:
        """No new prompts for a server in doubt; those in flight go on."""
        lane.held = True
        self._feed()  # what failed elsewhere and waited for this server goes back there

    def resume(self, lane: Lane) -> None:
        """The doubt is over: prompts again."""
        lane.held = False
        lane.broken_in_row = 0
        self._feed()

    # -- one slot ----------------------------------------------------------------------------------------------------
    async def _slot(self, lane: Lane) -> None:
        pause = BUSY_PAUSE_S
        while True:
            prompt = await self._take(lane)
            # New at every try: engines refuse an id that lives on from an earlier one, or from a tokenmill that died.
            request_id = f"{self._life}-{next(self._requests)}"
            lane.in_flight += 1
            refused = False
            try:
                with boundary(f"engine {lane.engine.kind}"):
                    record = await self._complete(lane, prompt, request_id)
                lane.answers += 1
                lane.broken_in_row = 0
                pause = BUSY_PAUSE_S
                self._deliver(record)
                del record  # 0.2 MB that this slot would hold for as long as its next request takes
            except asyncio.CancelledError:
                self._give_back(prompt)
                raise
            except (BusyError, LocalLimitError):
                self._give_back(prompt)
                refused = True
            except (RequestError, PluginError) as error:
                await self._failure(lane, prompt, request_id, error)
            finally:
                lane.in_flight -= 1
            if refused:
                await asyncio.sleep(pause)
                pause = min(pause * 2, BUSY_PAUSE_MAX_S)

    async def _take(self, lane: Lane) -> Prompt:
        prompt = self._next(lane)
        if prompt is not None:
            return prompt
        future: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()
        self._hungry.append((future, lane))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give_back(future.result())
            raise

    def _next(self, lane: Lane) -> Prompt | None:
        """What this server should do next; a prompt that failed on it goes to another one, if there is one."""
        if lane.held:
            return None
        alone = all(other.held for other in self.lanes.values() if other is not lane)
        for position, (prompt, avoid) in enumerate(self._again):
            if avoid != lane.index or alone:
                del self._again[position]
                return prompt
        return self._queue.popleft() if self._queue else None

    def _feed(self) -> None:
        """Hands waiting prompts to waiting slots, the longest idle first."""
        for _ in range(len(self._hungry)):
            future, lane = self._hungry.popleft()
            if future.done():
                continue
            prompt = self._next(lane)
            if prompt is None:
                self._hungry.append((future, lane))
                if not self.queued:
                    return
            else:
                future.set_result(prompt)

    def _give_back(self, prompt: Prompt) -> None:
        if self.draining:
            return  # it has no record, so the next start asks for it again
        self._queue.appendleft(prompt)
        self._feed()

    def _trouble(self, lane: Lane, error: RequestError) -> None:
        if not lane.held:
            self.hold(lane)
            lane.on_trouble(error)

    async def _failure(self, lane: Lane, prompt: Prompt, request_id: str, error: RequestError | PluginError) -> None:
        """A request that ended without an answer: the server's own trouble, or the request's own failure."""
        try:
            with boundary(f"engine {lane.engine.kind}"):
                if isinstance(error, RequestError) and self._is_the_servers(lane, error):
                    self._trouble(lane, error)
                    self._give_back(prompt)
                    return
                if isinstance(error, LateError):
                    await self._abort(lane, request_id)
        except PluginError as bug:
            error = bug
        except asyncio.CancelledError:
            self._charge(lane, prompt, error)
            raise
        self._charge(lane, prompt, error)

    def _is_the_servers(self, lane: Lane, error: RequestError) -> bool:
        """Whether the server failed, not this request: the prompt is not charged then."""
        if isinstance(error, BrokenError):
            lane.broken_in_row += 1
            return lane.engine.lost(error.body) or lane.broken_in_row >= BROKEN_IN_ROW
        return isinstance(error, GoneError)

    def _charge(self, lane: Lane, prompt: Prompt, error: RequestError | PluginError) -> None:
        """Another attempt, elsewhere if possible, or a failed record."""
        if prompt.attempt >= self.orders.attempts:
            self._deliver(self._failed(prompt, "aborted", f"after {prompt.attempt} attempts: {error}", lane))
        elif not self.draining:
            self._again.append((msgspec.structs.replace(prompt, attempt=prompt.attempt + 1), lane.index))
            self._feed()

    async def _abort(self, lane: Lane, request_id: str) -> None:
        """Ends a late request on its server, so that no two copies of an id ever live."""
        request = lane.engine.abort(request_id)
        if request is None:
            return  # closing the connection did it
        try:
            await lane.client.post_fresh(request.path, request.body, timeout_s=ABORT_TIMEOUT_S)
        except RequestError:
            pass  # a server that cannot even do this is found out by its supervisor

    # -- one request -------------------------------------------------------------------------------------------------
    async def _complete(self, lane: Lane, prompt: Prompt, request_id: str) -> Record:
        """One attempt. Raises RequestError; all that is the prompt's own fault comes back as a failed record."""
        started = self._clock()
        begun = time.monotonic()
        orders = self.orders
        try:
            rendered = await self._render(prompt.messages, prompt.tools, lane.client)
            sampling = fit(orders.sampling, rendered, lane.info)
        except BadPromptError as error:
            label: Label = "prompt_too_long" if error.label == "prompt_too_long" else "bad_prompt"
            return self._failed(prompt, label, str(error), lane, started)
        request = lane.engine.encode(
            lane.spec,
            rendered,
            sampling,
            request_id=request_id,
            thinking=orders.thinking,
            seed=_seed(orders.seed, prompt),
        )
        try:
            body = await lane.client.post(request.path, request.body, timeout_s=self.limit_s(sampling.max_tokens))
        except RefusedError as error:
            refused: Label = "prompt_too_long" if lane.engine.too_long(str(error)) else "request_refused"
            return self._failed(prompt, refused, str(error), lane, started)
        seconds = time.monotonic() - begun
        if self._room is not None:
            await self._room()
        completion = lane.engine.decode(body)
        if completion.finish_reason not in ("stop", "length"):
            raise BrokenError(f"finish reason {completion.finish_reason!r}")
        self._note(lane, completion, seconds)
        return self._record(lane, prompt, rendered, completion, started, seconds)

    def limit_s(self, max_tokens: int) -> float:
        """How long a request may take: as the config says, or by the slowest rate that a slot has shown."""
        if self.orders.timeout_s is not None:
            return self.orders.timeout_s
        if self._slowest is None:
            return max(MIN_TIMEOUT_S, float(max_tokens))  # nothing seen yet: a token a second
        return max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * max_tokens / self._slowest)

    def _note(self, lane: Lane, completion: Completion, seconds: float) -> None:
        lane.tokens += completion.output_tokens
        if (now := completion.accept_length) is not None:
            previous = lane.accept_length
            lane.accept_length = now if previous is None else previous + 0.05 * (now - previous)
        if seconds > 0 and completion.output_tokens >= MIN_RATE_TOKENS:
            rate = completion.output_tokens / seconds
            self._slowest = rate if self._slowest is None else min(rate, self._slowest)

    def _record(
        self, lane: Lane, prompt: Prompt, rendered: Rendered, completion: Completion, started: float, seconds: float
    ) -> Record:
        measured = judge.measure(completion, lane.reading, self.orders.rules)
        return Record(
            key=prompt.key,
            sample=prompt.sample,
            turn=prompt.turn,
            row=prompt.row,
            cohort=prompt.cohort,
            digest=prompt.digest,
            settings=self.orders.settings,
            messages=prompt.messages,
            tools=prompt.tools,
            prompt_ids=rendered.ids if rendered.ids != NULL else completion.prompt_ids,
            output_ids=completion.output_ids,
            text=completion.text,
            parts=measured.parts,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            output_tokens=completion.output_tokens,
            reasoning_tokens=measured.reasoning_tokens,
            repetition=measured.repetition,
            thinking=self.orders.thinking,
            server=lane.name,
            attempt=prompt.attempt,
            started=round(started, 3),
            seconds=round(seconds, 3),
            accept_length=completion.accept_length,
            labels=measured.labels,
        )

    def _failed(self, prompt: Prompt, label: Label, error: str, lane: Lane, started: float | None = None) -> Record:
        began = self._clock() if started is None else started
        return failed(prompt, label, error, settings=self.orders.settings, server=lane.name, started=round(began, 3))


def _seed(seed: int | None, prompt: Prompt) -> int | None:
    """Per id, so that samples of one prompt differ and a repeated run does not."""
    if seed is None:
        return None
    return xxhash.xxh32_intdigest(f"{seed}\0{prompt.key}\0{prompt.sample}\0{prompt.turn}".encode())

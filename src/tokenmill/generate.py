"""The pump: prompts in, judged records out. A server takes the next prompt when it has room: no round robin, no wait.

Invariants: a prompt offered ends as exactly one record or stays with the pump; it is never with two servers at once,
since it moves on only after its request has ended or was aborted. A server's own trouble (gone, full, engine dead) is
never charged to the prompt, unless it dies of it again and again (suspects.py): what broke with its server waits until
it is known whether the server died. An error that is the request's own is charged, and after `attempts` the prompt has
failed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import msgspec

from tokenmill.attempt import Attempts, Lane, Orders, Render
from tokenmill.core.records import Prompt, Record
from tokenmill.errors import (
    BrokenError,
    BusyError,
    GoneError,
    LateError,
    LocalLimitError,
    PluginError,
    RequestError,
    boundary,
)
from tokenmill.suspects import Suspects

BUSY_PAUSE_S, BUSY_PAUSE_MAX_S = 0.5, 10.0
"""After "queue full": each slot waits for itself, twice as long at each refusal."""

BROKEN_IN_ROW = 3
"""So many server errors without one answer between them are the server's trouble, not the prompts'. No more than the
attempts of a prompt, or a sick server that is alone would use them up."""

ABORT_TIMEOUT_S = 5.0
"""A page that needs no engine; a server that does not even give it is found out by its supervisor."""

LOOKAHEAD = 16
"""Prompts a node holds beyond its slots, at least: the time until the next offer."""


class Pump:
    """`deliver` takes each record as it is judged; it must not block. For `clock` and `room` see Attempts."""

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
        self._attempts = Attempts(orders, render, clock, room)
        self._deliver = deliver
        self._queue: deque[Prompt] = deque()
        self._again: list[tuple[Prompt, int]] = []
        self._suspects = Suspects()
        self._hungry: deque[tuple[asyncio.Future[Prompt | None], Lane]] = deque()
        self._life = f"tm-{int(clock() * 1000):x}"
        self._requests = count()
        self.draining = False
        self._bug: BaseException | None = None

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
        broken = sum(len(lane.broken) for lane in self.lanes.values())
        return len(self._queue) + len(self._again) + len(self._suspects.waiting) + broken

    def credits(self) -> int:
        """How many more prompts can be used now: free slots, and as many waiting as the slots would take at once."""
        if self.draining or not self.lanes:
            return 0
        slots = self.capacity
        return max(0, slots + max(LOOKAHEAD, slots) - self.in_flight - self.queued)

    def look(self) -> None:
        """Raises what ended a slot: its prompt is lost, and would be waited for in vain."""
        if self._bug is not None:
            raise self._bug

    def _ended(self, slot: "asyncio.Task[None]") -> None:
        if not slot.cancelled():
            self._bug = self._bug or slot.exception()

    def drain(self) -> None:
        """No more prompts are begun; those that wait are forgotten."""
        self.draining = True
        self._again.clear()
        self._queue.clear()
        self._suspects.waiting.clear()
        for lane in self.lanes.values():
            lane.broken.clear()

    # -- the supervisors' side ---------------------------------------------------------------------------------------
    def open(self, lane: Lane) -> None:
        """Begins to give a server prompts, as many at once as its capacity."""
        self.lanes[lane.index] = lane
        self._add_slots(lane)

    def _add_slots(self, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        for number in range(len(lane.slots), lane.capacity):
            slot = loop.create_task(self._slot(lane), name=f"{lane.name} slot {number}")
            slot.add_done_callback(self._ended)
            lane.slots.add(slot)

    def resize(self, lane: Lane, capacity: int) -> None:
        """So many at once from now on: more begin at once, fewer as requests end. No request is cut off."""
        lane.until_now()
        lane.capacity = capacity
        self._add_slots(lane)
        idle = [future for future, owner in self._hungry if owner is lane and not future.done()]
        for future in idle[: max(0, len(lane.slots) - capacity)]:
            future.set_result(None)

    def close(self, index: int, *, died: bool = False) -> None:
        """Takes a server's prompts back, uncharged, and gives it no more. `died`: one of them may have done it."""
        lane = self.lanes.pop(index, None)
        if lane is None:
            return
        lane.until_now()
        lane.work.close()
        lane.held, lane.died = True, died
        for task in lane.slots:
            task.cancel()
        self._decided(lane)
        self._feed()  # what waited for this server is for whoever is left

    def hold(self, lane: Lane) -> None:
        """No new prompts for a server in doubt; those in flight go on."""
        lane.until_now()
        lane.held = True
        self._feed()  # what failed elsewhere and waited for this server goes back there

    def retire(self, lane: Lane) -> None:
        """No new prompts for a server until it is opened anew, whatever becomes of a doubt; those in flight go on."""
        lane.leaving = True
        self.hold(lane)

    def resume(self, lane: Lane) -> None:
        """The doubt is over: prompts again."""
        if lane.leaving:
            return
        lane.until_now()
        lane.held = False
        lane.broken_in_row = 0
        self._decided(lane)
        self._feed()

    def _decided(self, lane: Lane) -> None:
        """It is known now whether the server died: what broke with it goes back."""
        broken, lane.broken = lane.broken, []
        for prompt in broken:
            self._taken_back(lane, prompt)
            self._suspects.left(lane.index, prompt)

    # -- one slot ----------------------------------------------------------------------------------------------------
    async def _slot(self, lane: Lane) -> None:
        pause = BUSY_PAUSE_S
        while len(lane.slots) <= lane.capacity:
            prompt = await self._take(lane)
            if prompt is None:
                continue
            # New at every try: engines refuse an id that lives on from an earlier one, or from a tokenmill that died.
            request_id = f"{self._life}-{next(self._requests)}"
            lane.begins()
            refused = False
            try:
                with boundary(f"engine {lane.engine.kind}"):
                    record = await self._attempts.make(lane, prompt, request_id)
                lane.answers += 1
                lane.broken_in_row = 0
                lane.refused_since = None
                pause = BUSY_PAUSE_S
                self._suspects.clear(prompt)
                self._deliver(record)
                del record  # 0.2 MB that this slot would hold for as long as its next request takes
            except asyncio.CancelledError:
                self._taken_back(lane, prompt)
                raise
            except (BusyError, LocalLimitError) as error:
                self._give_back(prompt)
                self._refused(lane, error)
                refused = True
            except (RequestError, PluginError) as error:
                await self._failure(lane, prompt, request_id, error)
            finally:
                lane.ends()
                if prompt not in lane.broken and self._suspects.left(lane.index, prompt):
                    self._feed()
            if refused:
                lane.until_now()
                lane.work.refused += 1
                try:
                    await asyncio.sleep(pause)
                finally:
                    lane.until_now()
                    lane.work.refused -= 1
                pause = min(pause * 2, BUSY_PAUSE_MAX_S)
        lane.slots.discard(_this_task())

    async def _take(self, lane: Lane) -> Prompt | None:
        """The next prompt; None where this slot is one too many."""
        prompt = self._next(lane)
        if prompt is not None:
            return prompt
        future: asyncio.Future[Prompt | None] = asyncio.get_running_loop().create_future()
        self._hungry.append((future, lane))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (prompt := future.result()) is not None:
                self._give_back(prompt)
            raise

    def _next(self, lane: Lane) -> Prompt | None:
        """What this server should do next; a prompt that failed on it goes to another one, if there is one."""
        if lane.held:
            return None
        if suspect := self._suspects.take(lane.index):
            return suspect
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
        if self._suspects.is_suspect(prompt):
            self._suspects.waiting.append(prompt)
        else:
            self._queue.appendleft(prompt)
        self._feed()

    def _taken_back(self, lane: Lane, prompt: Prompt) -> None:
        """Its server is gone: it goes back, under suspicion where the server died more than once with it."""
        if lane.died:
            self._suspects.died(lane.index, prompt)
        if lane.died and self._suspects.is_guilty(prompt):
            words = f"a server died each of the {self._suspects.deaths(prompt)} times that it was in flight"
            self._suspects.clear(prompt)
            self._deliver(self._attempts.failed(prompt, "aborted", words, lane))
        else:
            self._give_back(prompt)

    def _refused(self, lane: Lane, error: RequestError) -> None:
        """A server that is full lets something through now and then; one that never does is in trouble."""
        moment = asyncio.get_running_loop().time()
        since = lane.refused_since = moment if lane.refused_since is None else lane.refused_since
        if isinstance(error, BusyError) and moment - since > self.orders.patience_s:
            lane.refused_since = None
            self._trouble(lane, error)

    def _trouble(self, lane: Lane, error: RequestError) -> None:
        if not lane.held:
            self.hold(lane)
            lane.on_trouble(error)

    async def _failure(self, lane: Lane, prompt: Prompt, request_id: str, error: RequestError | PluginError) -> None:
        """A request that ended without an answer: the server's own trouble, or the request's own failure."""
        try:
            with boundary(f"engine {lane.engine.kind}"):
                if isinstance(error, RequestError) and self._is_the_servers(lane, error):
                    self._broke(lane, prompt, error)
                    return
                if isinstance(error, LateError):
                    await self._abort(lane, request_id)
        except PluginError as bug:
            error = bug
        except asyncio.CancelledError:
            self._charge(lane, prompt, error)
            raise
        self._charge(lane, prompt, error)

    def _broke(self, lane: Lane, prompt: Prompt, error: RequestError) -> None:
        """The connection goes first where a prompt kills its server: given to another one at once, it would kill that,
        too, and be in flight at no death that is known."""
        self._trouble(lane, error)
        if self.lanes.get(lane.index) is lane:
            lane.broken.append(prompt)
        else:
            self._taken_back(lane, prompt)

    def _is_the_servers(self, lane: Lane, error: RequestError) -> bool:
        """Whether the server failed, not this request: the prompt is not charged then."""
        if isinstance(error, BrokenError):
            lane.broken_in_row += 1
            return lane.engine.lost(error.body) or lane.broken_in_row >= BROKEN_IN_ROW
        return isinstance(error, GoneError)

    def _charge(self, lane: Lane, prompt: Prompt, error: RequestError | PluginError) -> None:
        """Another attempt, elsewhere if possible, or a failed record."""
        if prompt.attempt >= self.orders.attempts:
            self._deliver(self._attempts.failed(prompt, "aborted", f"after {prompt.attempt} attempts: {error}", lane))
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


def _this_task() -> "asyncio.Task[None]":
    task = asyncio.current_task()
    assert task is not None, "a slot is a task"
    return task

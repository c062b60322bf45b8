"""The head's end of a node that lives in another process, an outpost (outpost.py). Knows nothing of Ray.

What goes over the wire is JSON, as the contract tests have it. A call that could not be delivered is made once more: an
outpost knows what it has met before.
"""

import asyncio
import time
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from tokenmill.cluster.base import Results
from tokenmill.core.records import Prompt
from tokenmill.core.status import NodeStatus
from tokenmill.errors import NodeLostError, TokenmillError, UnreachedError
from tokenmill.outpost import Order, Parcel, Trouble

CALL_S = 60.0
"""A call that takes this long has no living node behind it: the longest wait of a node is a second."""

AGAIN_S = 2.0
"""After a call that could not be delivered, while the node is thought to live."""

STATUS_S = 5.0
"""A status is asked for every second: an older one will do."""


class Actor(Protocol):
    """An outpost's process."""

    async def ask(self, limit_s: float | None, method: str, *words: Any) -> Any:
        """Its answer. Raises NodeLostError where it is gone, UnreachedError where it may live, TimeoutError."""

    async def kill(self) -> None:
        """Ends it, or its place in the queue of those that are to be started. Its servers live on."""


class FarNode:
    """A Node. `done` is set when it has ended or is lost; `trouble` says why, where it was one, `why` why it is
    lost. With `is_left` it counts as lost, whatever it says."""

    def __init__(self, name: str, actor: Actor) -> None:
        self.name = name
        self.trouble: TokenmillError | None = None
        self.done = asyncio.Event()
        self.why = ""
        self.is_left = False
        self._first: Results | None = None
        self._placed: asyncio.Future[bool] | None = None
        self._actor = actor
        self._acknowledged = 0
        self._last = NodeStatus(name, (), state="joining")
        self._records = self._tokens = 0

    async def placed(self, limit_s: float) -> bool:
        """Whether its process has been started, within so long."""
        if self._placed is None:
            self._placed = asyncio.ensure_future(self._actor.ask(None, "__ray_ready__"))
        done, _ = await asyncio.wait([self._placed], timeout=limit_s)
        return bool(done) and self._placed.result()

    async def begin(self, order: Order) -> None:
        """Introduces this head, and hears what the node has from before; raises its own trouble with that."""
        try:
            refused = await self._actor.ask(CALL_S, "begin", msgspec.json.encode(order))
        except TimeoutError:
            raise NodeLostError(f"it has not begun within {CALL_S:.0f} s", fix="ray status") from None
        if refused:
            raise msgspec.json.decode(refused, type=Trouble).error()
        self._first = await self.results()

    async def credits(self) -> int:
        return (await self.status()).credits

    async def offer(self, prompts: list[Prompt]) -> None:
        await self._again("offer", msgspec.json.encode(prompts))

    async def results(self) -> Results:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        parcel = msgspec.json.decode(await self._again("results", self._acknowledged), type=Parcel)
        self._acknowledged = parcel.number
        came = (*parcel.results.records, *parcel.results.handed)
        self._records += len(came)
        self._tokens += sum(record.output_tokens for record in came)
        if parcel.results.ended:
            self.trouble = parcel.trouble.error() if parcel.trouble else None
            self.done.set()
        return parcel.results

    async def status(self) -> NodeStatus:
        """The last one known where the node does not answer at once."""
        try:
            self._last = msgspec.json.decode(await self._actor.ask(STATUS_S, "status"), type=NodeStatus)
        except (NodeLostError, TimeoutError, UnreachedError):
            pass  # whoever takes its results finds out
        return self.last

    @property
    def last(self) -> NodeStatus:
        """As it was last heard of. What it gave counts from this start on: it may be older."""
        return replace(self._last, records=self._records, tokens=self._tokens)

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        if not self.done.is_set():
            try:
                await self._again("stop", grace_s, keep)
            except NodeLostError:
                pass

    async def kill(self) -> None:
        """The process; its servers are ended or are to be kept."""
        if self._placed is not None:
            self._placed.cancel()
        await self._actor.kill()

    async def _again(self, method: str, *words: Any) -> Any:
        deadline = time.monotonic() + CALL_S
        while True:
            if self.is_left:
                raise self._lost("the cluster's head is gone")
            try:
                return await self._actor.ask(CALL_S, method, *words)
            except NodeLostError as error:
                raise self._lost(str(error)) from error
            except UnreachedError as error:
                if time.monotonic() > deadline:
                    raise self._lost(str(error)) from error
                await asyncio.sleep(AGAIN_S)
            except TimeoutError:
                raise self._lost(f"it has not answered for {CALL_S:.0f} s") from None

    def _lost(self, why: str) -> NodeLostError:
        self.done.set()
        self.why = why
        return NodeLostError(f"it is lost: {why}")

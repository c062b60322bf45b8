"""The seam between a run and its nodes: messages only, all msgspec-encodable, so that a node may be on another machine.

It is credit-based: the run offers a node as many prompts as it has credits, and takes records back in batches. No block
is a barrier. A contract test holds the local cluster to it through encode and decode.
"""

from typing import Protocol

import msgspec

from tokenmill.core.records import Again, Prompt, Record
from tokenmill.core.rendering import Rendering
from tokenmill.core.status import NodeStatus
from tokenmill.events import Event


class Results(msgspec.Struct, frozen=True):
    """What a node has for the run since the last call.

    `again` are records, of these or of earlier ones, that it generates anew: each comes back as one more record.
    `rendering` is None until a server has passed its canary; `ended`: nothing more comes.
    """

    records: list[Record]
    events: list[Event]
    credits: int
    rendering: Rendering | None = None
    ended: bool = False
    again: tuple[Again, ...] = ()


class Node(Protocol):
    """One machine's part of a run."""

    async def credits(self) -> int:
        """How many more prompts it can use now."""

    async def offer(self, prompts: list[Prompt]) -> None:
        """Hands prompts over: each comes back as exactly one record, and one more for each `again`; or not at all, once
        `stop` was called."""

    async def results(self) -> Results:
        """Waits for records or events, a second at most."""

    async def status(self) -> NodeStatus: ...

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        """Begins no more prompts, gives those in flight `grace_s` (None: all the time they take), then ends the servers
        or with `keep` leaves them running. A second call with less grace takes effect at once."""

"""The seam between a run and its nodes: messages only, all msgspec-encodable, so that a node may be on another machine.

It is credit-based: the run offers a node as many prompts as it has credits, and takes records back in batches. No block
is a barrier. A contract test holds the local cluster to it through encode and decode.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from tokenmill.core.records import Again, Prompt, Record
from tokenmill.core.rendering import Rendering
from tokenmill.core.status import NodeStatus
from tokenmill.errors import PreflightError
from tokenmill.events import Event


class Results(msgspec.Struct, frozen=True):
    """What a node has for the run since the last call; again what it told before, where that may not have arrived.

    `again` are records, of these or of earlier ones, that it generates anew: each comes back as one more record.
    `rendering` is None until a server has passed its canary; `ended`: nothing more comes.
    `capacity` is how many prompts it can run at once. A node that an earlier life of the run has left brings `handed`,
    records that nobody has taken, and `held`, the prompts that it still has in hand.
    """

    records: list[Record]
    events: list[Event]
    credits: int
    rendering: Rendering | None = None
    ended: bool = False
    again: tuple[Again, ...] = ()
    capacity: int = 0
    handed: tuple[Record, ...] = ()
    held: tuple[Prompt, ...] = ()


class Node(Protocol):
    """One machine's part of a run. Each of its methods raises NodeLostError where it is gone."""

    @property
    def name(self) -> str:
        """Empty where there is but one."""

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


class Cluster(Protocol):
    """All nodes of a run."""

    async def run(self) -> None:
        """Until they have ended; raises the trouble that ended them, if it was one."""

    async def joined(self) -> Node | None:
        """Waits for the next node that has come, None once no more will."""

    async def status(self) -> list[NodeStatus]: ...

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        """As Node.stop, for all of them; none joins any more."""


@contextmanager
def needs_ray() -> Iterator[None]:
    """Around an import of what imports ray; raises PreflightError where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise PreflightError(
            f'fleet.cluster = "ray": {error}', fix="pip install '.[ray]'   in tokenmill's checkout"
        ) from error

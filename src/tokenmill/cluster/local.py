"""One node, in this process. `Encoded` puts any node behind encode and decode, as a node on another machine is."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from tokenmill.cluster.base import Node, Results
from tokenmill.core.records import Prompt
from tokenmill.core.status import NodeStatus

T = TypeVar("T")


def through_wire(message: T, kind: type[T]) -> T:
    """A message as it arrives on the other side."""
    # JSON, since ids and messages are JSON already (msgspec.Raw): within msgpack their bytes mean something else.
    return msgspec.json.decode(msgspec.json.encode(message), type=kind)


class Alone:
    """A cluster of one node."""

    def __init__(self, node: Node, life: Callable[[], Awaitable[None]]) -> None:
        self._node = node
        self._life = life
        self._met = False

    async def run(self) -> None:
        await self._life()

    async def joined(self) -> Node | None:
        if self._met:
            return None
        self._met = True
        return self._node

    async def status(self) -> list[NodeStatus]:
        return [await self._node.status()]

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        await self._node.stop(grace_s, keep)


class Encoded:
    """A node whose messages all pass through encode and decode."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def name(self) -> str:
        return self._node.name

    async def credits(self) -> int:
        return through_wire(await self._node.credits(), int)

    async def offer(self, prompts: list[Prompt]) -> None:
        await self._node.offer(through_wire(prompts, list[Prompt]))

    async def results(self) -> Results:
        return through_wire(await self._node.results(), Results)

    async def status(self) -> NodeStatus:
        return through_wire(await self._node.status(), NodeStatus)

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        await self._node.stop(through_wire(grace_s, float | None), keep)  # type: ignore[arg-type]

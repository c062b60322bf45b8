"""A pump on scripted servers without a node: for what a whole run shows too seldom."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from tokenmill.attempt import Lane, Orders
from tokenmill.client import Client
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import Prompt, Record
from tokenmill.engines.base import Engine, Rendered, Sampling, ServerInfo, Spec
from tokenmill.errors import RequestError
from tokenmill.generate import Pump


@dataclass
class Pumping:
    """A pump and what came of it: `records` are delivered, `troubles` are what it took for the servers' own."""

    engine: Engine
    pump: Pump
    records: asyncio.Queue[Record]
    troubles: list[RequestError] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def open(self, index: int, port: int, *, capacity: int) -> Lane:
        """Begins to use the server on a port."""
        client = Client(f"http://127.0.0.1:{port}")
        self.clients.append(client)
        lane = Lane(
            name=str(index),
            index=index,
            engine=self.engine,
            spec=Spec(index, "", "fake", port, 0, "", ""),
            client=client,
            info=ServerInfo(),
            reading=Reading(thinking=True),
            capacity=capacity,
            on_trouble=self.troubles.append,
        )
        self.pump.open(lane)
        return lane

    async def take(self, count: int, timeout_s: float = 10.0) -> list[Record]:
        """So many of the next records; raises TimeoutError where they do not come."""
        async with asyncio.timeout(timeout_s):
            return [await self.records.get() for _ in range(count)]


@asynccontextmanager
async def pumping(engine: Engine, *, timeout_s: float | None, attempts: int) -> AsyncIterator[Pumping]:
    """A pump for the scope. A prompt's text goes out as messages, or as its number where the engine is sent ids."""
    records: asyncio.Queue[Record] = asyncio.Queue()
    orders = Orders(Sampling(400), True, Rules(), "s", attempts=attempts, timeout_s=timeout_s)
    made = Pumping(
        engine, Pump(orders, _by_number if engine.renders == "ids" else _as_it_is, records.put_nowait), records
    )
    try:
        yield made
    finally:
        for index in list(made.pump.lanes):
            made.pump.close(index)
        for client in made.clients:
            await client.close()


def prompt(number: int) -> Prompt:
    messages = [{"role": "user", "content": f"Question {number}"}]
    return Prompt(f"p{number}", 0, number, 0, f"{number:016x}", msgspec.Raw(msgspec.json.encode(messages)))


async def _as_it_is(messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
    return Rendered(messages, tools)


async def _by_number(messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
    number = msgspec.json.decode(messages)[0]["content"].removeprefix("Question ")
    return Rendered(messages, tools, ids=msgspec.Raw(f"[{number}]".encode()), tokens=1)

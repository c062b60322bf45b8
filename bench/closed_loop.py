"""What servers can do with nothing around them: a bare closed loop, `width` requests in flight on each.

Posts bodies in a given order, each once, and keeps of the answers when they came and their tokens: the denominator of
"tokens/s under tokenmill ÷ peak".
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import aiohttp
import uvloop

from tokenmill.core.trials import Answer

REQUEST_S = 120.0


def loop(
    urls: Sequence[str], bodies: Iterable[bytes], tokens: Callable[[Any], int], *, width: int, seconds: float
) -> list[Answer]:
    """`width` in flight at each address until all bodies are sent, or `seconds` are over; `tokens` reads an answer."""
    return uvloop.run(_loop(urls, iter(bodies), tokens, width, seconds))


async def _loop(
    urls: Sequence[str], bodies: Iterator[bytes], tokens: Callable[[Any], int], width: int, seconds: float
) -> list[Answer]:
    end = time.monotonic() + seconds
    answers: list[Answer] = []

    async def slot(session: aiohttp.ClientSession, url: str) -> None:
        while (asked := time.monotonic()) < end and (body := next(bodies, None)) is not None:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
                answer = json.loads(await reply.read())
            answers.append(Answer(asked, time.monotonic(), tokens(answer)))

    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as session, asyncio.TaskGroup() as tasks:
        for url in urls:
            for _ in range(width):
                tasks.create_task(slot(session, url))
    return answers

"""What servers can do with nothing around them: a bare closed loop, `width` requests in flight on each.

Posts the prompt ids of a finished run with the same sampling, throws the answers away and counts their tokens: the
denominator of "tokens/s under tokenmill ÷ peak".
"""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import uvloop

REQUEST_S = 120.0


@dataclass(frozen=True)
class Rate:
    """Tokens of the answers that came within `seconds`, after the ramp."""

    tokens: int
    seconds: float

    @property
    def per_s(self) -> float:
        return round(self.tokens / self.seconds, 1)


def peak(
    ports: Sequence[int], prompts: Sequence[Sequence[int]], sampling: dict[str, object], width: int, seconds: float
) -> Rate:
    """`width` in flight on each port for a ramp of a third of `seconds`, then for `seconds`."""
    return uvloop.run(_peak(ports, prompts, sampling, width, seconds))


async def _peak(
    ports: Sequence[int], prompts: Sequence[Sequence[int]], sampling: dict[str, object], width: int, seconds: float
) -> Rate:
    bodies = itertools.cycle(
        [json.dumps({"input_ids": list(ids), "sampling_params": sampling}).encode() for ids in prompts]
    )
    begin = time.monotonic() + seconds / 3
    end = begin + seconds
    tokens = 0

    async def slot(session: aiohttp.ClientSession, url: str) -> None:
        nonlocal tokens
        while time.monotonic() < end:
            headers = {"Content-Type": "application/json"}
            async with session.post(url, data=next(bodies), headers=headers) as reply:
                answer = json.loads(await reply.read())
            if begin <= time.monotonic() < end:
                tokens += answer["meta_info"]["completion_tokens"]

    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as session, asyncio.TaskGroup() as tasks:
        for port in ports:
            for _ in range(width):
                tasks.create_task(slot(session, f"http://127.0.0.1:{port}/generate"))
    return Rate(tokens, seconds)

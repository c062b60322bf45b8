"""What servers can do with nothing around them: a bare closed loop, `width` requests in flight on each.

Posts prompt ids in a given order with the same sampling, each once, throws the answers away and notes their tokens: the
denominator of "tokens/s under tokenmill ÷ peak". Both are read by `steady`, so that neither counts its ramp or its end.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import uvloop

REQUEST_S = 120.0


class Answer(NamedTuple):
    """When it was asked for and when it was there, in seconds of one clock; its tokens."""

    asked: float
    came: float
    tokens: int


@dataclass(frozen=True)
class Rate:
    """Tokens of the answers that came within `seconds`."""

    tokens: int
    seconds: float

    @property
    def per_s(self) -> float:
        return round(self.tokens / self.seconds, 1)


def steady(answers: Sequence[Answer], ramp_s: float) -> Rate:
    """From `ramp_s` after the first was asked for until the last one was: from then on slots stay empty."""
    begin, end = min(each.asked for each in answers) + ramp_s, max(each.asked for each in answers)
    assert end > begin + ramp_s, f"{len(answers)} answers in {end - begin + ramp_s:.1f} s tell no rate"
    return Rate(sum(each.tokens for each in answers if begin <= each.came < end), round(end - begin, 2))


def loop(
    ports: Sequence[int], prompts: Sequence[Sequence[int]], sampling: dict[str, object], width: int, seconds: float
) -> list[Answer]:
    """`width` in flight on each port until all prompts are asked for, or `seconds` are over."""
    return uvloop.run(_loop(ports, prompts, sampling, width, seconds))


async def _loop(
    ports: Sequence[int], prompts: Sequence[Sequence[int]], sampling: dict[str, object], width: int, seconds: float
) -> list[Answer]:
    bodies = iter([json.dumps({"input_ids": list(ids), "sampling_params": sampling}).encode() for ids in prompts])
    end = time.monotonic() + seconds
    answers: list[Answer] = []

    async def slot(session: aiohttp.ClientSession, url: str) -> None:
        while (asked := time.monotonic()) < end and (body := next(bodies, None)) is not None:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
                answer = json.loads(await reply.read())
            answers.append(Answer(asked, time.monotonic(), answer["meta_info"]["completion_tokens"]))

    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as session, asyncio.TaskGroup() as tasks:
        for port in ports:
            for _ in range(width):
                tasks.create_task(slot(session, f"http://127.0.0.1:{port}/generate"))
    return answers


def forget(ports: Sequence[int]) -> None:
    """Empties the servers' prefix caches: what is measured next starts as what was measured before did."""
    for port in ports:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/flush_cache", data=b"", timeout=30).close()

"""The floor: the least that a Python client can do. python -m bench.floor N PORTS IN_FLIGHT [FILE]: posts N prompts and
reads the answers; keeps nothing, or, as whoever writes such a loop does, parses each and writes its text to FILE, with
Python's own json. Prints its processor seconds."""

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TextIO

import aiohttp
import uvloop
from yarl import URL

from bench.data import prompt


async def run(count: int, ports: list[int], in_flight: int, out: TextIO | None) -> None:
    rows = iter(range(count))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def slot(port: int) -> None:
            url = URL(f"http://127.0.0.1:{port}/v1/chat/completions")
            for row in rows:
                body = {"model": "fake", "messages": [{"role": "user", "content": prompt(row)}], "max_tokens": 8192}
                async with session.post(url, data=json.dumps(body).encode()) as response:
                    answer = await response.read()
                if out is not None:
                    text = json.loads(answer)["choices"][0]["message"]["content"]
                    out.write(json.dumps({"row": row, "text": text}) + "\n")

        await asyncio.gather(*(slot(port) for port in ports for _ in range(in_flight)))


def main() -> None:
    count, ports, in_flight = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    low, _, high = ports.partition("-")
    began = time.process_time()
    keep = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    with contextlib.nullcontext() if keep is None else keep.open("w", encoding="utf-8") as out:
        uvloop.run(run(count, list(range(int(low), int(high or low) + 1)), in_flight, out))
    sys.stdout.write(f"{time.process_time() - began:.3f}\n")


if __name__ == "__main__":
    main()

"""What people write by hand with the openai client: a task for every row, a semaphore, a line for every answer, and at
a start the ids of the lines that are there.

Run by the peer's own Python: openai_pool.py PROMPTS OUT FIRST_PORT SERVERS SLOTS.
"""

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI


async def main(prompts: Path, out: Path, ports: range, slots: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    done = set()
    path = out / "answers.jsonl"
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                done.add(json.loads(line)["id"])
            except ValueError:
                continue  # torn by a kill
    clients = [AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=None) for port in ports]
    free = asyncio.Semaphore(slots)
    with path.open("a", buffering=1, encoding="utf-8") as lines:
        if lines.tell():
            lines.write("\n")  # behind a torn line

        async def one(number: int, line: bytes) -> None:
            row = json.loads(line)
            if row["id"] in done:
                return
            async with free:
                client = clients[number % len(clients)]
                answer = await client.chat.completions.create(model="fake", messages=row["messages"], max_tokens=8192)
            lines.write(json.dumps({"id": row["id"], "text": answer.choices[0].message.content}) + "\n")

        with prompts.open("rb") as rows:
            await asyncio.gather(*(one(number, line) for number, line in enumerate(rows)))


if __name__ == "__main__":
    first, servers, slots = map(int, sys.argv[3:6])
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), range(first, first + servers), slots))

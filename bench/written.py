"""Texts that a real model wrote: python -m bench.written OUT.jsonl. SmolLM2-135M by llama.cpp, on this CPU.

Two kinds of row, {"kind", "number", "text"}: `sampled`, as a run would ask for them, and `greedy`, at temperature 0 for
1,200 tokens, whatever it thinks of ending: a small model loops by itself then, mostly. One thread: two that wait for
each other on a busy machine come to a hundredth of its speed.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tokenmill import canary, plugins, prompts, quickstart
from tokenmill.client import Client
from tokenmill.core.records import NULL
from tokenmill.engines.base import Engine, Sampling, Spec
from tokenmill.errors import RequestError
from tokenmill.render import ServerRenderer

PORT = 27470
SLOTS = 8
GREEDY, SAMPLED = (
    Sampling(1200, temperature=0.0, extra={"ignore_eos": True}),
    Sampling(700, temperature=0.8, top_p=0.95),
)
WARM_S = 60


def launched() -> Spec:
    args = {"parallel": SLOTS, "ctx-size": SLOTS * 2048, "threads": 1, "threads-batch": 1}
    model = str(quickstart.find_model(print))
    return Spec(0, model, "smollm2", PORT, PORT + 1, "tm-written", sys.executable, args=args)


@contextmanager
def server(engine: Engine, spec: Spec) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(engine.command(spec).argv, stdout=quiet, stderr=quiet) as process:
        try:
            yield
        finally:
            process.terminate()


async def write(engine: Engine, spec: Spec, out: Path, talks: list[msgspec.Raw], sampled: int, greedy: int) -> None:
    """Appends rows as they come."""
    client = Client(f"http://127.0.0.1:{PORT}")
    slots = asyncio.Semaphore(SLOTS)
    renderer = ServerRenderer(engine, thinking=False)

    async def one(number: int, kind: str, sampling: Sampling) -> None:
        async with slots:
            rendered = await renderer.render(talks[number % len(talks)], NULL, client)
            asked = engine.encode(spec, rendered, sampling, request_id="", thinking=False, seed=number)
            answer = engine.decode(await client.post(asked.path, asked.body, timeout_s=3600))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "number": number, "text": answer.text}, ensure_ascii=False) + "\n")

    try:
        await _until_ready(client)
        async with asyncio.TaskGroup() as tasks:
            for kind, sampling, rows in (("greedy", GREEDY, greedy), ("sampled", SAMPLED, sampled)):
                for number in range(rows):
                    tasks.create_task(one(number, kind, sampling))
    finally:
        await client.close()


async def _until_ready(client: Client) -> None:
    for _ in range(2 * WARM_S):
        try:
            await client.get("/health", timeout_s=2.0)
        except RequestError:
            await asyncio.sleep(0.5)
        else:
            return
    raise SystemExit("llama.cpp does not start")


def asked() -> list[msgspec.Raw]:
    """The canary's prompts and the quickstart's, as messages."""
    rows = prompts.rows(Path(canary.__file__).parent / "data" / "quickstart.jsonl")
    return [*canary.prompts(), *(prompts.messages(row.data)[0] for row in rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.written")
    parser.add_argument("out", type=Path)
    parser.add_argument("--sampled", type=int, default=100)
    parser.add_argument("--greedy", type=int, default=40)
    given = parser.parse_args()
    engine, spec = plugins.load("engines", "llamacpp")(), launched()
    with server(engine, spec):
        asyncio.run(write(engine, spec, given.out, asked(), given.sampled, given.greedy))


if __name__ == "__main__":
    main()

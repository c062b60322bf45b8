"""A server that costs next to nothing: python -m bench.fakeserver --ports 31000-31006. One process, many ports.

HTTP by hand over uvloop, answers precomputed: 0.01 s of processor time per 1,000 answers, so that a client's own cost
is what is measured. A marker of the form ROW######## in the request is put into the answer: each answer must land on
the row that asked. GET /stats tells what was served. A request without one is a canary: a short answer at once,
not counted.
"""

import argparse
import asyncio
import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import uvloop

from tokenmill.testing.script import WORDS

MARK, LENGTH, NO_MARK = b"ROW", 11, b"ROW--------"
ESCAPED = ['"quoted"', "C:\\path", "\\(x^2\\)", "<b>html</b>", "therefore\n\n", "however,\n"]
"""A tenth of the words: what JSON escapes costs a client time."""


CANARY_BYTES = 2048
"""The 512 tokens that a canary asks for."""


@dataclass
class Stats:
    """`area` is the integral of requests in flight over time, for the mean; times are of the monotonic clock.

    Of the port that has an outage: when it `died`, `listened` again, and was `asked` again.
    """

    posts: int = 0
    done: int = 0
    in_flight: int = 0
    most: int = 0
    aborted: int = 0
    area: float = 0.0
    last: float = field(default_factory=time.monotonic)
    first_post: float | None = None
    last_done: float | None = None
    died: float | None = None
    listened: float | None = None
    asked: float | None = None

    def step(self, change: int) -> float:
        moment = time.monotonic()
        self.area += self.in_flight * (moment - self.last)
        self.last = moment
        self.in_flight += change
        self.most = max(self.most, self.in_flight)
        return moment


def text_of(size: int, rng: random.Random) -> str:
    """About `size` bytes of mixed text, 70 % of it before a closing think tag."""

    words = [*WORDS, *ESCAPED]

    def fill(wanted: int) -> str:
        out: list[str] = []
        length = 0
        while length < wanted:
            word = rng.choice(words)
            out.append(word)
            length += len(word.encode()) + 1
        return " ".join(out).encode()[: max(0, wanted)].decode("utf-8", "ignore")

    head = int(size * 0.7)
    return f"{fill(head - 10)}</think>\n{NO_MARK.decode()} {fill(size - head - 12)}"


def answer_parts(args: argparse.Namespace, size: int) -> tuple[bytes, bytes]:
    """A whole HTTP answer of so many bytes, before and behind the marker."""
    text = text_of(size, random.Random(args.seed))
    tokens = max(1, len(text.encode()) // 4)
    message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "matched_stop": 151645}
    if args.ids:
        choice["token_ids"] = [random.Random(n).randrange(150_000) for n in range(tokens)]
    usage = {"prompt_tokens": 250, "total_tokens": 250 + tokens, "completion_tokens": tokens}
    reply = {"id": "0" * 32, "object": "chat.completion", "model": "fake", "choices": [choice], "usage": usage}
    body = json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode()
    at = body.index(NO_MARK)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body[:at], body[at + LENGTH :]


class Protocol(asyncio.Protocol):
    """One connection. Requests are told apart by their content-length alone."""

    args: argparse.Namespace
    parts: tuple[bytes, bytes]
    canary: bytes
    stats: Stats
    rng: random.Random
    mortal: ClassVar[set[asyncio.Transport]] = set()

    def __init__(self, slow: float, *, dies: bool) -> None:
        self._slow, self._dies = slow, dies
        self._buffer = b""
        self._open = True
        self._closes = False  # as the client asked: some open a connection for every request
        self._timers: set[asyncio.TimerHandle] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._dies:
            self.mortal.add(transport)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        self.mortal.discard(self._transport)
        for timer in self._timers:
            timer.cancel()
            self.stats.step(-1)
            self.stats.aborted += 1
        self._timers.clear()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._closes = b"connection: close" in head
            self._request(head.split(b" ", 2)[:2], body)

    def _request(self, words: list[bytes], body: bytes) -> None:
        if words[0] == b"post":
            self._generate(body)
        elif words[1].startswith(b"/stats"):
            self.stats.step(0)
            self._write(json.dumps(vars(self.stats)).encode())
        else:
            self._write(json.dumps({"data": [{"id": "fake", "max_model_len": 131072}]}).encode())

    def _generate(self, body: bytes) -> None:
        at = body.find(MARK)
        if at < 0:
            self._transport.write(self.canary)  # type: ignore[attr-defined]
            return
        mark = body[at : at + LENGTH]
        moment = self.stats.step(1)
        self.stats.posts += 1
        self.stats.first_post = self.stats.first_post or moment
        if self._dies and self.stats.listened is not None:
            self.stats.asked = self.stats.asked or moment
        latency = self._latency()
        if latency <= 0:
            self._answer(mark)
            return
        holder: list[asyncio.TimerHandle] = []

        def fire() -> None:
            self._timers.discard(holder[0])
            self._answer(mark)

        holder.append(asyncio.get_running_loop().call_later(latency, fire))
        self._timers.add(holder[0])

    def _latency(self) -> float:
        mean: float = self.args.latency_ms / 1000 * self._slow
        if mean <= 0 or self.args.sigma <= 0:
            return mean
        return self.rng.lognormvariate(math.log(mean) - self.args.sigma**2 / 2, self.args.sigma)

    def _answer(self, mark: bytes) -> None:
        self.stats.last_done = self.stats.step(-1)
        if not self._open:
            self.stats.aborted += 1
            return
        self.stats.done += 1
        self._transport.write(b"".join((self.parts[0], mark, self.parts[1])))  # type: ignore[attr-defined]
        if self._closes:
            self._transport.close()

    def _write(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)  # type: ignore[attr-defined]


async def serve(args: argparse.Namespace) -> None:
    """Listens on every port until SIGTERM; the first is `--slow` times slower than the others, the last may die."""
    Protocol.args, Protocol.stats, Protocol.rng = args, Stats(), random.Random(args.seed)
    Protocol.parts = answer_parts(args, args.answer_bytes)
    Protocol.canary = NO_MARK.join(answer_parts(args, CANARY_BYTES))
    low, high = _range(args.ports)

    def connection(port: int) -> Protocol:
        return Protocol(args.slow if port == low else 1.0, dies=args.away_s > 0 and port == high)

    await listen(args.ports, connection, partial(_outage, args, high) if args.away_s else None)


def _range(ports: str) -> tuple[int, int]:
    low, _, high = ports.partition("-")
    return int(low), int(high or low)


async def _outage(args: argparse.Namespace, port: int, server: asyncio.Server) -> None:
    """Its port is closed and its connections break, once; then it listens again."""
    stats = Protocol.stats
    await asyncio.sleep(args.dies_s)
    server.close()
    for transport in tuple(Protocol.mortal):
        transport.abort()
    stats.died = time.monotonic()
    await asyncio.sleep(args.away_s)
    made = partial(Protocol, 1.0, dies=True)
    await asyncio.get_running_loop().create_server(made, "127.0.0.1", port, backlog=4096)
    stats.listened = time.monotonic()


async def listen(
    ports: str,
    connection: Callable[[int], asyncio.Protocol],
    last: Callable[[asyncio.Server], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serves on every port until SIGTERM, and says when it does; `connection` is told its port.

    `last` is done to the last port's server.
    """
    low, high = _range(ports)
    loop = asyncio.get_running_loop()
    for number in range(low, high + 1):
        server = await loop.create_server(partial(connection, number), "127.0.0.1", number, backlog=4096)
    done = asyncio.create_task(last(server)) if last is not None else None
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    if done is not None:
        done.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", default="31000-31006")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--sigma", type=float, default=0.0)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--dies-s", type=float, default=0.0, help="after its start")
    parser.add_argument("--away-s", type=float, default=0.0, help="0: no port dies")
    parser.add_argument("--answer-bytes", type=int, default=300)
    parser.add_argument("--ids", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

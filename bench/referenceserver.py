"""The reference run's servers, time-compressed: python -m bench.referenceserver --ports 31000-31006.

Answers have token ids and lengths that are spread as real ones are, an eighth as long; each takes time by its length.
What becomes of a row follows from its number alone, so that every count is known beforehand.
"""

import argparse
import asyncio
import json
import random

import uvloop

from bench.fakeserver import LENGTH, MARK, NO_MARK, Protocol, Stats, listen, text_of

TOKENS, SIGMA, MOST = 300, 1.0, 1024
"""An answer's mean tokens, the spread of their logarithm, and where it is cut off: an eighth of a real run's 8,192."""

TOKEN_S = 0.0006
"""A token's time. Really 0.03 s with 64 in flight: 50 times faster with an eighth of the tokens, so that 40 hours take
minutes."""

PROMPT_TOKENS = 250
POOL = 509
"""Different answers: a prime, so that no length falls on the same rows as a fault does."""

REFUSED, EMPTY = (1000, 7), (100, 3)
"""Of so many rows, the one with this remainder: refused with a 400; answered without a thought."""


def is_refused(row: int) -> bool:
    return row % REFUSED[0] == REFUSED[1]


def is_empty(row: int) -> bool:
    return row % EMPTY[0] == EMPTY[1]


def answers() -> list[tuple[int, bytes, bytes]]:
    """Tokens, and the whole HTTP answer before and behind the marker; the last one is the answer without a thought."""
    rng = random.Random(1)
    sizes = (min(MOST, max(40, int(rng.lognormvariate(0, SIGMA) * TOKENS / 1.65))) for _ in range(POOL))
    made = [_answer(tokens, text_of(tokens * 4, rng), rng) for tokens in sizes]
    return [*made, _answer(8, f"</think>\n{NO_MARK.decode()} It is.", rng)]


def _answer(tokens: int, text: str, rng: random.Random) -> tuple[int, bytes, bytes]:
    message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "length" if tokens == MOST else "stop",
        "token_ids": [rng.randrange(150_000) for _ in range(tokens)],
    }
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "total_tokens": PROMPT_TOKENS + tokens,
        "completion_tokens": tokens,
    }
    prompt = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    reply = {"id": "0" * 32, "model": "fake", "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
    whole = _reply(b"200 OK", json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode())
    before, _, behind = whole.partition(NO_MARK)
    return tokens, before, behind


def _reply(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


REFUSAL = _reply(b"400 Bad Request", b'{"error": {"message": "this row is refused", "type": "BadRequestError"}}')


class Scripted(Protocol):
    """A connection whose answers follow from the rows' numbers."""

    pool: list[tuple[int, bytes, bytes]]

    def _generate(self, body: bytes) -> None:
        at = body.find(MARK)
        if at < 0:
            self._transport.write(self.canary)  # type: ignore[attr-defined]
            return
        mark = body[at : at + LENGTH]
        row = int(mark[len(MARK) :])
        moment = self.stats.step(1)
        self.stats.posts += 1
        self.stats.first_post = self.stats.first_post or moment
        tokens, before, behind = self.pool[-1 if is_empty(row) else row % POOL]
        answer = REFUSAL if is_refused(row) else b"".join((before, mark, behind))
        holder: list[asyncio.TimerHandle] = []

        def fire() -> None:
            self._timers.discard(holder[0])
            self.stats.last_done = self.stats.step(-1)
            self.stats.done += 1
            self._transport.write(answer)  # type: ignore[attr-defined]

        holder.append(asyncio.get_running_loop().call_later(tokens * TOKEN_S, fire))
        self._timers.add(holder[0])


async def serve(ports: str) -> None:
    """Listens on every port until SIGTERM."""
    Protocol.stats, Protocol.rng = Stats(), random.Random(1)
    Scripted.pool = answers()
    _, *whole = max(Scripted.pool[:-1])
    Protocol.canary = NO_MARK.join(whole)
    await listen(ports, lambda port: Scripted(1.0, dies=False))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", required=True)
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()

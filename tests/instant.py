"""A chat server in a thread of the test that answers at once, for runs of very many prompts."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MODEL = "instant"
THOUGHT_TOKENS = 40


class Protocol(asyncio.Protocol):
    """As little HTTP as tokenmill's client needs. A body that holds `held` is answered after `held_s` seconds."""

    def __init__(self, answer: bytes, held: bytes, held_s: float) -> None:
        self._answer = answer
        self._held = held
        self._held_s = held_s
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found or len(body) < _length(head):
            return
        self._data = b""
        if head.startswith(b"GET"):
            self._transport.write(_response({"data": [{"id": MODEL}]}))
        elif self._held in body:
            asyncio.get_running_loop().call_later(self._held_s, self._transport.write, self._answer)
        else:
            self._transport.write(self._answer)


def _length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


def _response(page: object) -> bytes:
    body = json.dumps(page).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _completion(characters: int) -> bytes:
    text = " ".join(f"{number * number % 9973} stones" for number in range(characters // 12))
    message = {
        "role": "assistant",
        "content": text,
        "reasoning_content": f"I count them first: {text[: characters // 4]}",
    }
    usage = {"prompt_tokens": 20, "completion_tokens": 200, "reasoning_tokens": THOUGHT_TOKENS}
    return _response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


@contextmanager
def instant_server(port: int, *, characters: int, held: str, held_s: float) -> Iterator[None]:
    """Serves the model `instant` for the scope; the prompt that holds `held` waits for its answer."""
    loop = asyncio.new_event_loop()
    answer = _completion(characters)
    server = loop.run_until_complete(
        loop.create_server(lambda: Protocol(answer, held.encode(), held_s), "127.0.0.1", port, backlog=1024)
    )
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(server.wait_closed())
        loop.close()

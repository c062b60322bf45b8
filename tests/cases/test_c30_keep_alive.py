"""C30: a kept connection that the server has closed meanwhile costs nothing: asked anew at once, charged to nobody."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from tests.harness import Case, assert_whole, scripted_server
from tokenmill.client import Client
from tokenmill.errors import GoneError

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
BODY = b'{"model": "fake", "messages": [{"role": "user", "content": "Question"}]}'
PATH = "/v1/chat/completions"


def test_slots_that_pause_around_the_servers_idle_limit_fail_nothing(case: Case) -> None:
    # A full queue makes a slot wait 0.5, 1, 2 … s; with this seed seven waits are as long as the limit, or longer.
    args = {"slots": 3, "busy": 0.4, "seed": 5, "close-idle-s": 1.0, "latency-ms": 20}
    case.write(engine={"args": args}, fleet={"servers": 1}, prompts={"limit": 15})
    assert case.run() == 0
    assert_whole(case, {f"p{n}" for n in range(15)})
    assert {(record.labels, record.attempt) for record in case.records()} == {((), 1)}
    assert case.output().count(": started as pid") == 1, "the server was restarted"


def test_a_client_that_pauses_around_the_servers_idle_limit_sees_no_failure(port: int) -> None:
    idle_s = 0.5

    async def talk() -> None:
        client = Client(f"http://127.0.0.1:{port}")
        try:
            for pause in (0.0, 0.99, 1.0, 1.2):
                await asyncio.sleep(pause * idle_s)
                await asyncio.gather(*(client.post(PATH, BODY, timeout_s=5) for _ in range(16)))
        finally:
            await client.close()

    with scripted_server(port, close_idle_s=idle_s):
        asyncio.run(talk())


End = Callable[[asyncio.StreamWriter], None]


def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("end", [_close, _reset])
def test_a_connection_that_ends_before_the_first_byte_is_replaced_at_once(end: End) -> None:
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = len(asked)
        await reader.readuntil(BODY)
        asked.append(connection)
        writer.write(ANSWER)
        if connection == 0:
            await reader.readuntil(BODY)  # the second request finds a connection that is about to go
            end(writer)
        else:
            writer.close()

    asyncio.run(_ask_twice(serve))
    assert asked == [0, 1], "answered once on the first connection and once on a fresh one"


@pytest.mark.parametrize("end", [_close, _reset])
def test_an_answer_that_breaks_off_is_not_asked_again_in_silence(end: End) -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(BODY)
        asked += 1
        writer.write(ANSWER[:-1])
        await writer.drain()
        end(writer)

    with pytest.raises(GoneError):
        asyncio.run(_ask_twice(serve))
    assert asked == 1


async def _ask_twice(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Two requests of one client, one after the other, to a server of this kind."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        for _ in range(2):
            assert await client.post(PATH, BODY, timeout_s=5) == b"{}"
    finally:
        await client.close()
        server.close()
        await server.wait_closed()

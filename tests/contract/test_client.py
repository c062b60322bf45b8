"""The client: what an HTTP status means, and where a path goes, over a real socket."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar

import pytest
from aiohttp import web

from tokenmill.client import Client
from tokenmill.errors import BrokenError, BusyError, GoneError, RefusedError, RequestError

T = TypeVar("T")


def against(answer: Callable[[web.Request], Any], path: str, ask: Callable[[Client], Awaitable[T]]) -> T:
    """Asks a server that answers everything like this; `path` is what its address ends with."""

    async def handle(request: web.Request) -> web.StreamResponse:
        made = answer(request)
        found: web.StreamResponse = await made if isawaitable(made) else made
        return found

    async def scene() -> T:
        server = web.Application()
        server.router.add_route("*", "/{anything:.*}", handle)
        runner = web.AppRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}{path}")
        try:
            return await ask(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, RefusedError) for status in (400, 409, 413, 422)),
        *((status, BusyError) for status in (408, 429, 503)),
        *((status, GoneError) for status in (401, 402, 403, 404, 405)),
        *((status, BrokenError) for status in (500, 502, 504)),
    ],
)
def test_a_status_says_whose_fault_it_is(status: int, kind: type[RequestError]) -> None:
    """A key that has expired in mid-run is no prompt's fault: nothing would ever ask for those prompts again."""
    with pytest.raises(kind, match=f"HTTP {status}: its own words"):
        against(
            lambda request: web.Response(status=status, text="its own words"),
            "",
            lambda client: client.post("/v1/chat/completions", b"{}", timeout_s=10.0),
        )


@pytest.mark.parametrize(("address", "asked"), [("", "/v1/models"), ("/", "/v1/models"), ("/api", "/api/v1/models")])
def test_what_stands_before_the_apis_own_path_is_kept(address: str, asked: str) -> None:
    body = against(
        lambda request: web.Response(text=request.path),
        address,
        lambda client: client.get("/v1/models", timeout_s=10.0),
    )
    assert body.decode() == asked


# -- answers in pieces -------------------------------------------------------------------------------------------------
PATH = "/v1/chat/completions"


def pieces(*texts: bytes, torn: bool = False) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A server that sends these one after the other; `torn`: and then drops the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for text in texts:
            await response.write(text)
            await asyncio.sleep(0.01)
        if torn and request.transport is not None:
            request.transport.abort()
        return response

    return answer


def test_an_answer_is_given_in_the_pieces_it_comes_in() -> None:
    came: list[bytes] = []
    left = against(
        pieces(b"a" * 9, b"b", b"c"), "", lambda client: client.post(PATH, b"{}", timeout_s=9, take=came.append)
    )
    assert (left, b"".join(came)) == (b"", b"a" * 9 + b"bc")
    assert len(came) > 1


def test_an_answer_that_was_torn_is_gone_and_is_not_asked_for_again_behind_the_callers_back() -> None:
    """What came of the first try must not be glued to what a second one brings."""
    came: list[bytes] = []
    with pytest.raises(GoneError):
        against(
            pieces(b"half an answer", torn=True),
            "",
            lambda client: client.post(PATH, b"{}", timeout_s=9, take=came.append),
        )
    assert b"".join(came) == b"half an answer"


def test_a_refusal_is_no_piece() -> None:
    came: list[bytes] = []
    with pytest.raises(RefusedError, match="no such field"):
        against(
            lambda request: web.Response(status=400, text="no such field"),
            "",
            lambda client: client.post(PATH, b"{}", timeout_s=9, take=came.append),
        )
    assert came == []


def test_whoever_takes_the_pieces_may_end_the_request() -> None:
    def refuse(piece: bytes) -> None:
        raise BrokenError("an error in the middle")

    with pytest.raises(BrokenError, match="an error in the middle"):
        against(pieces(b"data: x", b"y"), "", lambda client: client.post(PATH, b"{}", timeout_s=9, take=refuse))

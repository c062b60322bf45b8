"""The client: what an HTTP status means, and where a path goes, over a real socket."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from aiohttp import web

from tokenmill.client import Client
from tokenmill.errors import BrokenError, BusyError, GoneError, RefusedError, RequestError

T = TypeVar("T")


def against(answer: Callable[[web.Request], web.Response], path: str, ask: Callable[[Client], Awaitable[T]]) -> T:
    """Asks a server that answers everything like this; `path` is what its address ends with."""

    async def handle(request: web.Request) -> web.Response:
        return answer(request)

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

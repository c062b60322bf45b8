"""`tokenmill serve`: the page of a run, from a process of its own that can only read. Every address has a fixed name;
what it is asked for is a number or a key to look up, never a path."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tokenmill.errors import FullError, StoreError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.web import metrics
from tokenmill.web.guard import Guard, add_headers, check_address
from tokenmill.web.hub import Feed, Hub
from tokenmill.web.shown import Shown
from tokenmill.web.watcher import Message, Watcher

NICE = 5
"""A third of the weight of servers on the same processors, which go before the page; a page still opens at once."""

QUIET_S = 15.0
"""After so long without news a stream says that it is still there: proxies end silent ones after 30 s or more."""

WRITE_S = 30.0
"""For one message: a browser that has not taken it by then is gone."""

END_S = 1.0
"""For open streams, at the end."""

KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
FILES = (
    *("app.js", "charts.js", "dom.js", "records.js", "servers.js", "logs.js", "style.css", "icon.svg"),
    *("uplot.min.js", "uplot.min.css"),
)
"""All that the page is made of, beside index.html."""


class Page:
    """The addresses of the page, and what each answers."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def routes(self) -> list[web.RouteDef]:
        """All that there is."""
        fixed = [web.get(f"/{name}", _file(name)) for name in FILES]
        return [
            *(web.get("/", _file("index.html")), *fixed),
            web.get("/metrics", self.metrics),
            web.get("/api/status", self.status),
            web.get("/api/stream", self.stream),
            web.get("/api/log", self.log),
            web.get("/api/records", self.records),
            web.get("/api/record", self.record),
        ]

    async def metrics(self, _: web.Request) -> web.Response:
        """For Prometheus."""
        page = metrics.text(self._hub.watcher.status)
        return web.Response(body=page, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def status(self, _: web.Request) -> web.Response:
        """As `tokenmill status --json`."""
        return _json(self._hub.watcher.status)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Everything that changes, as server-sent events."""
        return await _streamed(request, self._hub.joined)

    async def log(self, request: web.Request) -> web.StreamResponse:
        """The end of a server's log and what comes, as server-sent events."""
        server = request.query.get("server", "")
        return await _streamed(request, lambda: self._hub.log(server))

    async def records(self, request: web.Request) -> web.Response:
        """The newest, the worst, or those of a key."""
        query = request.query
        order = query.get("order", "newest")
        if order == "key":
            return _json(await _or_refuse(self._hub.found(query.get("key", ""))))
        if order not in ("newest", "worst"):
            raise web.HTTPBadRequest(text="order is one of: newest, worst, key\n")
        return _json(await _or_refuse(self._hub.listed(order, query.get("label", ""))))

    async def record(self, request: web.Request) -> web.Response:
        """One id, whole."""
        key, sample, turn = request.query.get("key", ""), _number(request, "sample"), _number(request, "turn")
        return _json(await _or_refuse(self._hub.one(key, sample, turn)))


async def _or_refuse(answer: Any) -> list[Shown]:
    try:
        found: list[Shown] = await answer
    except (StoreError, OSError) as error:
        raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
    return found


def _number(request: web.Request, name: str) -> int:
    word = request.query.get(name, "")
    if not (word.isascii() and word.isdigit() and len(word) < 10):
        raise web.HTTPBadRequest(text=f"{name} is a number\n")
    return int(word)


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _file(name: str) -> Callable[[web.Request], Any]:
    body = (resources.files("tokenmill.web") / "static" / name).read_bytes()
    kind = KINDS[name.rpartition(".")[2]]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return answer


async def _streamed(
    request: web.Request, join: Callable[[], AbstractAsyncContextManager[tuple[Message, Feed]]]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    try:
        async with join() as (begin, feed):
            await response.prepare(request)
            if request.method == "HEAD":
                return response
            message: Message | None = begin
            while message is not None:
                async with asyncio.timeout(WRITE_S):
                    await response.write(b"event: %b\ndata: %b\n\n" % (message.name.encode(), message.data))
                message = await _next(response, feed)
    except UsageError as error:
        raise web.HTTPNotFound(text=f"{error}\n") from error
    except (FullError, StoreError) as error:
        raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
    except (TimeoutError, ConnectionError):
        pass  # gone
    return response


async def _next(response: web.StreamResponse, feed: Feed) -> Message | None:
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                return await feed.get()
        except TimeoutError:
            async with asyncio.timeout(WRITE_S):
                await response.write(b": still here\n\n")


def _troubles() -> logging.Logger:
    """For tracebacks of bugs, but not for each request that is no HTTP: whoever scans ports would fill the terminal."""
    made = logging.getLogger(__name__)
    made.addFilter(_is_ours)
    return made


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def application(hub: Hub, token: str) -> web.Application:
    """The page's addresses behind the guard."""
    made = web.Application(middlewares=[Guard(token).judge])
    made.on_response_prepare.append(add_headers)
    made.add_routes(Page(hub).routes())
    return made


async def serve(folder: RunFolder, address: str, port: int, token: str, tell: Callable[[str], None]) -> None:
    """Serves a run folder until SIGINT or SIGTERM; `tell` hears where. Raises UsageError, before anything is served."""
    check_address(address, token)
    os.nice(NICE)
    with _asked_to_end() as asked:
        hub = Hub(Watcher(folder))
        runner = web.AppRunner(application(hub, token), access_log=None, shutdown_timeout=END_S, logger=_troubles())
        await runner.setup()
        try:
            await _listen(runner, address, port)
            await hub.look()
            tell(f"http://{_shown(address)}:{runner.addresses[0][1]}/{'?token=…' if token else ''}")
            following, ended = asyncio.ensure_future(hub.run()), asyncio.ensure_future(asked.wait())
            try:
                await asyncio.wait([following, ended], return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
            finally:
                for task in (following, ended):
                    task.cancel()
                await asyncio.gather(following, ended, return_exceptions=True)
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, address: str, port: int) -> None:
    try:
        await web.TCPSite(runner, address, port).start()
    except (OSError, OverflowError) as error:
        fix = f"another --port; ss -ltnp 'sport = :{port}'   shows who has it"
        raise UsageError(f"the page cannot be served on {address}:{port}: {error}", fix=fix) from error


def _shown(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@contextmanager
def _asked_to_end() -> Iterator[asyncio.Event]:
    """Set by SIGINT and SIGTERM, from before anybody can see that it listens."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    try:
        yield asked
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

"""One HTTP client per server: bytes out, bytes in, typed failures. No policy: who retries, and whose fault a failure is
to be charged to, is decided by the caller from the error's type.

The one exception is a pooled connection that the server had closed meanwhile: the request is sent once more at once, on
a fresh connection, since nothing was asked of the server yet.
"""

import asyncio
import errno
import time
from collections.abc import Callable
from functools import cached_property

import aiohttp
from yarl import URL

from tokenmill.errors import BrokenError, BusyError, GoneError, LateError, LocalLimitError, RefusedError

KEEP_IDLE_S = 3.0
"""Below the 5 s after which uvicorn closes an idle connection: whoever closes last meets the reset."""

STALE_WITHIN_S = 1.0
"""A connection that was dead already says so at the first round trip; a later reset means that the server is going."""

_FULL = (errno.EMFILE, errno.ENFILE)
_BUSY = frozenset({408, 425, 429, 503})
_CLOSED = frozenset({401, 402, 403, 404, 405, 407})
"""A wrong key, another path, a model that is no longer loaded: nothing that this request could help."""


Take = Callable[[bytes], None]
"""Is given an answer's pieces as they come. What it raises ends the request, and is raised."""


class Client:
    """`address` is scheme, host and port, with the path that stands before the API's own. Close it where it is made.

    `lives` says whether the server's process does: asked after each answer, since a port is another's as soon as it is
    dead, and a stranger's answer must never become a row.
    """

    def __init__(self, address: str, *, api_key: str = "", lives: Callable[[], bool] = lambda: True) -> None:
        self.address = address.rstrip("/")
        self._lives = lives
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._urls: dict[str, URL] = {}

    # Made at the first request: a server may be given up before anything was asked of it, and then nobody closes them.
    @cached_property
    def _pooled(self) -> aiohttp.ClientSession:
        return self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S))

    @cached_property
    def _fresh(self) -> aiohttp.ClientSession:
        return self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,  # a proxy variable of the login shell must not catch loopback traffic
        )

    async def post(self, path: str, body: bytes, *, timeout_s: float, take: Take | None = None) -> bytes:
        """The answer's body, or nothing where `take` is given it. Raises a RequestError; see errors.py for each."""
        started = time.monotonic()
        came = False

        def taken(piece: bytes) -> None:
            nonlocal came
            came = True
            if take is not None:
                take(piece)

        try:
            return await self._ask(self._pooled, "POST", path, body, timeout_s, taken if take else None)
        except GoneError as error:
            if came or not isinstance(error.__cause__, _RESETS) or time.monotonic() - started > STALE_WITHIN_S:
                raise
        return await self.post_fresh(path, body, timeout_s=timeout_s, take=take)

    async def post_fresh(self, path: str, body: bytes, *, timeout_s: float, take: Take | None = None) -> bytes:
        """The same over a connection of its own, so that nothing stands before it."""
        return await self._ask(self._fresh, "POST", path, body, timeout_s, take)

    async def get(self, path: str, *, timeout_s: float) -> bytes:
        """The same for GET, over a connection of its own."""
        return await self._ask(self._fresh, "GET", path, None, timeout_s)

    async def close(self) -> None:
        for name in ("_pooled", "_fresh"):
            if session := self.__dict__.pop(name, None):
                await session.close()

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        take: Take | None = None,
    ) -> bytes:
        url = self._urls.get(path) or self._urls.setdefault(path, URL(self.address + path))
        try:
            # aiohttp's own timeout costs four timers a request.
            async with asyncio.timeout(timeout_s), session.request(method, url, data=body) as response:
                status = response.status
                if take is not None and status == 200:
                    async for piece in response.content.iter_any():
                        take(piece)
                answer = await response.read()  # nothing, where it was taken
        except TimeoutError as error:
            raise LateError(f"{self.address}{path}: no answer within {timeout_s:.0f} s") from error
        except aiohttp.ClientConnectorError as error:
            if error.errno in _FULL:
                raise LocalLimitError(f"too many open files: {error}") from error
            raise GoneError(f"{self.address} cannot be reached: {error.strerror or error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise GoneError(
                f"{self.address}{path}: the connection broke: {str(error) or type(error).__name__}"
            ) from error
        if not self._lives():
            raise GoneError(f"{self.address}{path}: its server has died; the answer may be another's")
        if status == 200:
            return answer
        raise _refusal(status, answer, f"{self.address}{path}")


_RESETS = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


def _refusal(status: int, answer: bytes, where: str) -> RefusedError | BusyError | GoneError | BrokenError:
    text = answer[:2000].decode("utf-8", "replace").strip()
    if status in _BUSY:
        return BusyError(f"{where}: HTTP {status}: {text}")
    if status in _CLOSED:
        return GoneError(f"{where}: HTTP {status}: {text}")
    if 400 <= status < 500:
        return RefusedError(f"HTTP {status}: {text}")
    return BrokenError(f"{where}: HTTP {status}: {text}", body=text)

"""Who may read the page, and what a browser may do with it. Read-only: no method but GET and HEAD exists.

Without a token only loopback names are answered, so that no name of somebody else's that is made to point here (DNS
rebinding) reads anything. With one, a request needs it: as Authorization: Bearer, or, after ?token= was given once, as
a cookie that no script sees and no other site can send.
"""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from tokenmill.errors import UsageError
from tokenmill.web.hosts import host_of, is_address, is_loopback

TOKEN_LEAST = 16
"""Characters: fewer could be guessed over a network."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "tokenmill",
}
"""On every answer. Trusted types: no script may make HTML of a text, ours included."""

WELCOME = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<title>tokenmill</title><p><a href="/">On to the page</a></p></html>
"""
"""A redirect would not do: coming from a link in a mail, the browser would leave a SameSite=Strict cookie out."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def check_address(address: str, token: str) -> None:
    """Raises UsageError for what is no address, one that others reach without a token, a token to be guessed."""
    if address != "localhost" and not is_address(address):
        raise UsageError(f"{address!r} is no IP address", fix="--address 0.0.0.0   is all of them")
    fix = "TOKENMILL_TOKEN=$(openssl rand -hex 16) tokenmill serve …"
    if token and len(token) < TOKEN_LEAST:
        raise UsageError(f"the token has {len(token)} characters; it needs {TOKEN_LEAST}", fix=fix)
    if not token and not is_loopback(address):
        raise UsageError(f"{address} can be reached from other machines: that needs a token", fix=fix)


class Guard:
    """Judges each request before anything answers it."""

    def __init__(self, token: str) -> None:
        self._token = token
        # Not the token: who reads a browser's cookies has no word for the next `serve`. Cookies know no ports.
        self._session = secrets.token_urlsafe(24)
        self._cookie = f"tokenmill_{secrets.token_hex(4)}"
        self._names = {"localhost", socket.gethostname().lower(), socket.gethostname().partition(".")[0].lower()}

    @web.middleware
    async def judge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets a request through, or answers why not."""
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"], text="read-only\n")
        if not self._is_our_name(request.headers.get("Host", "")):
            raise web.HTTPForbidden(text="this Host is not served here\n")
        if self._token and not self._is_known(request):
            if not _same(request.query.get("token", ""), self._token):
                raise web.HTTPUnauthorized(
                    text="open this page with ?token=…, or send Authorization: Bearer …\n",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            answer = web.Response(text=WELCOME, content_type="text/html")
            answer.set_cookie(self._cookie, self._session, httponly=True, samesite="Strict", path="/")
            return answer
        return await handler(request)

    def _is_our_name(self, header: str) -> bool:
        """An address cannot be made to point elsewhere, as a name can; reached by one, a token decides."""
        name = host_of(header)
        if not self._token:
            return is_loopback(name)
        return name in self._names or is_address(name)

    def _is_known(self, request: web.Request) -> bool:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return _same(given.strip(), self._token)
        return _same(request.cookies.get(self._cookie, ""), self._session)


def _same(given: str, wanted: str) -> bool:
    """In a time that tells nothing of where they differ."""
    given_hash, wanted_hash = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (given, wanted))
    return hmac.compare_digest(given_hash, wanted_hash)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For an application's on_response_prepare: errors, too, carry them."""
    response.headers.update(HEADERS)

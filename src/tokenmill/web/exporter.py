"""`run --metrics PORT`: a run's numbers for Prometheus, on a thread of its own, on this machine only.

A scrape costs the pump nothing: it renders what was published last, and waits for nobody.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer

from tokenmill.core.status import RunStatus
from tokenmill.errors import UsageError
from tokenmill.web import metrics
from tokenmill.web.hosts import is_loopback_host

LOOPBACK = "127.0.0.1"

END_POLL_S = 0.05
"""How soon the thread sees that it is to end."""

QUIET_S = 10.0
"""A client that says nothing for so long is let go."""


class _Quiet(WSGIRequestHandler):
    timeout = QUIET_S

    def log_message(self, format: str, *words: Any) -> None:
        """Nothing: a terminal is for the run."""


@contextmanager
def exposed(port: int | None, read: Callable[[], RunStatus | None]) -> Iterator[None]:
    """Serves /metrics on a port of 127.0.0.1 for the scope; nothing where `port` is None.

    Raises UsageError where the port cannot be had, before anything else has begun.
    """
    if port is None:
        yield
        return
    try:
        server = make_server(LOOPBACK, port, _page(read), ThreadingWSGIServer, _Quiet)
    except (OSError, OverflowError) as error:
        words = f"metrics cannot be served on {LOOPBACK}:{port}: {error}"
        raise UsageError(
            words, fix=f"ss -ltnp 'sport = :{port}'   shows who has it; or another --metrics PORT"
        ) from error
    thread = Thread(target=server.serve_forever, args=(END_POLL_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _page(read: Callable[[], RunStatus | None]) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if not is_loopback_host(environ.get("HTTP_HOST", "")):
            start("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"this Host is not served here\n"]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start("405 Method Not Allowed", [("Content-Type", "text/plain"), ("Allow", "GET, HEAD")])
            return [b"read-only\n"]
        if environ.get("PATH_INFO") != "/metrics":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"there is /metrics here\n"]
        page = metrics.text(read())
        start("200 OK", [("Content-Type", metrics.CONTENT_TYPE), ("Content-Length", str(len(page)))])
        return [page]

    return answer

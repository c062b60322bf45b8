"""Answers that come in pieces (server-sent events), so that tokens are seen where a server has no token counters.

The known libraries for such events (httpx-sse, aiohttp-sse-client, sseclient-py) bring or wrap an HTTP client of their
own; what is needed of them here is `Events`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from tokenmill.core.records import Completion


class Events:
    """Bytes in, however they were cut; the data of whole events out. Comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        found = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found

    def end(self) -> list[bytes]:
        """The last event, where the server did not close it with an empty line."""
        return self.feed(b"\n\n")


class Stream(ABC):
    """One answer on its way. `plain`: the server answered whole, as if it had not been asked to stream."""

    plain = False

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """The next bytes of the answer; raises BrokenError for an error that the server reports in the middle."""

    @abstractmethod
    def completion(self) -> Completion:
        """The answer, as `decode` gives it; raises BrokenError where the stream ended before the answer did."""


class Streaming(ABC):
    """What an engine is, too, if its answers can be streamed."""

    @abstractmethod
    def streamed(self, body: bytes, seen: Callable[[], None]) -> tuple[bytes, Stream]:
        """The same request's body with its answer streamed; `seen` is called for each event that carries tokens."""

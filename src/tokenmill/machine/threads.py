"""Threads that no exit waits for: what reads the machine may hang for ever in a mount, in a driver, in /proc of a
process that hangs in one, and must keep neither the event loop nor the end of the process."""

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from tokenmill.errors import StoppedError, TokenmillError

Item = TypeVar("Item")
Result = TypeVar("Result")
Default = TypeVar("Default")

READ_S = 10.0
"""For one reading of the machine: a driver that is well may take seconds, one that is ill takes for ever."""

STOPPED_S = 10.0
"""After a stop: a tokenizer loads in seconds, and a copy that is stopped is taken away."""


def ask(question: Callable[[], Result]) -> "Future[Result]":
    """The answer of a question that is asked on a thread of its own."""
    answer: Future[Result] = Future()

    def work() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(question())
        except (OSError, TokenmillError) as error:
            answer.set_exception(error)
        finally:
            if not answer.done():  # a bug, whose traceback the thread prints
                answer.set_exception(RuntimeError(f"a reading of the machine ended by a bug: {sys.exc_info()[1]!r}"))

    threading.Thread(target=work, daemon=True).start()
    return answer


async def reading(question: Callable[[], Result], unknown: Default, deadline_s: float = READ_S) -> Result | Default:
    """A reading of the machine, off the event loop; `unknown` where it does not come within the deadline."""
    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(ask(question))
    except TimeoutError:
        return unknown


async def unless_stopped(stopping: asyncio.Event, question: Callable[[], Result]) -> Result:
    """An answer that takes what it takes. Raises StoppedError where it has not come STOPPED_S after a stop."""
    asked, stopped = asyncio.wrap_future(ask(question)), asyncio.ensure_future(stopping.wait())
    either: list[asyncio.Future[Any]] = [asked, stopped]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([asked], timeout=STOPPED_S)
        if asked.done():
            return asked.result()
        raise StoppedError(f"stopped, though what was read has not answered for {STOPPED_S:.0f} s: is its mount away?")
    finally:
        asked.cancel()
        stopped.cancel()


class Asker(Generic[Result]):
    """Asks the same thing again and again: an answer that hangs is waited for, and no second one is begun."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[Result] | None = None

    async def reading(
        self, question: Callable[[], Result], unknown: Default, deadline_s: float = READ_S
    ) -> Result | Default:
        """As `reading`; what comes after its deadline is the answer of the next call."""
        if self._asked is None:
            self._asked = asyncio.wrap_future(ask(question))
        await asyncio.wait([self._asked], timeout=deadline_s)
        if not self._asked.done():
            return unknown
        answer, self._asked = self._asked, None
        return answer.result()

    def close(self) -> None:
        """Nobody waits for the last answer any more."""
        if self._asked is not None:
            self._asked.cancel()


def each(items: Iterable[Item], work: Callable[[Item], Result], threads: int) -> list[Result]:
    """Many small reads at once: the results in the items' order. The OSError that `work` may raise is raised here."""
    waiting: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
    for entry in enumerate(items):
        waiting.put(entry)
    count = waiting.qsize()
    results: dict[int, Result] = {}
    failed = threading.Event()

    def serve() -> None:
        while not failed.is_set():
            try:
                place, item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[place] = work(item)
            except OSError:
                failed.set()
                raise

    for answer in [ask(serve) for _ in range(min(threads, count))]:
        answer.result()
    return [results[place] for place in range(count)]

"""All that happened in a run, one JSON line an event, append-only; and a way to follow it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tokenmill import linefile

QUIET_KINDS = frozenset({"state"})
"""Events that repeat, for programs, what a screen shows or another event tells in words."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """`t` is Unix time; `kind` a word to filter by; `text` a plain sentence; `server` its name where one is meant,
    `node` its node's where the event is not of one server; empty where there is but one node."""

    t: float
    kind: str
    text: str
    server: str = ""
    level: str = "info"
    fix: str = ""
    lines: tuple[str, ...] = ()
    node: str = ""

    @property
    def sentence(self) -> str:
        """What happened, with its server or its node in front."""
        where = f"server {self.server}: " if self.server else f"node {self.node}: " if self.node else ""
        return where + self.text

    @property
    def below(self) -> Iterator[str]:
        """What stands below the sentence: a log's decisive lines, and the fix."""
        yield from (f"    {words}" for words in self.lines)
        if self.fix:
            yield f"    fix: {self.fix}"

    @property
    def change(self) -> tuple[str, str] | None:
        """A server's state before and after; None where the event is of something else."""
        before, arrow, after = self.text.partition(" → ")
        return (before, after) if self.kind == "state" and arrow else None


_decode = msgspec.json.Decoder(Event)


class EventLog:
    """Appends events and hands them on to `shown`, a terminal's view for one.

    A full disk loses an event, never the run: the records are the store's, and it does stop.
    """

    def __init__(self, path: Path, shown: Callable[[Event], None] = lambda event: None) -> None:
        self._path = path
        self._shown = shown

    def add(self, event: Event) -> None:
        """Shows an event and writes it down."""
        self._shown(event)
        try:
            linefile.append(self._path, msgspec.json.encode(event))
        except OSError:
            pass

    def say(self, kind: str, text: str, level: str = "info", fix: str = "") -> None:
        self.add(Event(now(), kind, text, "", level, fix))


def now() -> float:
    return round(time.time(), 3)


def from_thread(told: Callable[[str], None]) -> Callable[[str], None]:
    """`told` for a thread's use: what it tells reaches the running event loop's own thread."""
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(told, text)

    return tell


def read(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """Events from a byte offset on, each with the offset behind it."""
    return linefile.read(path, _decode, start)


def last(
    path: Path,
    count: int | None,
    end: int | None = None,
    *,
    since: float = 0.0,
    wanted: Callable[[Event], bool] = lambda event: True,
) -> list[Event]:
    """The last `count` events before byte `end` that are wanted, oldest first. Reads from the end, as far as needed."""
    found: list[Event] = []
    try:
        file = path.open("rb")
    except OSError:
        return found
    with file:
        for line, _ in linefile.backwards(file, end):
            try:
                event = _decode.decode(line)
            except msgspec.DecodeError:
                continue
            if event.t < since or len(found) == count:
                break
            if line.endswith(b"\n") and wanted(event):
                found.append(event)
    return found[::-1]

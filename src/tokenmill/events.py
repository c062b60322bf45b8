"""All that happened in a run, one JSON line an event, append-only; and a way to follow it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

QUIET_KINDS = frozenset({"state"})
"""Events that repeat, for programs, what a screen shows or another event tells in words."""

BLOCK = 1 << 16
"""Bytes read at once from the end backwards: two hundred events."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """`t` is Unix time; `kind` a word to filter by; `text` a plain sentence; `server` its name where one is meant."""

    t: float
    kind: str
    text: str
    server: str = ""
    level: str = "info"
    fix: str = ""
    lines: tuple[str, ...] = ()


_decode = msgspec.json.Decoder(Event)


class EventLog:
    """Appends events and hands them on to `shown`, a terminal's view for one.

    A full disk loses an event, never the run: the records are the store's, and it does stop.
    """

    def __init__(self, path: Path, shown: Callable[[Event], None] = lambda event: None) -> None:
        self._path = path
        self._whole = False
        self._shown = shown

    def add(self, event: Event) -> None:
        """Shows an event and writes it down."""
        self._shown(event)
        try:
            with self._path.open("ab+") as out:
                torn = not self._whole and _ends_torn(out)
                self._whole = True
                out.write(b"\n" * torn + msgspec.json.encode(event) + b"\n")
        except OSError:
            pass

    def say(self, kind: str, text: str, level: str = "info", fix: str = "") -> None:
        self.add(Event(now(), kind, text, "", level, fix))


def _ends_torn(file: BinaryIO) -> bool:
    """Whether a death left half a line at the end: our first event must not be glued to it."""
    if file.seek(0, 2) == 0:
        return False
    file.seek(-1, 2)
    return file.read(1) != b"\n"


def now() -> float:
    return round(time.time(), 3)


def from_thread(told: Callable[[str], None]) -> Callable[[str], None]:
    """`told` for a thread's use: what it tells reaches the running event loop's own thread."""
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(told, text)

    return tell


def read(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """Whole events from a byte offset on, each with the offset behind it; a line being written is left for later."""
    try:
        data = path.open("rb")
    except OSError:
        return
    with data:
        data.seek(start)
        for line in data:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                yield _decode.decode(line), start
            except msgspec.DecodeError:
                continue


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
    for line in _lines_backwards(path, end):
        try:
            event = _decode.decode(line)
        except msgspec.DecodeError:
            continue
        if event.t < since or len(found) == count:
            break
        if wanted(event):
            found.append(event)
    return found[::-1]


def _lines_backwards(path: Path, end: int | None) -> Iterator[bytes]:
    """Whole lines, the last one first. A line without an end is still being written."""
    try:
        data = path.open("rb")
    except OSError:
        return
    with data:
        at = data.seek(0, 2) if end is None else end
        rest, whole = b"", False
        while at > 0:
            size = min(BLOCK, at)
            at -= size
            data.seek(at)
            first, *lines = (data.read(size) + rest).split(b"\n")
            rest = first
            for line in reversed(lines):
                if whole and line:
                    yield line
                whole = True
        if rest and whole:
            yield rest

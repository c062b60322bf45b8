"""The servers' own logs for a person: the last lines of one or of all, and what comes. Reads only.

A log may be truncated or replaced while it is followed: what was written before that is read to its end first.
"""

import os
import re
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from tokenmill.errors import UsageError
from tokenmill.folder import RunFolder
from tokenmill.untrusted import coloured, harmless

LOOK_S = 0.25
"""Between two looks at a log that is followed."""

BLOCK = 1 << 16
"""Bytes read at once, from the end of a log backwards."""

LONGEST = 1 << 20
"""Bytes of a line without an end: then it is shown as it is, so that memory stays small."""

COLOURS = (36, 33, 35, 32, 34, 31)
"""Of the numbers in front, in turn: ANSI's cyan, yellow, magenta, green, blue, red."""

_ENDS = re.compile(rb"[\r\n]+")  # a progress bar overwrites itself: \r ends a line, too


class Log:
    """One server's log from byte `start` on: `last` once, then `new` again and again."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._start = start
        self._file: BinaryIO | None = None
        self._at = 0
        self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def half(self) -> list[str]:
        """The line at the end that is not ended yet."""
        return [_text(self._rest)] if self._rest else []

    def last(self, count: int | None) -> list[str]:
        """The last whole lines, all where `count` is None."""
        if not self._open():
            return []
        assert self._file is not None
        end = at = self._file.seek(0, 2)
        first = self._start if self._start <= end else 0
        blocks, seen = [b""], 0
        while at > first and (count is None or seen <= count):
            size = min(BLOCK, at - first)
            at -= size
            self._file.seek(at)
            blocks.append(self._file.read(size))
            seen += len(_ENDS.findall(blocks[-1]))
        self._at = end
        lines = self._cut(b"".join(reversed(blocks)))
        return lines if count is None else lines[-count:]

    def new(self) -> list[str]:
        """The whole lines that were written since the last look."""
        if not self._open():
            return []
        assert self._file is not None
        if self._file.seek(0, 2) < self._at:
            self._at, self._rest = 0, b""  # truncated: begin again
        self._file.seek(self._at)
        data = self._file.read()
        self._at += len(data)
        if not data and self._replaced():
            self.close()
            left, self._rest = self.half, b""
            return [*left, *self.new()]
        return self._cut(data)

    def _cut(self, data: bytes) -> list[str]:
        *whole, self._rest = _ENDS.split(self._rest + data)
        if len(self._rest) > LONGEST:
            whole, self._rest = [*whole, self._rest], b""
        return [_text(line) for line in whole if line]

    def _open(self) -> bool:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                return False
            self._at = 0
        return True

    def _replaced(self) -> bool:
        assert self._file is not None
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except OSError:
            return False  # moved away, and nothing new is there yet


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def numbers(folder: RunFolder) -> list[int]:
    """The servers that have a log or are known, in order."""
    logged = (path.stem.removeprefix("server-") for path in folder.logs.glob("server-*.log"))
    known = (entry.index for entry in folder.state().servers)
    return sorted({*(int(number) for number in logged if number.isdigit()), *known})


def logs(
    folder: RunFolder,
    server: int | None,
    *,
    follow: bool,
    lines: int | None = 50,
    this_life: bool = False,
    ended: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, str]]:
    """Server and line: the last lines of one log or of all, then what comes, until `ended` (nobody reads any more).

    `this_life` leaves out what was written before the server's last start, where that start is still known. Raises
    UsageError for a number that no server has.
    """
    found = numbers(folder)
    if server is not None and server not in found:
        has = f"the run has {', '.join(map(str, found))}" if found else "none has started yet"
        raise UsageError(f"there is no log of server {server}: {has}")
    if not found and not follow:
        raise UsageError(f"{folder.logs} holds no log: no server has started yet")
    starts = {entry.index: entry.log_start for entry in folder.state().servers} if this_life else {}
    open_logs: dict[int, Log] = {}
    try:
        for number in found if server is None else [server]:
            log = open_logs[number] = Log(folder.log(number), starts.get(number, 0))
            yield from ((number, line) for line in log.last(lines))
            if not follow:
                yield from ((number, line) for line in log.half)
        while follow and not ended():
            time.sleep(LOOK_S)
            for number in numbers(folder) if server is None else [server]:
                log = open_logs.setdefault(number, Log(folder.log(number)))
                yield from ((number, line) for line in log.new())
    finally:
        for log in open_logs.values():
            log.close()


def reader_gone(stream: TextIO) -> Callable[[], bool]:
    """Whether nobody reads a pipe or a terminal any more: a quiet log would never find out by writing."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):
        return lambda: False  # a capture
    return lambda: any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def shown(number: int, line: str, stream: TextIO) -> str:
    """A line with its server's number in front, as it is; on a terminal coloured, and without what else that obeys."""
    if not stream.isatty():
        return f"[{number}] {line}"
    if os.environ.get("NO_COLOR"):
        return f"[{number}] {harmless(line)}"
    return f"\033[{COLOURS[number % len(COLOURS)]}m[{number}]\033[0m {coloured(line)}"

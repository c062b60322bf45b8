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

from tokenmill.cluster.left import nodes_here
from tokenmill.core.status import by_name, name_of
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


def places(folder: RunFolder) -> dict[str, Path]:
    """The logs of the servers that have one or are known, by the servers' names in their order; of nodes those that lie
    on this machine."""
    found: dict[str, Path] = {}
    for node, own in ("", folder), *nodes_here(folder).items():
        logged = (path.stem.removeprefix("server-") for path in own.logs.glob("server-*.log"))
        known = (entry.index for entry in own.state().servers)
        for index in sorted({*(int(number) for number in logged if number.isdigit()), *known}):
            found[name_of(node, index)] = own.log(index)
    return found


def elsewhere(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Nodes whose logs lie on their own machines, and where, in words."""
    status, here = folder.status(), nodes_here(folder)
    for node in status.nodes if status else ():
        if node.node not in here:
            where = f"on its machine, {node.at}" if node.at else "on its machine"
            yield node.node, f"the logs of node {node.node} lie {where}: {folder.path / 'nodes' / node.node / 'logs'}"


def _wanted(folder: RunFolder, server: str | None) -> dict[str, Path]:
    """Raises UsageError."""
    found = places(folder)
    if server is None:
        return found
    chosen = {name: path for name, path in found.items() if name == server or name.startswith(f"{server}/")}
    if not chosen:
        for node, words in elsewhere(folder):
            if server == node or server.startswith(f"{node}/"):
                raise UsageError(words, fix=f"there: tokenmill logs {folder.path / 'nodes' / node}")
        has = f"the run has {', '.join(found)}" if found else "none has started yet"
        raise UsageError(f"there is no log of server {server}: {has}")
    return chosen


def logs(
    folder: RunFolder,
    server: str | None,
    *,
    follow: bool,
    lines: int | None = 50,
    this_life: bool = False,
    ended: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[str, str]]:
    """Server and line: the last lines of one log, of a node's or of all, then what comes, until `ended` (nobody reads
    any more).

    `this_life` leaves out what was written before the server's last start, where that start is still known. Raises
    UsageError for a name that no server has.
    """
    found = _wanted(folder, server)
    if not found and not follow:
        raise UsageError(f"{folder.logs} holds no log: no server has started yet")
    folders = (folder, *nodes_here(folder).values())
    entries = [(name_of(entry.node, entry.index), entry) for own in folders for entry in own.state().servers]
    starts = {name: entry.log_start for name, entry in entries} if this_life else {}
    open_logs: dict[str, Log] = {}
    try:
        for name, path in found.items():
            log = open_logs[name] = Log(path, starts.get(name, 0))
            yield from ((name, line) for line in log.last(lines))
            if not follow:
                yield from ((name, line) for line in log.half)
        while follow and not ended():
            time.sleep(LOOK_S)
            for name, path in (places(folder) if server is None else found).items():
                log = open_logs.setdefault(name, Log(path))
                yield from ((name, line) for line in log.new())
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


def shown(name: str, line: str, stream: TextIO) -> str:
    """A line with its server's name in front, as it is; on a terminal coloured, and without what else that obeys."""
    if not stream.isatty():
        return f"[{name}] {line}"
    if os.environ.get("NO_COLOR"):
        return f"[{name}] {harmless(line)}"
    node, index, _ = by_name(name)
    return f"\033[{COLOURS[(sum(node.encode()) + index) % len(COLOURS)]}m[{name}]\033[0m {coloured(line)}"

"""Reads what was appended to a log since the last look. Progress bars overwrite themselves: \\r ends a line, too."""

import re
from collections import deque
from pathlib import Path

KEPT_LINES = 600
"""A crash's own words, and the dump of every thread after them (seen: 215 lines); a day of access lines does not
pile up."""

MAX_READ = 1 << 20
"""Bytes read at one look; a log that grows faster is read from its end."""


LONGEST = 1 << 16
"""Bytes of a line that are kept: SGLang's longest, its arguments, has 8 KB, and binary junk may have no end at all."""


class LogTail:
    """`lines` are the last whole ones seen."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._at = start
        self._rest = b""

    def read(self) -> list[str]:
        """The whole lines that are new."""
        try:
            with self.path.open("rb") as log:
                size = log.seek(0, 2)
                if size < self._at:
                    self._at = 0  # truncated by someone: begin again
                if size - self._at > MAX_READ:
                    self._at = size - MAX_READ
                log.seek(self._at)
                data = log.read(MAX_READ)
        except OSError:
            return []
        self._at += len(data)
        *whole, rest = re.split(rb"[\r\n]+", self._rest + data)
        self._rest = rest[:LONGEST]
        lines = [line[:LONGEST].decode("utf-8", "replace") for line in whole if line]
        self.lines.extend(lines)
        return lines

    @property
    def rest(self) -> list[str]:
        """The half line at the end, if there is one: a dying process may not have ended it."""
        return [self._rest.decode("utf-8", "replace")] if self._rest else []

    def tail(self) -> list[str]:
        """The last lines, a half one at the end included."""
        return [*self.lines, *self.rest]


def head(path: Path, start: int) -> str:
    """The text of a log from a byte on, 1 MiB at most: what a server said while it started."""
    try:
        with path.open("rb") as log:
            log.seek(start)
            return log.read(MAX_READ).decode("utf-8", "replace")
    except OSError:
        return ""


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

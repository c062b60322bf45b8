"""One reader of a run folder for everybody who looks at it: what is new since the last look, as messages.

Whoever comes later gets `whole`, then the same messages as all others. Nothing here waits or writes.
"""

import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill import configfile, events, history
from tokenmill.config import rules_of
from tokenmill.core.efficiency import of_peak
from tokenmill.core.judge import Rules
from tokenmill.core.roll import found
from tokenmill.core.status import RunStatus
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.events import Event
from tokenmill.folder import RunFolder
from tokenmill.history import Moment, Thinned, moment
from tokenmill.logs import Log, places
from tokenmill.plain import against_gate, left, start_of
from tokenmill.servers import status_of
from tokenmill.steps import node_words, step_words
from tokenmill.untrusted import log_line
from tokenmill.web.catalog import Catalog
from tokenmill.web.charts import columns
from tokenmill.web.shown import safe
from tokenmill.web.timeline import Timeline

EVENTS = 200
"""The newest events that are shown: what went before is in events.jsonl."""

NEW_POINTS = 100
"""Moments since the last look; more than one only where the disk was slow, and at the first look."""

HEAD_BYTES = 64
"""Of the first event, by which one run is told from another: its moment to the millisecond is among them."""

LOG_LINES, LINE_CHARS = 300, 2000
"""Of a log's end, and of a line."""


class Message(NamedTuple):
    """A server-sent event: its name and its JSON."""

    name: str
    data: bytes


class Watcher:
    """Looks at a folder whenever it is asked to, always on one thread at a time."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._begin()

    def _begin(self) -> None:
        self.status: RunStatus | None = None
        self.catalog = Catalog(self.folder.data, Rules())
        self.trouble = ""
        self._head = b""
        self._live = False
        self._config_seen = 0
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._events_end = 0
        self._line = Thinned()
        self._last: Moment | None = None
        self._line_end = 0
        self._timeline = Timeline()
        self._sent: tuple[Any, ...] = ()

    def look(self) -> list[Message]:
        """What is new, in its order; all, where another run stands there now."""
        head = _head(self.folder.events)
        if head and not head.startswith(self._head):
            self._begin()
            self.look()
            return [self.whole()]
        self._head = head or self._head
        self._renew_rules()
        messages = [self._new_points(), self._new_events()]
        self.status = status = status_of(self.folder)
        self._live = self.folder.owner() is not None
        catalog = self.catalog
        state = (status, self._live, catalog.rows, catalog.left, self.trouble)
        if state != self._sent:
            self._sent = state
            messages.append(message("status", safe(self._now())))
            if self._live:
                messages.append(_points(self._last, [moment(status)], final=False))
        return [each for each in messages if each is not None]

    def whole(self) -> Message:
        """All that a page begins with."""
        begin = {
            "columns": msgspec.to_builtins(columns(self._line.moments())),
            **safe({"events": list(self._events), **self._now()}),
            "timeline": safe({name: list(changes) for name, changes in self._timeline.servers.items()}),
            "gaps": list(self._timeline.gaps),
        }
        return message("whole", begin)

    def _now(self) -> dict[str, Any]:
        catalog = {"rows": self.catalog.rows, "left": self.catalog.left, "labels": self.catalog.labels()}
        return {
            "status": self.status,
            "live": self._live,
            "words": _words(self.status) if self.status else {},
            "catalog": {**catalog, "trouble": self.trouble},
            "logs": list(places(self.folder)),
            "now": time.time(),
        }

    def _renew_rules(self) -> None:
        """A run that was started again may have another [judge]: then every verdict is another one."""
        try:
            seen = self.folder.config.stat().st_mtime_ns
        except OSError:
            return
        if seen == self._config_seen:
            return
        self._config_seen = seen
        try:
            rules = rules_of(configfile.load(self.folder.config))
        except TokenmillError as error:
            self.trouble = f"verdicts are by default rules: {error}"
            return
        if rules != self.catalog.rules:
            self.catalog = Catalog(self.folder.data, rules)

    def _new_points(self) -> Message | None:
        before = self._last
        new: deque[Moment] = deque(maxlen=NEW_POINTS)
        for each, end in history.read(self.folder.history, self._line_end):
            self._line_end = end
            self._line.add(each)
            self._timeline.moment(each)
            new.append(each)
        if not new:
            return None
        self._last = new[-1]
        return _points(before, list(new), final=True)

    def _new_events(self) -> Message | None:
        new: deque[Event] = deque(maxlen=EVENTS)
        for event, end in events.read(self.folder.events, self._events_end):
            self._events_end = end
            new.append(event)
            self._timeline.event(event)
        self._events.extend(new)
        return message("events", safe(list(new))) if new else None


class LogTail:
    """The end of one server's log, and what comes; for any number of readers. Raises UsageError for a name that no
    server has, and for a log that is not a file of this folder."""

    def __init__(self, folder: RunFolder, server: str) -> None:
        path = places(folder).get(server)
        if path is None:
            raise UsageError("there is no log of such a server")
        self._folder, self._path = folder, path
        self._log = Log(own_file(folder, self._path))
        self.recent = deque(self._lines(self._log.last(LOG_LINES)), maxlen=LOG_LINES)

    def look(self) -> list[str]:
        """The whole lines since the last look, the newest of them."""
        own_file(self._folder, self._path)
        new = self._lines(self._log.new()[-LOG_LINES:])
        self.recent.extend(new)
        return new

    def close(self) -> None:
        self._log.close()

    @staticmethod
    def _lines(lines: list[str]) -> list[str]:
        return [log_line(line, LINE_CHARS) for line in lines]


def _words(status: RunStatus) -> dict[str, Any]:
    """What the terminal says in the same words; of a share of the gate, also whether it is near what is allowed, of a
    server its name and where its start is, of a node what is to be said of it."""
    step = step_words(status.step) if status.step else ""
    servers = [(server.name, start_of(server)) for server in status.servers]
    nodes = [node_words(node) for node in status.nodes]
    gate = list(against_gate(status.gate))
    doctors = [(f"{whose}: {one.kind}: {one.text}", one.fix) for whose, one in found(status.nodes)]
    peak = " · ".join(of_peak(status.efficiency))
    words = {"left": left(status), "step": step, "peak": peak, "gate": gate, "servers": servers}
    return {**words, "nodes": nodes, "doctors": doctors}


def own_file(folder: RunFolder, path: Path) -> Path:
    """A file of the folder itself; raises UsageError for one that a link leads out of it, and for what is no file."""
    real = path.resolve()
    if not real.is_relative_to(folder.path.resolve()):
        raise UsageError(f"{path.name} is a link to a place outside the run folder; it is not shown")
    if real.exists() and not real.is_file():
        raise UsageError(f"{path.name} is no file")
    return real


def _head(path: Path) -> bytes:
    """How a file of lines begins, which stays so as long as it only grows; empty where there is nothing."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def _points(before: Moment | None, new: list[Moment], *, final: bool) -> Message:
    """New points behind one that is known (`skip` it); those that are not final make way for the next."""
    lines = columns([before, *new] if before else new)
    return message("points", {"final": final, "skip": int(before is not None), "columns": lines})


def message(name: str, value: Any) -> Message:
    """With any value as its JSON."""
    return Message(name, msgspec.json.encode(value))

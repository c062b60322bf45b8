"""What a terminal shows of a run: its screen (screen.py), or a line every 10 s where there is no terminal.

A lost terminal never ends a run: a stream that cannot be written is dropped for good, and run.log holds it all anyway.
"""

import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from tokenmill.core.efficiency import words as efficiency_words
from tokenmill.core.server import SERVING
from tokenmill.core.status import NodeRow, RunStatus, ServerStatus
from tokenmill.events import QUIET_KINDS, Event, now
from tokenmill.plain import duration, start_of, to_go
from tokenmill.screen import LEVEL, screen
from tokenmill.steps import step_words
from tokenmill.streams import SafeStream, console, in_front, live, stoppable
from tokenmill.untrusted import harmless

LINE_EVERY_S = 10.0

KEPT = 50
"""Events that a screen may show, and that stay on the terminal when it is given back."""

APART_S = 0.2
"""Between two pictures at least."""

TOLD = frozenset({"pending", "ready", "backoff", "failed", "quarantined"})
"""States that an event tells with more words, or that nothing is to be told of."""


NO_NEWS = frozenset({"ready", "draining", "ended"})
"""States of nodes that a line is silent of."""


class View:
    """Shows a run while it goes. `log` gets every line in plain text.

    On a terminal it takes the whole screen, and at its end gives it back with what was said last; without one it writes
    lines. With `starting` it shows servers that start, for `up`: a line for each change of a server.
    """

    def __init__(self, log: Path | None, out: Console | None = None, *, starting: bool = False) -> None:
        self._out = out or console()
        self._log = log
        self._live: Live | None = None
        self._scope = ExitStack()
        self._drawn_at = 0.0
        self._shown_at = 0.0
        self._last: RunStatus | None = None
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._new = 0
        self._detached = False
        self._starting = starting

    def __enter__(self) -> "View":
        if live(self._out):
            # What others write to stderr would stand in the picture until the next one: it becomes a line.
            self._live = Live(console=self._out, screen=True, auto_refresh=False, redirect_stderr=False)
            self._stderr, sys.stderr = sys.stderr, _Said(self.say)
            self._live.start()
            self._scope.enter_context(stoppable(self._live.stop, self._draw))
        return self

    def __exit__(self, *_: object) -> None:
        if self._leave_screen():
            events = list(self._events)
            for event in events[max(len(events) - self._new, 0) :]:
                self._print_event(event)

    def _leave_screen(self) -> bool:
        """Whether it had the screen."""
        if self._live is None:
            return False
        live, self._live = self._live, None
        self._scope.close()
        sys.stderr = self._stderr
        live.stop()
        return True

    def detach(self) -> None:
        """The terminal is gone: from now on only run.log."""
        self._detached = True
        self._leave_screen()
        stream = self._out.file
        if isinstance(stream, SafeStream):
            stream.lose()

    def event(self, event: Event) -> None:
        """A line for what happened, with its fix and the log's decisive lines below."""
        if event.kind in QUIET_KINDS:
            return
        for text, _ in _lines(event):
            self._write_log(text)
        self._events.append(event)
        self._new += 1
        if self._live is not None:
            self._draw(soon=True)
        elif not self._detached:
            self._print_event(event)

    def recall(self, events: Iterable[Event]) -> None:
        """What happened before it was looked at: for the screen alone."""
        self._events.extend(event for event in events if event.kind not in QUIET_KINDS)

    def say(self, text: str, level: str = "info") -> None:
        """A line for the terminal and for run.log."""
        self.event(Event(now(), "say", text, "", level))

    def show(self, status: RunStatus) -> None:
        """The state of things: redraws the screen, or writes a line if the last one is 10 s old."""
        moment = time.monotonic()
        if self._starting and self._live is None:
            for change in changes(self._last.servers if self._last else (), status.servers):
                self.say(change)
        self._last = status
        if self._live is not None:
            self._draw()
        if moment - self._shown_at >= LINE_EVERY_S:
            self._shown_at = moment
            self._write_log(line(status))
            if self._live is None and not self._detached:
                self._print(line(status))

    def _draw(self, *, soon: bool = False) -> None:
        """`soon`: within the next picture, where this one is a moment old: events come in bursts."""
        moment = time.monotonic()
        if self._live is None or (soon and moment - self._drawn_at < APART_S):
            return
        if not self._live.is_started:  # since Ctrl-Z
            if not in_front(self._out):
                return
            self._live.start()
        self._drawn_at = moment
        self._out.size = _size(self._out)
        self._live.update(Group(*screen(self._last, tuple(self._events), *self._out.size)), refresh=True)

    def _print_event(self, event: Event) -> None:
        for text, style in _lines(event):
            self._print(text, style, event.t)

    def _print(self, text: str, style: str = "", at: float | None = None) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        self._out.print(Text(f"{clock} {text}", style=style), soft_wrap=True)

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as out:
                out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError:
            pass  # the store says it if the disk is full


class _Said(io.TextIOBase):
    """A stream whose lines are said."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._rest = ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        for words in whole:
            self._say(words, "warn")
        return len(text)


def _size(out: Console) -> ConsoleDimensions:
    """As the terminal is now, whatever COLUMNS was when it started."""
    try:
        found = os.get_terminal_size(out.file.fileno())
    except (OSError, ValueError):
        return out.size
    return ConsoleDimensions(found.columns or 80, found.lines or 24)


def _lines(event: Event) -> Iterator[tuple[str, str]]:
    """An event's lines, each with its style."""
    yield harmless(event.sentence), LEVEL.get(event.level, "")
    yield from ((harmless(words), "dim") for words in event.below)


def changes(before: Iterable[ServerStatus], servers: Iterable[ServerStatus]) -> Iterator[str]:
    """A line for each server whose state or phase is another than before. Failures are told by events."""
    known = {(server.node, server.index): (server.state, server.phase) for server in before}
    for server in servers:
        new = (server.state, server.phase)
        old = known.get((server.node, server.index))
        if new not in (old, ("starting", "")) and server.state not in TOLD:
            yield f"server {server.name}: {f'{server.state} {start_of(server)}'.strip()}"


def farewell(last: RunStatus, folder: Path, code: int, export: str) -> Iterator[str]:
    """What a finished run says last: counts, where everything is, and the command that takes the data out."""
    counts = last.prompts
    speed = f" · {last.tokens:,} tokens in {duration(last.seconds)}, {last.tokens_per_s:,.0f} tok/s"
    yield f"{counts.verdicts}, {counts.pending:,} pending{speed if last.seconds else ''}"
    if last.efficiency is not None and last.efficiency.share is not None:
        yield efficiency_words(last.efficiency)
    yield f"dataset  {folder / 'data'}"
    yield f"report   {folder / 'report.html'}"
    if code == 0:
        yield f"next     tokenmill inspect {folder}"
        yield f"         {export}"
    else:
        yield "next     start it again: it goes on where it is"


def line(status: RunStatus) -> str:
    """The run in one line; while servers start, where each of them is."""
    counts = status.prompts
    ready = f"{sum(server.state in SERVING for server in status.servers)}/{len(status.servers)} servers ready"
    others = [server for server in status.servers if server.state not in SERVING]
    where = [f"{server.name} {server.state} {start_of(server) or _aside(server)}".strip() for server in others]
    if status.step is not None:
        return harmless(f"{status.state}: {step_words(status.step)}")
    if status.nodes:
        ready = f"{sum(node.state == 'ready' for node in status.nodes)}/{len(status.nodes)} nodes, {ready}"
        unready = [node for node in status.nodes if node.state not in NO_NEWS]
        where = [f"node {node.node} {node.state} {_staged(node)}".strip() for node in unready] + where
    if not counts.total:
        return harmless(" · ".join((f"{status.state}: {ready}", *where)))
    words = [
        f"{status.state}: {counts.done:,}/{counts.total:,} done",
        f"{counts.rejected:,} rejected, {counts.failed:,} failed",
        f"{status.tokens_per_s:,.0f} tok/s",
        ready,
    ]
    if left := to_go(status):
        words.append(left)
    return harmless(" · ".join((*words, *where)))


def _staged(node: NodeRow) -> str:
    """How far its long step is."""
    return f"({step_words(node.step)})" if node.step else ""


def _aside(row: ServerStatus) -> str:
    """What a server does of which neither a phase nor a forecast tells: kernels compiled for 100 s in the canary."""
    return f"({row.doing})" if row.doing else ""

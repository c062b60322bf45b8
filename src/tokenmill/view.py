"""What a terminal shows of a run: a live table, or a line every 10 s where there is no terminal.

A lost terminal never ends a run: a stream that cannot be written is dropped for good, and run.log holds it all anyway.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tokenmill.core.server import SERVING
from tokenmill.core.status import RunStatus, ServerStatus
from tokenmill.events import Event

LINE_EVERY_S = 10.0

COLUMNS = ("server", "state", "phase", "in flight", "tok/s", "restarts")
FINDINGS = 4
"""Below the table: 16 servers may all have the same."""

GAP, LEAST_PROBLEM = 2, 12
"""Between columns, and the least room that a problem's words are worth: else they are left out."""

TOLD = frozenset({"pending", "ready", "backoff", "failed", "quarantined"})
"""States that an event tells with more words, or that nothing is to be told of."""

QUIET_KINDS = frozenset({"state"})
"""Events that the table shows anyway."""

_STATE_STYLE = {"ready": "green", "failed": "red", "quarantined": "red", "backoff": "yellow", "suspect": "yellow"}


class SafeStream:
    """A text stream that stops existing when it can no longer be written (closed terminal, broken pipe)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = False

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                return self._stream.write(text)
            except (OSError, ValueError):
                self._lose()
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lose()

    def _lose(self) -> None:
        """Also puts /dev/null under the descriptor: Python flushes its streams at exit and would report them broken."""
        self.lost = True
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(stream: TextIO | None = None) -> Console:
    """A console on a stream that may go away; stderr by default, since stdout is for results."""
    return Console(file=SafeStream(stream or sys.stderr), highlight=False, soft_wrap=False)  # type: ignore[arg-type]


class View:
    """Shows a run while it goes. `log` gets every line in plain text.

    With `starting` it shows servers that start, for `up`: without a terminal a line for each change of a server, and on
    one a table that goes when they are ready.
    """

    def __init__(self, log: Path | None, out: Console | None = None, *, starting: bool = False) -> None:
        self._out = out or console()
        self._log = log
        self._live: Live | None = None
        self._shown_at = 0.0
        self._last: RunStatus | None = None
        self._detached = False
        self._starting = starting

    def __enter__(self) -> "View":
        if self._out.is_terminal:
            self._live = Live(console=self._out, auto_refresh=False, transient=self._starting, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def detach(self) -> None:
        """The terminal is gone: from now on only run.log."""
        self._detached = True
        if self._live is not None:
            self._live.stop()
            self._live = None
        stream = self._out.file
        if isinstance(stream, SafeStream):
            stream._lose()  # noqa: SLF001

    def event(self, event: Event) -> None:
        """A line for what happened, with its fix and the log's decisive lines below."""
        if event.kind in QUIET_KINDS:
            return
        where = f"server {event.server}: " if event.server else ""
        self.say(f"{where}{event.text}", event.level)
        for line in event.lines:
            self.say(f"    {line}", "dim")
        if event.fix:
            self.say(f"    fix: {event.fix}", "dim")

    def say(self, text: str, level: str = "info") -> None:
        """A line for the terminal and for run.log."""
        self._write_log(text)
        style = {"warn": "yellow", "error": "red", "dim": "dim"}.get(level, "")
        if not self._detached:
            self._print(text, style)

    def show(self, status: RunStatus) -> None:
        """The state of things: redraws the table, or writes a line if the last one is 10 s old."""
        moment = time.monotonic()
        if self._starting and self._live is None:
            for change in changes(self._last.servers if self._last else (), status.servers):
                self.say(change)
        self._last = status
        if self._live is not None:
            self._live.update(table(status, self._out.width), refresh=True)
        if moment - self._shown_at >= LINE_EVERY_S:
            self._shown_at = moment
            self._write_log(line(status))
            if self._live is None and not self._detached:
                self._print(line(status))

    def _print(self, text: str, style: str = "") -> None:
        # A pipe has no width: whoever reads it wants whole lines.
        whole = not self._out.is_terminal
        self._out.print(Text(f"{time.strftime('%H:%M:%S')} {text}", style=style), soft_wrap=whole)

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as out:
                out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError:
            pass  # the store says it if the disk is full


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 42 s, 5 min, 3 h 20 min, 4 d 2 h."""
    if seconds is None:
        return "–"
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def changes(before: Iterable[ServerStatus], servers: Iterable[ServerStatus]) -> Iterator[str]:
    """A line for each server whose state or phase is another than before. Failures are told by events."""
    known = {(server.node, server.index): (server.state, server.phase) for server in before}
    for server in servers:
        new = (server.state, server.phase)
        old = known.get((server.node, server.index))
        if new not in (old, ("starting", "")) and server.state not in TOLD:
            yield f"server {_name(server)}: {f'{server.state} {start_of(server)}'.strip()}"


def farewell(last: RunStatus, folder: Path, code: int, export: str) -> Iterator[str]:
    """What a finished run says last: counts, where everything is, and the command that takes the data out."""
    counts = last.prompts
    verdicts = f"{counts.accepted:,} accepted, {counts.rejected:,} rejected, {counts.failed:,} failed"
    speed = f" · {last.tokens:,} tokens in {duration(last.seconds)}, {last.tokens_per_s:,.0f} tok/s"
    yield f"{verdicts}, {counts.pending:,} pending{speed if last.seconds else ''}"
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
    where = [f"{_name(server)} {server.state} {start_of(server) or _aside(server)}".strip() for server in others]
    if not counts.total:
        return " · ".join((f"{status.state}: {ready}", *where))
    words = [
        f"{status.state}: {counts.total - counts.pending:,}/{counts.total:,} done",
        f"{counts.rejected:,} rejected, {counts.failed:,} failed",
        f"{status.tokens_per_s:,.0f} tok/s",
        ready,
    ]
    if status.eta_s is not None:
        words.append(f"{duration(status.eta_s)} to go")
    return " · ".join((*words, *where))


def table(status: RunStatus, width: int) -> RenderableType:
    """The run as a table: counts and rates, a bar, a row per server. Nothing wraps: what has no room is left out."""
    counts = status.prompts
    done = counts.total - counts.pending
    words = [f"{done:,} / {counts.total:,}", f"{status.tokens_per_s:,.0f} tok/s"] if counts.total else []
    ready = sum(server.state in SERVING for server in status.servers)
    if ready < len(status.servers) or not counts.total:
        words.append(f"{ready}/{len(status.servers)} servers ready")
    if status.eta_s is not None:
        words.append(f"{duration(status.eta_s)} to go")
    if status.slots_busy is not None:
        words.append(f"slots {status.slots_busy:.0%} busy")
    head = Text.assemble((status.run, "bold"), "  ", (status.state, "cyan"), no_wrap=True, overflow="ellipsis")
    for word in words:
        head.append(f"  {word}")
    below: tuple[RenderableType, ...] = (servers(status.servers, width),) if status.servers else ()
    if not counts.total:
        return Group(head, *below)
    verdicts = Text(no_wrap=True, overflow="ellipsis")
    verdicts.append(f"accepted {counts.accepted:,} · rejected {counts.rejected:,} · failed {counts.failed:,}")
    for name, count in sorted(status.labels.items(), key=lambda kv: -kv[1])[:4]:
        verdicts.append(f" · {name} {count:,}", style="dim")
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=counts.total, completed=done, width=min(width - 8, 72)), f"{done / counts.total:.1%}")
    told = (f"server {finding.server}: {finding.text}" for finding in status.findings[:FINDINGS])
    below += tuple(Text(text, style="yellow", no_wrap=True, overflow="ellipsis") for text in told)
    if (more := len(status.findings) - FINDINGS) > 0:
        below += (Text(f"and {more} findings more: tokenmill status", style="yellow"),)
    return Group(head, bar, verdicts, *below)


def servers(rows: tuple[ServerStatus, ...], width: int) -> Table:
    """A row per server; narrow terminals lose the right-most columns, never the state."""
    cells = [_cells(row) for row in rows]
    ends = list(accumulate(max(map(cell_len, column)) + GAP for column in zip(COLUMNS, *cells, strict=True)))
    kept = max(sum(end <= width for end in ends), 2)
    room = width - ends[-1] - GAP
    grid = Table(box=None, padding=(0, GAP, 0, 0), show_edge=False)
    for name in COLUMNS[:kept]:
        grid.add_column(name, no_wrap=True)
    if room >= LEAST_PROBLEM:
        grid.add_column("note", no_wrap=True)
    for row, words in zip(rows, cells, strict=True):
        shown: list[RenderableType] = [*words[:kept]]
        shown[1] = Text(row.state, style=_STATE_STYLE.get(row.state, ""))
        if room >= LEAST_PROBLEM:
            problem = row.last_error or row.doing
            shown.append(problem if len(problem) <= room else problem[: room - 1] + "…")
        grid.add_row(*shown)
    return grid


def _aside(row: ServerStatus) -> str:
    """What a server does of which neither a phase nor a forecast tells: kernels compiled for 100 s in the canary."""
    return f"({row.doing})" if row.doing else ""


def _name(row: ServerStatus) -> str:
    return f"{row.node}/{row.index}" if row.node else str(row.index)


def start_of(row: ServerStatus) -> str:
    """Where a start is or where it failed, and when it should be ready; nothing where the state says it all."""
    words = [f"{row.phase} {row.percent:.0f}%"] if row.phase not in ("", row.state) else []
    if row.eta_s and row.eta_s >= 1:
        words.append(f"ready in {duration(row.eta_s)}")
    return ", ".join(words)


def _cells(row: ServerStatus) -> tuple[str, ...]:
    """A server's words, in the order of COLUMNS."""
    card = "" if row.gpu in ("none", "") else f" (GPU {row.gpu})"
    tokens = f"{row.tokens_per_s:,.0f}" if row.capacity else ""
    accept = f" ×{row.accept_length:.2f}" if row.accept_length else ""
    return (
        f"{_name(row)}{card}",
        row.state,
        start_of(row),
        f"{row.in_flight}/{row.capacity}" if row.capacity else "",
        f"{tokens}{accept}",
        str(row.restarts) if row.restarts else "",
    )

"""A run as a terminal's screen: status and last events → lines that fit, exactly. Pure, but for the local time zone.

Nothing wraps by itself and nothing is cut without a sign. What has no room is summed up, and trouble is shown first.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from textwrap import wrap

from rich.cells import cell_len
from rich.text import Text

from tokenmill.core.efficiency import of_peak
from tokenmill.core.server import SERVING
from tokenmill.core.status import NodeRow, RunStatus, ServerStatus
from tokenmill.events import Event
from tokenmill.plain import against_gate, start_of, to_go
from tokenmill.steps import node_words, step_words
from tokenmill.table import Row, table
from tokenmill.untrusted import harmless

COLUMNS = ("server", "state", "in flight, or start", "tok/s", "restarts", "accept")
NODE_COLUMNS = ("node", "state", "servers", "in flight", "tok/s", "records")

BAR, SERVER_BAR = 40, 6
"""Widths of the run's bar, at most, and of a server's."""

EVENTS_LEAST = 6
"""Lines of events that servers leave room for, with the title."""

EVENT_LINES, FINDINGS, LABELS = 3, 4, 6
"""Lines of one event, findings, labels at most."""

_STYLE = {"ready": "green", "failed": "red", "quarantined": "red", "backoff": "yellow", "suspect": "yellow"}
LEVEL = {"warn": "yellow", "error": "red"}
"""Colours of events; a word says it, too."""

_TROUBLE = ("failed", "quarantined", "backoff", "suspect", "stopping", "pending", "starting", "answering", "canary")
"""Which servers are shown first where not all have room."""

_NODE_STYLE = {"ready": "green", "failed": "red", "lost": "red", "backoff": "yellow"}
_NODE_TROUBLE = ("failed", "lost", "backoff", "staging", "doctor", "joining", "starting", "draining")
"""Which nodes are."""


def screen(status: RunStatus | None, events: Sequence[Event], width: int, height: int) -> list[Text]:
    """The whole screen, at most `height` lines of `width` cells."""
    lines: list[Text] = []
    if status is not None:
        lines += _head(status, width)
        told = list(_findings(status))
        kept_free = min(len(events) + 1 if events else 0, EVENTS_LEAST)
        room = height - len(lines) - len(told) - kept_free
        if status.nodes:
            nodes = list(_nodes(status.nodes, width, max(room // 2, room - 3 * len(status.servers), 3)))
            lines += nodes
            room -= len(nodes)
        if status.servers:
            lines += _servers(status.servers, width, room)
        lines += told
    room = height - len(lines)
    if events and room >= 2:
        lines += [Text("last events", style="dim"), *_events(events, width, room - 1)]
    return [_fit(line, width) for line in lines[:height]]


def _fit(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


# -- the run -----------------------------------------------------------------------------------------------------------
def _head(status: RunStatus, width: int) -> Iterator[Text]:
    clock = time.strftime("%H:%M:%S", time.localtime(status.updated)) if status.updated else ""
    name = Text.assemble((harmless(status.run), "bold"), "  ", (status.state, "cyan"))
    name.truncate(max(width - len(clock) - 1, 1), overflow="ellipsis", pad=True)
    yield name.append(f" {clock}", style="dim")
    counts = status.prompts
    if counts.total:
        yield _bar(counts.done, counts.total, min(BAR, width // 3)).append(
            f"  {counts.done / counts.total:.1%}  {counts.done:,} of {counts.total:,} prompts done"
        )
        yield from _flow(_rates(status), width)
        yield from islice(_flow(map(Text, of_peak(status.efficiency)), width), 1)
        yield from _flow(_shares(status), width)
        yield next(_flow(_verdicts(status), width))  # the rarest labels go first where there is no room
    if status.step is not None:
        words = step_words(status.step)
        bar = [_bar(status.step.done, status.step.total, min(BAR, width // 4))] if status.step.total else []
        yield from _flow([*bar, Text(words)], width)
    if status.message:
        yield from _wrapped(status.message, width, "yellow")


def _rates(status: RunStatus) -> Iterator[Text]:
    if words := to_go(status):
        yield Text(words, style="bold")
    mean = status.tokens / status.seconds if status.seconds else 0.0
    if status.tokens_per_s or mean:
        yield Text(f"{status.tokens_per_s:,.0f} tok/s now, {mean:,.0f} mean")
    if status.slots_busy is not None:
        yield Text(f"slots {status.slots_busy:.0%} busy")


def _shares(status: RunStatus) -> Iterator[Text]:
    for words, near in against_gate(status.gate):
        yield Text(words, style="yellow" if near else "")


def _verdicts(status: RunStatus) -> Iterator[Text]:
    yield Text(status.prompts.verdicts)
    for name, count in sorted(status.labels.items(), key=lambda each: -each[1])[:LABELS]:
        yield Text(f"{name} {count:,}", style="dim")


# -- the servers -------------------------------------------------------------------------------------------------------
def _findings(status: RunStatus) -> Iterator[Text]:
    findings = status.findings
    told = findings[: FINDINGS if len(findings) <= FINDINGS else FINDINGS - 1]
    for finding in told:
        yield Text(harmless(f"server {finding.server}: {finding.text}"), style="yellow")
    if more := len(findings) - len(told):
        yield Text(f"and {more} findings more: tokenmill status", style="yellow")


def _servers(servers: Sequence[ServerStatus], width: int, room: int) -> Iterator[Text]:
    """A row each, its problem beside or below it."""
    ready = sum(server.state in SERVING for server in servers)

    def summed(numbers: Sequence[int], is_all: bool) -> str:
        return _sum([servers[number] for number in numbers], ready, len(servers), first=is_all)

    return table(
        COLUMNS, "last problem", [_server(at, server) for at, server in enumerate(servers)], width, room, summed
    )


def _server(at: int, server: ServerStatus) -> Row:
    rank = _TROUBLE.index(server.state) if server.state in _TROUBLE else len(_TROUBLE)
    return Row(
        _cells(server),
        server.last_error or server.doing or server.last_problem,
        presses=bool(server.last_error or server.doing),
        rank=(rank, at),
        style=_STYLE.get(server.state, ""),
        is_fine=server.state in SERVING,
    )


def _sum(rest: Sequence[ServerStatus], ready: int, count: int, *, first: bool) -> str:
    slots = sum(server.capacity for server in rest)
    flight = f"; {sum(server.in_flight for server in rest)}/{slots} in flight" if slots else ""
    rate = sum(server.tokens_per_s for server in rest)
    words = f"{_states(server.state for server in rest)}{flight}{f', {rate:,.0f} tok/s' if rate else ''}"
    return f"{'' if first else 'and '}{words}  ({ready}/{count} ready)"


def _states(states: Iterable[str]) -> str:
    """How many of each."""
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def _cells(server: ServerStatus) -> tuple[str, ...]:
    """A server's words, in the order of COLUMNS."""
    cards = server.gpu.split(",")
    many = f"{cards[0]}-{cards[-1]}" if len(cards) > 2 and all(map(str.isdigit, cards)) else server.gpu
    card = "" if server.gpu in ("none", "") else f" GPU {many}"
    if server.capacity:
        full = min(server.in_flight / server.capacity, 1.0)
        doing = f"{_blocks(full, SERVER_BAR)} {server.in_flight}/{server.capacity}"
    else:
        doing = start_of(server)
        if server.percent and server.phase not in ("", server.state):
            doing = f"{_blocks(server.percent / 100, SERVER_BAR)} {doing}"
    return (
        f"{server.name}{card}",
        server.state,
        doing,
        f"{server.tokens_per_s:,.0f}" if server.capacity else "",
        str(server.restarts) if server.restarts else "",
        f"{server.accept_length:.2f}" if server.accept_length and server.capacity else "",
    )


# -- the nodes, where there are several --------------------------------------------------------------------------------
def _nodes(nodes: Sequence[NodeRow], width: int, room: int) -> Iterator[Text]:
    """A row each, what it is at beside or below it."""
    ready = sum(node.state == "ready" for node in nodes)

    def summed(numbers: Sequence[int], is_all: bool) -> str:
        states = _states(nodes[number].state for number in numbers)
        return f"{'' if is_all else 'and '}{states}  ({ready}/{len(nodes)} nodes ready)"

    return table(NODE_COLUMNS, "note", [_node(at, node) for at, node in enumerate(nodes)], width, room, summed)


def _node(at: int, node: NodeRow) -> Row:
    rate = f"{node.tokens_per_s:,.0f}" if node.capacity else ""
    return Row(
        (
            node.node,
            node.state,
            f"{node.ready}/{node.servers}" if node.servers else "",
            f"{node.in_flight}/{node.capacity}" if node.capacity else "",
            rate,
            f"{node.records:,}" if node.records else "",
        ),
        node_words(node),
        presses=node.state != "ready",
        rank=(_NODE_TROUBLE.index(node.state) if node.state in _NODE_TROUBLE else len(_NODE_TROUBLE), at),
        style=_NODE_STYLE.get(node.state, ""),
        is_fine=node.state in ("ready", "ended", "draining"),
    )


# -- what happened -----------------------------------------------------------------------------------------------------
def _events(events: Sequence[Event], width: int, room: int) -> list[Text]:
    """The newest that have room, the oldest of them first; one that fills the room is cut with a sign."""
    shown: list[Text] = []
    for event in reversed(events):
        lines = list(_event(event, width))
        if len(lines) > room - len(shown):
            if not shown:
                shown = lines[:room]
            break
        shown = lines + shown
    return shown


def _event(event: Event, width: int) -> Iterator[Text]:
    style = LEVEL.get(event.level, "")
    yield from _wrapped(f"{time.strftime('%H:%M:%S', time.localtime(event.t))} {event.sentence}", width, style)
    if event.fix:
        yield Text(harmless(f"         fix: {event.fix}"), style="dim")


def _wrapped(text: str, width: int, style: str) -> Iterator[Text]:
    """In a few lines, the last one with a sign where more would follow."""
    plain = harmless(text)
    narrow = max(width if cell_len(plain) == len(plain) else width // 2, 20)  # wide characters take two cells
    lines = wrap(plain, narrow, subsequent_indent=" " * 9, max_lines=EVENT_LINES, placeholder=" …")
    yield from (Text(line, style=style) for line in lines)


# -- shapes ------------------------------------------------------------------------------------------------------------
def _blocks(share: float, width: int) -> str:
    """A bar that is one without colour, too."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def _bar(done: int, total: int, width: int) -> Text:
    return Text(_blocks(done / total, width))


def _flow(words: Iterable[Text], width: int) -> Iterator[Text]:
    """Words side by side, as many as a line has room for."""
    line: Text | None = None
    for word in words:
        if line is not None and line.cell_len + 3 + word.cell_len > width:
            yield line
            line = None
        line = word.copy() if line is None else line.append(" · ", style="dim").append_text(word)
    if line is not None:
        yield line

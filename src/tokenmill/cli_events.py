"""`tokenmill events`: what happened in a run, in plain sentences or as JSON lines; follows it until the run ends."""

import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tokenmill.cli_parts import RunPath, print_json, server_names
from tokenmill.errors import UsageError

LAST = 50
"""Events shown where nothing else is asked for: two screens."""

LOOK_S = 0.5
"""Between two looks at what has come, for a person who waits."""

LEVELS = ("info", "warn", "error")
_COLOURS = {"warn": "\033[33m", "error": "\033[31m"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def events(
    run_path: RunPath = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL", help="This level and above: info, warn or error.", autocompletion=lambda: list(LEVELS)
        ),
    ] = "info",
    server: Annotated[
        str, typer.Option(metavar="N", help="Of this server alone, or of this node.", autocompletion=server_names)
    ] = "",
    last: Annotated[int | None, typer.Option("--last", "-n", min=1, help=f"So many of the newest; {LAST}.")] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="Not older than this, such as 90s, 20m, 2h, 3d.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line, with all that is known.")] = False,
) -> None:
    """Show what happened in a run, in plain language."""
    from tokenmill import events as log
    from tokenmill.logs import reader_gone
    from tokenmill.servers import folder_of

    if level not in LEVELS:
        raise UsageError(f"--level {level}: there is no such level", fix=f"one of {', '.join(LEVELS)}")
    folder = folder_of(run_path)
    grave, start = LEVELS.index(level), time.time() - _seconds(since) if since else 0.0
    gone = reader_gone(sys.stdout)

    def wanted(event: log.Event) -> bool:
        names = (event.server, event.server.rpartition("/")[2], event.node or event.server.rpartition("/")[0])
        of_server = not server or server in names
        is_grave = event.level not in LEVELS or LEVELS.index(event.level) >= grave
        return of_server and is_grave and (as_json or event.kind not in log.QUIET_KINDS)

    def show(event: log.Event) -> None:
        if as_json:
            print_json(event)
            return
        for line in _lines(event):
            typer.echo(line, color=True)

    at = folder.events.stat().st_size if folder.events.exists() else 0
    for event in log.last(folder.events, last or (None if since else LAST), at, since=start, wanted=wanted):
        show(event)
    while follow and not gone():
        is_over = folder.owner() is None  # asked first: what it says last comes before its end
        for event, behind in log.read(folder.events, at):
            at = behind
            if wanted(event):
                show(event)
        if is_over:
            return
        time.sleep(LOOK_S)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if found is None:
        raise UsageError(f"--since {text!r} is no time", fix="--since 2h   or 90s, 20m, 3d")
    return float(found[1]) * _UNITS[found[2]]


def _lines(event: Any) -> Iterator[str]:
    """When, how grave, what; the log's decisive lines and the fix below."""
    from tokenmill.untrusted import harmless

    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.t))
    grave = "" if event.level == "info" else f"{event.level.upper()}: "
    line = f"{clock} {grave}{harmless(event.sentence)}"
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and event.level in _COLOURS
    yield f"{_COLOURS[event.level]}{line}\033[0m" if coloured else line
    yield from map(harmless, event.below)

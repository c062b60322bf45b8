"""The commands of servers and of runs that go on: parse, then import; nothing else. cli.py registers them."""

import sys
from typing import Annotated, Any

import typer

from tokenmill.cli_parts import AsJson, ConfigFile, RunPath, Set, load, loop, print_json, say, server_names


def up(config: ConfigFile, setting: Set = None) -> None:
    """Start the servers alone; returns when all are ready, and they outlive it.

    Servers that run already are adopted. Exit code 4: fewer than fleet.min_ready are ready. Ctrl-C leaves those that
    are ready and ends the others; a second one does not wait for them.
    """
    from tokenmill.folder import RunFolder
    from tokenmill.up import check_local
    from tokenmill.up import up as start
    from tokenmill.view import View

    loaded = load(config, setting)
    check_local(loaded)
    folder = RunFolder(loaded.folder)
    folder.create()
    try:
        with View(folder.run_log, starting=True) as view:
            code = loop(start(loaded, view))
    finally:
        _show_status(folder)
    raise typer.Exit(code)


def status(run_path: RunPath = None, as_json: AsJson = False) -> None:
    """Show how far a run is, and each server's state."""
    from tokenmill.servers import folder_of, status_of

    folder = folder_of(run_path)
    print_json(status_of(folder)) if as_json else _show_status(folder)


def watch(run_path: RunPath = None) -> None:
    """Follow a run in the terminal until it ends."""
    from tokenmill import servers
    from tokenmill.view import View

    folder = servers.folder_of(run_path)
    with View(None) as view:
        servers.watch(folder, view)
    _show_status(folder)


def logs(
    run_path: RunPath = None,
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="[SERVER]", help="A server's name, or a node's; default: all.", autocompletion=server_names
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is appended, until Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=1, help="Last lines of each log; 50.")] = None,
    this_life: Annotated[bool, typer.Option("--since-start", help="All since each server's last start.")] = False,
) -> None:
    """Show the servers' own logs on this machine, each line with its server's name in front."""
    from tokenmill import logs as steps
    from tokenmill.servers import folder_of

    count = lines if lines or this_life else 50
    gone = steps.reader_gone(sys.stdout)
    folder = folder_of(run_path)
    if server is None:
        for _, words in steps.elsewhere(folder):
            say(words)
    for found in steps.logs(folder, server, follow=follow, lines=count, this_life=this_life, ended=gone):
        typer.echo(steps.shown(*found, sys.stdout), color=True)


def down(
    run_path: RunPath = None,
    now: Annotated[bool, typer.Option("--now", help="Cut what is in flight, and end servers without grace.")] = False,
) -> None:
    """End a run's servers, and nothing else; a live run is asked to drain and exit first."""
    from tokenmill import servers
    from tokenmill.view import View

    folder = servers.folder_of(run_path)
    ended = servers.down(folder, View(folder.run_log), now=now)
    typer.echo(f"{ended} server{'' if ended == 1 else 's'} ended" if ended else "no server is left")


def _show_status(folder: Any) -> None:
    from tokenmill.servers import status_lines, status_of

    for line in status_lines(status_of(folder)):
        typer.echo(line)

"""The commands that show a run to others: parse, then import; nothing else. cli.py registers them."""

from typing import Annotated

import typer

from tokenmill.cli_parts import RunPath, loop

MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics", metavar="PORT", min=1, max=65535, help="Prometheus metrics on 127.0.0.1:PORT."),
]


def serve(
    run_path: RunPath = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8800,
    address: Annotated[str, typer.Option(help="Any other than loopback needs a token.")] = "127.0.0.1",
    token: Annotated[
        str,
        typer.Option(
            envvar="TOKENMILL_TOKEN", help="Who looks must have it: ?token=… once, or Authorization: Bearer …"
        ),
    ] = "",
) -> None:
    """Show a run, live or ended, as a page that can change nothing; and /metrics for Prometheus. Until Ctrl-C."""
    from tokenmill.servers import folder_of
    from tokenmill.web.app import serve as page

    folder = folder_of(run_path)
    loop(page(folder, address, port, token, lambda where: typer.echo(f"{folder.path} is shown at {where}")))

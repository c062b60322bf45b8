"""What the files of the command line have in common: arguments and options, a config, lines and JSON. Imports late."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.errors import TokenmillError

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The config, a TOML file; `tokenmill init` prints one.")
]
RunPath = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", help="A run folder, such as runs/NAME, or its config; default: the only one here."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=V", help="Override a key of the config, such as fleet.gpus=[0,1]; may repeat."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="CHECK", help="Leave out a check of doctor, such as prompts; may repeat."),
]


def server_names(ctx: typer.Context) -> list[str]:
    """For the shell's completion of a server's name; nothing where there is no such run."""
    from tokenmill.logs import places
    from tokenmill.servers import folder_of

    try:
        return list(places(folder_of(ctx.params.get("run_path"))))
    except TokenmillError:
        return []


def load(path: Path, setting: list[str] | None) -> Any:
    """A config from its file and `--set`."""
    from tokenmill import configfile

    return configfile.load(path, setting)


def say(text: str) -> None:
    """A line for whoever looks: stdout is for results."""
    typer.echo(text, err=True)


def print_json(value: object) -> None:
    """One object, with nothing in it that a terminal obeys."""
    import msgspec

    from tokenmill.untrusted import escaped

    typer.echo(escaped(msgspec.json.encode(value).decode()))


def loop(work: Any) -> Any:
    """Runs a coroutine to its end."""
    import uvloop

    return uvloop.run(work)

"""The command `tune`: parse, then import; nothing else. cli.py registers it."""

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli_parts import AsJson, ConfigFile, Set, load, loop, print_json, say


def _aspects(incomplete: str) -> list[str]:
    """For the shell's completion of words between commas."""
    from tokenmill.core.variants import ASPECTS

    given, comma, begun = incomplete.rpartition(",")
    return [f"{given}{comma}{word}" for word in ASPECTS if word.startswith(begun) and word not in given.split(",")]


def tune(
    config: ConfigFile,
    setting: Set = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=10_080, help="For all of it. A start of minutes needs an hour.")
    ] = 15.0,
    gpu: Annotated[
        list[str] | None, typer.Option(metavar="N", help="Measure on this GPU; may repeat. Default: the first ones.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="WHAT,…", help="Of speculation, concurrency, memory.", autocompletion=_aspects)
    ] = "speculation,concurrency,memory",
    prompts: Annotated[int, typer.Option(min=1, help="So many of the run's prompts, evenly spread.")] = 256,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the config with the winner in it, as a new file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure which speculation, concurrency and memory share are fastest here, on this run's prompts.

    One server at a time; nothing is stored in the run. Interrupted, the same command goes on. What fails to start is
    told with its cause.
    """
    import sys

    from tokenmill.core import trials
    from tokenmill.core.variants import ASPECTS
    from tokenmill.errors import UsageError
    from tokenmill.steps import shown
    from tokenmill.streams import console
    from tokenmill.trying.page import table
    from tokenmill.tune import Order
    from tokenmill.tune import tune as measure

    wanted = tuple(word.strip() for word in only.split(","))
    if strange := [word for word in wanted if word not in ASPECTS]:
        raise UsageError(f"--only {strange[0]}: there is no such thing to tune", fix=f"of {', '.join(ASPECTS)}")
    order = Order(load(config, setting), minutes, wanted, prompts, tuple(gpu or ()), write)
    with shown() as tell:
        found = loop(measure(order, tell))
    if as_json:
        print_json(found)
        return
    best = trials.winner(found.tried)
    console(sys.stdout).print(table(found.tried, best))
    for line in ("", *found.verdict):
        typer.echo(line)
    if found.lines:
        typer.echo(f"\n{found.lines}")
    if write is not None:
        say(f"written: {write}   tokenmill run {write}")

"""The commands that turn a run into data: parse, then import; nothing else. cli.py registers them."""

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/NAME, or its config.")]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")]
LABELS = "truncated means truncated_in_thinking and truncated_in_answer."


def export(
    run_path: RunArgument,
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="specforge, specforge-chat, speculators, messages, openai-batch, parquet, or a plug-in's.",
        ),
    ],
    out: OutArgument,
    validation: Annotated[
        float, typer.Option(metavar="SHARE", help="A split of its own, by the keys' hash: always the same rows.")
    ] = 0.0,
    drop: Annotated[str, typer.Option(metavar="LABEL,…", help=f"Leave these rows out; {LABELS}")] = "",
    cap: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=SHARE", help="At most this share of all rows; may repeat.")
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(min=0, help="Supervised tokens of a row, after the cut; default for ids: 2, of a cut row 8.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=0, help="Rows with more supervised tokens are left out.")] = 0,
    max_length: Annotated[
        int, typer.Option(min=0, help="Rows of ids are cut at so many tokens, as a trainer would cut them.")
    ] = 0,
    dedup: Annotated[bool, typer.Option("--dedup", help="Of equal rows (prompt and output) only the first.")] = False,
) -> None:
    """Write a run's accepted records as a dataset, in the prompts' order. Exit code 5 where it is worth nothing."""
    from tokenmill import export as steps
    from tokenmill.config import rules_of
    from tokenmill.configfile import load
    from tokenmill.servers import folder_of
    from tokenmill.steps import shown

    choice = steps.chosen(
        drop=drop,
        cap=cap or (),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        max_length=max_length,
        dedup=dedup,
        validation=validation,
    )
    folder = folder_of(run_path)
    config = load(folder.config)
    with shown() as tell:
        rows = steps.export(
            folder,
            form,
            out,
            rules_of(config),
            samples=config.generation.samples,
            choice=choice,
            model=Path(config.model.path) if config.model.path else None,
            tell=tell,
        )
    typer.echo(f"{rows:,} rows in {out}")


def vocab_map(
    run_path: RunArgument,
    out: OutArgument,
    size: Annotated[int, typer.Option(min=1, help="Ids of the drafter's vocabulary.")] = 32_000,
    vocabulary: Annotated[
        int, typer.Option(min=0, metavar="N", help="Ids of the target model; default: its config.json's.")
    ] = 0,
) -> None:
    """Write which target ids a drafter with a smaller vocabulary has (d2t, t2d); prints what they cover."""
    from tokenmill import vocabmap
    from tokenmill.config import rules_of
    from tokenmill.configfile import load
    from tokenmill.errors import UsageError
    from tokenmill.machine import modelfiles
    from tokenmill.servers import folder_of

    folder = folder_of(run_path)
    config = load(folder.config)
    known = vocabulary or modelfiles.vocabulary_size(Path(config.model.path))
    if not known:
        raise UsageError(f"{config.model.path!r} does not say how many ids it has", fix="--vocabulary N")
    for line in vocabmap.write(folder, out, rules_of(config), size=size, vocabulary=known):
        typer.echo(line)

"""The commands that turn a run into data: parse, then import; nothing else. cli.py registers them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli_parts import AsJson, RunPath, print_json

if TYPE_CHECKING:
    from tokenmill.tokens.filling import Filling

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/NAME, or its config.")]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")]
LABELS = "truncated means truncated_in_thinking and truncated_in_answer."

Validation = Annotated[
    float,
    typer.Option(
        metavar="SHARE", help="This share of the prompts, by hash, as a split of its own.", show_default=False
    ),
]
MinTokens = Annotated[
    int,
    typer.Option(
        min=0,
        help="Leave out rows with fewer supervised tokens; unset: ids need 2, rows that were cut 8.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(min=0, help="Leave out rows with more supervised tokens; unset: no limit.", show_default=False),
]
MaxLength = Annotated[
    int,
    typer.Option(
        min=0,
        help="Cut rows of ids at so many tokens, prompt and output, as a trainer would; unset: no cut.",
        show_default=False,
    ),
]


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
    validation: Validation = 0.0,
    drop: Annotated[str, typer.Option(metavar="LABEL,…", help=f"Leave these rows out; {LABELS}")] = "",
    cap: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=SHARE", help="At most this share of all rows; may repeat.")
    ] = None,
    min_tokens: MinTokens = 0,
    max_tokens: MaxTokens = 0,
    max_length: MaxLength = 0,
    dedup: Annotated[bool, typer.Option("--dedup", help="Of equal rows (prompt and output) only the first.")] = False,
    retokenise: Annotated[
        bool,
        typer.Option("--retokenise", help="Rows without ids get those of their text; tells how far they are off."),
    ] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="For --retokenise; default: the run's model.path.")
    ] = None,
) -> None:
    """Write a run's accepted records as a dataset, in the prompts' order. Exit code 5 where it is worth nothing."""
    from tokenmill import export as steps
    from tokenmill.configfile import load
    from tokenmill.servers import folder_of, judge_of
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
    filling = _filling(config.model.path, model) if retokenise else None
    with shown() as tell:
        rows = steps.export(
            folder,
            form,
            out,
            judge_of(run_path, folder),
            samples=config.generation.samples,
            turns=config.generation.turns,
            choice=choice,
            model=Path(config.model.path) if config.model.path else None,
            filling=filling,
            tell=tell,
        )
    typer.echo(f"{rows:,} rows in {out}")


def _filling(own: str, given: Path | None) -> "Filling":
    from tokenmill.tokens.filling import Filling
    from tokenmill.tokens.retokenise import Retokeniser, model_of

    return Filling(Retokeniser(model_of(own, given)))


def vocab_map(
    run_path: RunArgument,
    out: OutArgument,
    size: Annotated[int, typer.Option(min=1, help="Ids of the drafter's vocabulary.")] = 32_000,
    vocabulary: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Ids of the target model; default: its config.json's.", show_default=False
        ),
    ] = 0,
) -> None:
    """Write which target ids a drafter with a smaller vocabulary has (d2t, t2d); prints what they cover."""
    from tokenmill import vocabmap
    from tokenmill.configfile import load
    from tokenmill.errors import UsageError
    from tokenmill.machine import modelfiles
    from tokenmill.servers import folder_of, judge_of

    folder = folder_of(run_path)
    config = load(folder.config)
    known = vocabulary or modelfiles.vocabulary_size(Path(config.model.path))
    if not known:
        raise UsageError(f"{config.model.path!r} does not say how many ids it has", fix="--vocabulary N")
    for line in vocabmap.write(folder, out, judge_of(run_path, folder), size=size, vocabulary=known):
        typer.echo(line)


def audit(
    run_path: RunArgument,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Whose tokenizer and template; default: the run's model.path.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=0, metavar="N", help="Only N rows, chosen by hash; default: all.", show_default=False)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Render and tokenise a run's rows again, and compare with the recorded ids. Exit code 5: they contradict."""
    from tokenmill.configfile import load
    from tokenmill.servers import folder_of
    from tokenmill.steps import shown
    from tokenmill.tokens import agreement
    from tokenmill.tokens.retokenise import model_of

    folder = folder_of(run_path)
    config = load(folder.config)
    files = model_of(config.model.path, model)
    several = config.generation.samples > 1 or config.generation.turns == "all"
    with shown() as tell:
        found = agreement.audit(folder, files, several=several, sample=sample, tell=tell)
    print_json(found) if as_json else typer.echo("\n".join(agreement.lines(found)))
    raise typer.Exit(5 if found.verdict == "contradict" else 0)


def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN… OUT", help="A run of each shard, by folder or config, and the new run folder."),
    ],
    as_json: AsJson = False,
) -> None:
    """Make one run of the shards of a prompt set ([prompts] shard), proving that every key is there once."""
    from tokenmill import merge as steps
    from tokenmill.errors import UsageError
    from tokenmill.steps import shown

    if len(paths) < 2:
        raise UsageError("merge needs runs and, as the last, a new folder", fix="tokenmill merge RUN… OUT")
    with shown() as tell:
        merged = steps.merge(paths[:-1], paths[-1], tell)
    print_json(merged) if as_json else typer.echo("\n".join(steps.lines(merged)))


def report(run_path: RunPath = None) -> None:
    """Write report.html and report.json anew; prints where they are."""
    from tokenmill import report as reports
    from tokenmill.servers import folder_of, status_of
    from tokenmill.steps import shown

    folder = folder_of(run_path)
    found = status_of(folder)
    total = found.prompts.total if folder.status() is not None else None
    trouble = found.message if found.state == "failed" else ""
    with shown() as tell:
        path = reports.write(folder, reports.Ending(found.state, total, trouble), tell)
    typer.echo(str(path))

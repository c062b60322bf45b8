"""The command line: parse, then import; nothing else. `tokenmill --help` loads no step of the run."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tokenmill import cli_events, cli_export, cli_servers, cli_tune, cli_web
from tokenmill.cli_parts import AsJson, ConfigFile, Set, Skip, load, loop, print_json, say
from tokenmill.errors import TokenmillError

app = typer.Typer(
    name="tokenmill",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's help takes 0.1 s longer than all of this file
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn a prompt set and a model into a checked training dataset, on every GPU you give it.",
    epilog="Exit codes: 0 done · 1 a bug · 2 usage or config · 3 preflight failed · 4 no server could be kept · "
    "5 the gate stopped the run, or unusable data · 6 results could not be stored · 130 interrupted (resumable)",
)


def _retry_words(incomplete: str) -> list[str]:
    """For the shell's completion of `run --retry …`, whose words stand between commas."""
    from tokenmill.retry import WORDS

    given, comma, begun = incomplete.rpartition(",")
    return [f"{given}{comma}{word}" for word in WORDS if word.startswith(begun) and word not in given.split(",")]


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where config, prompts and run go.")] = Path(
        "quickstart"
    ),
    port: Annotated[int, typer.Option(help="First HTTP port.")] = 30000,
) -> None:
    """Run the whole job here and now: two llama.cpp servers on this CPU, 24 prompts, a report. No GPU, no config."""
    from tokenmill import quickstart as steps

    steps.check_engine()
    model = steps.find_model(say)
    threads = max(1, (os.cpu_count() or 2) // 2)
    path = steps.prepare(folder, model, threads=threads, port=port)
    say(f"config: {path}")
    _run(path, None, None)


@app.command()
def init(
    engine: Annotated[str, typer.Option("--engine", help="sglang, vllm, llamacpp, openai or fake.")] = "sglang",
) -> None:
    """Print a commented config."""
    from tokenmill.template import template

    typer.echo(template(engine), nl=False)


@app.command()
def doctor(config: ConfigFile, setting: Set = None, as_json: AsJson = False, skip: Skip = None) -> None:
    """Tell all that would make this run fail or crawl, before it costs anything."""
    from collections import Counter

    from tokenmill.checks.base import Context
    from tokenmill.doctor import checks_of, examine, shown
    from tokenmill.folder import RunFolder
    from tokenmill.leftovers import survivors
    from tokenmill.steps import shown as shown_steps
    from tokenmill.survey import examined

    loaded = load(config, setting)
    folder = RunFolder(loaded.folder)
    with shown_steps() as tell:
        context = Context(loaded, folder, survivors(folder))
        findings = examine(context, tuple(skip or ()), checks=checks_of(loaded), tell=tell)
        if loaded.fleet.cluster != "local":
            findings += examined(loaded, skip or (), tell)
    levels = Counter(finding.level for finding in findings)
    if as_json:
        print_json({"findings": findings, "levels": {name: levels[name] for name in ("ok", "warn", "fail", "unknown")}})
    else:
        for line in shown(findings):
            typer.echo(line)
    raise typer.Exit(3 if levels["fail"] else 0)


@app.command()
def plan(
    config: ConfigFile,
    setting: Set = None,
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", min=1.0, help="Of all servers together, if you know it.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="First start the servers and generate for 90 s; rows and servers are kept for `run`."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what this run will take: servers, requests at once, tokens, hours, disk, and what limits them."""
    from tokenmill.folder import RunFolder
    from tokenmill.plan import build
    from tokenmill.planning.calibration import calibrate
    from tokenmill.planning.page import lines
    from tokenmill.survey import planned

    loaded = load(config, setting)
    if measure:
        calibrate(RunFolder(loaded.folder), config, setting or ())
    if loaded.fleet.cluster == "local":
        found = build(loaded, tokens_per_s=tokens_per_s)
    else:
        found = planned(loaded, tokens_per_s)
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(lines(found)))


app.command()(cli_tune.tune)


@app.command()
def run(
    config: ConfigFile,
    setting: Set = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once generation has begun; `watch` follows.")
    ] = False,
    skip: Skip = None,
    metrics: cli_web.MetricsPort = None,
    retry: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL,…",
            help="Make only the records with these labels (or truncated, rejected, failed) again; "
            "--set generation.max_tokens=… is for these alone.",
            autocompletion=_retry_words,
        ),
    ] = None,
    no_calibrate: Annotated[
        bool, typer.Option("--no-calibrate", help="Do not measure efficiency, the share of the servers' own peak.")
    ] = False,
    detached: Annotated[bool, typer.Option("--detached", hidden=True)] = False,
) -> None:
    """Do the whole job: doctor, stage, launch, generate, gate, report. Started again, it goes on where it was."""
    if no_calibrate:
        setting = [*(setting or ()), "generation.calibrate=false"]
    if detach:
        _detach(config, setting, skip, metrics, retry)
    _run(config, setting, skip, metrics, retry, detached=detached)


app.command()(cli_servers.up)
app.command()(cli_servers.status)
app.command()(cli_servers.logs)
app.command()(cli_servers.down)


@app.command()
def stage(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Not needed to list or to remove.")] = None,
    setting: Set = None,
    wait: Annotated[bool, typer.Option("--wait", help="First follow a download that still grows.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the copies there are; stage nothing.")] = False,
    remove: Annotated[str, typer.Option(metavar="NAME", help="Remove a copy that nobody uses.")] = "",
) -> None:
    """Bring the model near, as `run` would; prints where it is."""
    from tokenmill.stage import command
    from tokenmill.steps import shown

    with shown() as tell:
        for line in command(load(config, setting) if config else None, tell, wait=wait, show=show, remove=remove):
            typer.echo(line)


app.command()(cli_servers.watch)
app.command()(cli_events.events)
app.command()(cli_web.serve)


@app.command()
def inspect(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help=".jsonl, .jsonl.zst, .parquet, a folder, a run folder or its config.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A model folder: its tokenizer and template tell more."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is this dataset worth training on? Exit code 5 where it is not."""
    from tokenmill.inspecting.page import shown
    from tokenmill.inspection import inspect_any
    from tokenmill.steps import shown as shown_steps

    with shown_steps() as tell:
        found = inspect_any(data, model, tell)
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(shown(found)))
    raise typer.Exit(5 if found.verdict == "fail" else 0)


app.command()(cli_export.export)
app.command("vocab-map")(cli_export.vocab_map)
app.command()(cli_export.merge)
app.command()(cli_export.audit)
app.command()(cli_export.report)


# -- beneath the commands ----------------------------------------------------------------------------------------------
def _run(
    path: Path,
    setting: list[str] | None,
    skip: list[str] | None,
    metrics: int | None = None,
    retry: str | None = None,
    *,
    detached: bool = False,
) -> NoReturn:
    """Runs a config in this process and leaves with its exit code."""
    import shlex

    from tokenmill.export import suggestion
    from tokenmill.folder import RunFolder
    from tokenmill.retry import parse
    from tokenmill.run import Order
    from tokenmill.run import run as whole
    from tokenmill.view import View, farewell

    loaded, again = load(path, setting), () if retry is None else parse(retry)
    folder = RunFolder(loaded.folder)
    folder.create()
    words = ["tokenmill", "run", str(path), *(f"--set={value}" for value in setting or ())]
    words += [] if retry is None else [f"--retry={retry}"]
    with View(None if detached else folder.run_log) as view:
        order = Order(loaded, shlex.join(words), tuple(skip or ()), retry=again, metrics_port=metrics)
        code = loop(whole(order, view))
    if (last := folder.status()) is not None:
        for line in farewell(last, folder.path, code, suggestion(folder)):
            say(line)
    raise typer.Exit(code)


def _detach(
    path: Path, setting: list[str] | None, skip: list[str] | None, metrics: int | None, retry: str | None
) -> NoReturn:
    from tokenmill.detach import detach
    from tokenmill.folder import RunFolder

    words = [*(f"--set={value}" for value in setting or ()), *(f"--skip={name}" for name in skip or ())]
    words += [f"--metrics={metrics}"] if metrics else []
    words += [] if retry is None else [f"--retry={retry}"]
    code, told = detach(RunFolder(load(path, setting).folder), path, words)
    for line in told:
        typer.echo(line, err=code != 0)
    raise typer.Exit(code)


ARROW_MEMORY = ("ARROW_DEFAULT_MEMORY_POOL", "system")
"""Arrow's own allocator keeps 20 MB more in a run that was resumed; read when pyarrow is imported."""


def main() -> None:
    """All commands. The one place besides errors.boundary that catches every exception."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_standard_streams()
    os.environ.setdefault(*ARROW_MEMORY)
    try:
        code = app(standalone_mode=False) or 0
    except typer.Exit as leave:
        code = leave.exit_code
    except TokenmillError as error:
        from tokenmill.untrusted import harmless  # an engine's words are in it

        say(f"tokenmill: {harmless(str(error), lines=True)}")
        if error.fix:
            say(f"  fix: {harmless(error.fix)}")
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit:  # click's, where whoever read from our pipe has seen enough
        code = 0
    except Exception as error:  # noqa: BLE001
        code = _usage_or_bug(error)
    sys.exit(code)


def _open_standard_streams() -> None:
    """Cron jobs and daemons may start us without any: the next file or socket would get its number, and our output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # open gives the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _usage_or_bug(error: Exception) -> int:
    if isinstance(error, typer.Abort):
        return 130
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's own, which typer carries a copy of
        error.show()
        return 2
    import traceback

    traceback.print_exception(error)
    say("tokenmill: this is a bug of tokenmill; the run folder is whole, and starting again goes on")
    return 1

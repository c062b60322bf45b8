"""The engine: is it installed, do its parts fit, does it know every flag, and can they be meant together?"""

import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.checks.base import Context, Finding
from tokenmill.checks.needs import check_needs
from tokenmill.checks.traps import check_traps
from tokenmill.core import arguments
from tokenmill.engines.base import normal
from tokenmill.errors import PreflightError
from tokenmill.launch import python_of
from tokenmill.machine import modelfiles
from tokenmill.machine.packages import Package


def check_engine(context: Context) -> Iterator[Finding]:
    """The engine is installed, its needs are met, its flags are known and agree, and no variable thwarts it."""
    config = context.config
    installed = context.package if context.engine.package and not config.engine.command else None
    known = context.engine.flags(installed.sources) if installed else frozenset()
    yield from _own(context, known)
    variable = config.engine.api_key_env
    if variable and not os.environ.get(variable, "").strip():
        words = f"engine.api_key_env = {variable}, and this shell has no such variable, or an empty one"
        yield Finding("engine", "fail", "engine.api_key_env", words, f"export {variable}=…")
    if not config.engine.addresses:
        yield from check_traps(context)
    if installed is not None:
        yield from _installed(context, installed, known)
    yield from _agree(context, known)  # last: it looks into the model's folder, which may lie on a mount that hangs


def _installed(context: Context, installed: Package, known: frozenset[str]) -> Iterator[Finding]:
    """The engine is there, with all that it needs, and knows every flag of the config."""
    python = python_of(context.config)
    if not installed.version:
        words = f"{context.engine.package} is not installed for {python}"
        yield Finding("engine", "fail", python, words, f"{python} -m pip install {context.engine.package}")
        return
    yield Finding("engine", "ok", python, f"{context.engine.package} {installed.version}")
    yield from check_needs(context, installed)
    if not known:
        if context.engine.flag_sources:
            yield Finding("engine", "unknown", python, f"the flags of this {context.engine.package} cannot be read")
        return
    for flag in context.config.engine.args:
        name = normal(flag)
        if not _meant(name, known):
            successor = context.engine.successor(name, known)
            words = f"{context.engine.package} {installed.version} has no flag --{name}"
            fix = f"use {successor}" if successor else f"{python} -m {context.engine.package} --help"
            yield Finding("engine", "fail", f"engine.args.{flag}", words, fix)


def _own(context: Context, known: frozenset[str]) -> Iterator[Finding]:
    """Flags that tokenmill sets itself."""
    for flag in context.config.engine.args:
        # Where the engine's other flags are not known, a beginning may be a whole flag of its own.
        meant = _meant(normal(flag), known | context.engine.own_flags.keys()) if known else normal(flag)
        if decided_by := context.engine.own_flags.get(meant):
            yield Finding("engine", "fail", f"engine.args.{flag}", f"tokenmill sets --{meant} itself: {decided_by}")


def _agree(context: Context, known: frozenset[str]) -> Iterator[Finding]:
    """Flags that cannot be meant together, or not with this model and fleet."""
    config = context.config
    try:
        model = modelfiles.read_json(Path(config.model.path) / "config.json") if config.model.path else {}
    except PreflightError:
        model = {}  # the model check tells
    setting = arguments.Setting(
        known=known,
        hybrid=arguments.is_hybrid({**model, **(model.get("text_config") or {})}),
        gpus_per_server=config.fleet.gpus_per_server,
        has_gpus=config.fleet.gpus != "none",
    )
    args = {normal(name): value for name, value in config.engine.args.items()}
    for found in arguments.contradictions(config.engine.kind, args, setting):
        yield Finding("engine", "fail" if found.ends else "warn", f"engine.args.{found.flag}", found.what, found.fix)


def _meant(name: str, known: frozenset[str]) -> str:
    """The flag that argparse takes it for: whole, the only one that begins so, or (vLLM) a table's before the dot."""
    table = name.partition(".")[0]
    begin_so = [flag for flag in known if flag.startswith(name)]
    if name in known:
        return name
    if len(begin_so) == 1:
        return begin_so[0]
    return table if table in known else ""

"""The engine: is it installed, and does it know every flag?"""

from collections.abc import Iterator

from tokenmill.checks.base import Context, Finding
from tokenmill.engines.base import normal
from tokenmill.launch import python_of


def check_engine(context: Context) -> Iterator[Finding]:
    """The engine is installed in its environment, and knows every flag of the config."""
    config = context.config
    installed = context.package if context.engine.package and not config.engine.command else None
    known = context.engine.flags(installed.sources) if installed else frozenset()
    for flag in config.engine.args:
        meant = _meant(normal(flag), known | context.engine.own_flags.keys())
        if decided_by := context.engine.own_flags.get(meant):
            yield Finding("engine", "fail", f"engine.args.{flag}", f"tokenmill sets --{meant} itself: {decided_by}")
    if installed is None:
        return
    python = python_of(config)
    if not installed.version:
        words = f"{context.engine.package} is not installed for {python}"
        yield Finding("engine", "fail", python, words, f"{python} -m pip install {context.engine.package}")
        return
    yield Finding("engine", "ok", python, f"{context.engine.package} {installed.version}")
    if not known:
        if context.engine.flag_sources:
            yield Finding("engine", "unknown", python, f"the flags of this {context.engine.package} cannot be read")
        return
    for flag in config.engine.args:
        name = normal(flag)
        if not _meant(name, known):
            successor = context.engine.successor(name, known)
            words = f"{context.engine.package} {installed.version} has no flag --{name}"
            fix = f"use {successor}" if successor else f"{python} -m {context.engine.package} --help"
            yield Finding("engine", "fail", f"engine.args.{flag}", words, fix)


def _meant(name: str, known: frozenset[str]) -> str:
    """The flag that argparse takes it for: whole, the only one that begins so, or (vLLM) a table's before the dot."""
    table = name.partition(".")[0]
    begin_so = [flag for flag in known if flag.startswith(name)]
    if name in known:
        return name
    if len(begin_so) == 1:
        return begin_so[0]
    return table if table in known else ""

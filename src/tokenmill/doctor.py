"""All that would make a run fail, before it costs anything. Each check is a small function over one context.

`fail` only where the run could not start, would store wrong data or would fill a disk; all else is `warn`. What cannot
be read is `unknown`, never `ok`. Nothing is changed and no model is loaded.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from tokenmill import plugins, prompts, rows
from tokenmill.config import Config
from tokenmill.core.capacity import servers_for
from tokenmill.engines.base import Engine, normal
from tokenmill.errors import PreflightError, UsageError
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.launch import python_of
from tokenmill.machine import filesystems, gpus, modelfiles, packages, ports, processes
from tokenmill.machine.gpus import Gpu
from tokenmill.machine.packages import Package

Level = Literal["ok", "warn", "fail", "unknown"]

MIN_ROOM = 2 * 10**9
"""Bytes free below which a run is not begun: it would stop within the hour, and a full disk harms other work, too."""

USED_GPU = 2 * 10**9
"""Bytes of GPU memory in use by others that are worth a word: a desktop takes less, a forgotten server more."""


class Finding(msgspec.Struct, frozen=True):
    check: str
    level: Level
    subject: str
    message: str
    fix: str = ""


@dataclass
class Context:
    """What checks look at. Readings are taken once, when first asked for; tests hand in others."""

    config: Config
    folder: RunFolder
    ours: list[ServerEntry]
    read_gpus: Callable[[], list[Gpu]] = gpus.read

    @cached_property
    def engine(self) -> Engine:
        engine: Engine = plugins.load("engines", self.config.engine.kind)()
        return engine

    @cached_property
    def package(self) -> Package:
        engine = self.config.engine
        return packages.read(python_of(self.config), self.engine.package, self.engine.flag_sources, engine.env)

    @cached_property
    def gpus(self) -> list[Gpu]:
        return self.read_gpus()


def examine(context: Context, skip: tuple[str, ...] = ()) -> list[Finding]:
    """All findings, check by check; a check that is skipped leaves none."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        if name in skip:
            continue
        try:
            findings += check(context)
        except (PreflightError, UsageError) as error:
            findings.append(Finding(name, "fail", "", str(error), error.fix))
    return findings


def check_prompts(context: Context) -> Iterator[Finding]:
    """The prompt set can be read and holds a row."""
    path = Path(context.config.prompts.path)
    names = rows.files(path)
    first = next(prompts.rows(path), None)
    if first is None:
        yield Finding("prompts", "fail", str(path), f"{path} holds no row", "one JSON object a line")
    else:
        yield Finding("prompts", "ok", str(path), f"{len(names)} file{'s' if len(names) > 1 else ''}")


def check_model(context: Context) -> Iterator[Finding]:
    """The model's files are whole, and of the kind that the engine loads."""
    path = Path(context.config.model.path)
    if context.config.engine.kind in ("openai", "fake") or not path.is_absolute():
        return
    problems = modelfiles.problems(path)
    for problem in problems:
        yield Finding("model", "fail", str(path), problem, "finish the download, or correct model.path")
    if path.is_file() and context.config.engine.kind not in ("llamacpp",):
        yield Finding("model", "fail", str(path), f"{context.config.engine.kind} needs a model folder, not one file")
    if path.is_dir() and context.config.engine.kind == "llamacpp":
        yield Finding("model", "fail", str(path), "llamacpp needs a .gguf file, not a folder")
    if not problems and context.engine.renders == "ids" and path.is_dir() and not modelfiles.template(path):
        yield Finding("model", "fail", str(path), f"{path} has no chat template", "add its chat_template.jinja")
    if not problems:
        yield Finding("model", "ok", str(path), "its files are whole by name and size")


def check_output(context: Context) -> Iterator[Finding]:
    """The run folder can be written, lies on a local disk, and has room."""
    path = context.folder.path
    place = filesystems.existing(path)
    mount = filesystems.mount_of(place)
    if not os.access(place, os.W_OK):
        yield Finding("output", "fail", str(path), f"{place} cannot be written", "correct output.dir")
    if mount.is_network:
        words = f"{place} lies on {mount.kind}: an append, a sync and a lock do not mean there what they say"
        yield Finding("output", "fail", str(path), words, "set output.dir to a local disk")
    room = filesystems.free_bytes(path)
    if room < MIN_ROOM:
        yield Finding(
            "output", "fail", str(path), f"only {room / 1e9:.1f} GB free", "set output.dir to a disk with room"
        )
    else:
        yield Finding("output", "ok", str(path), f"{room / 1e9:.0f} GB free on {mount.kind}")


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


def check_gpus(context: Context) -> Iterator[Finding]:
    """As many GPUs as asked for are there, and nobody else uses them."""
    fleet = context.config.fleet
    if fleet.gpus == "none" or context.config.engine.addresses:
        return
    chosen = gpus.choose(context.gpus, fleet.gpus)
    if len(chosen) < fleet.gpus_per_server:
        words = f"fleet.gpus_per_server = {fleet.gpus_per_server}, and {len(chosen)} GPUs may be used"
        yield Finding("gpus", "fail", "", words)
    mine = {entry.process.pid for entry in context.ours}
    mine |= {pid for entry in context.ours for pid in processes.members(entry.group, entry.nonce)}
    for gpu in chosen:
        foreign = [pid for pid in gpu.pids if pid not in mine]
        if gpu.memory_used > USED_GPU and not mine.intersection(gpu.pids):
            who = ", ".join(map(processes.describe, foreign)) or "no visible process"
            words = f"{gpu.memory_used / 1e9:.1f} of {gpu.memory_total / 1e9:.1f} GB are in use by {who}"
            yield Finding("gpus", "warn", f"GPU {gpu.index}", words, "nvidia-smi")
    yield Finding("gpus", "ok", "", f"{len(chosen)} × {chosen[0].name}")


def check_ports(context: Context) -> Iterator[Finding]:
    """The servers' first ports are free; one that is not costs a warning, since a server moves."""
    config = context.config
    if config.engine.addresses:
        return
    mine = {entry.port for entry in context.ours}
    count = config.fleet.servers or (1 if config.fleet.gpus == "none" else servers_for(len(context.gpus), 1, 0))
    for port in range(config.fleet.port, config.fleet.port + count):
        if port not in mine and not ports.is_free(port):
            pid = ports.listener(port)
            holder = processes.describe(pid) if pid else "another process"
            yield Finding(
                "ports", "warn", str(port), f"port {port} is taken by {holder}; a server moves to another port"
            )


CHECKS: dict[str, Callable[[Context], Iterator[Finding]]] = {
    "prompts": check_prompts,
    "model": check_model,
    "output": check_output,
    "engine": check_engine,
    "gpus": check_gpus,
    "ports": check_ports,
}


def refuse(findings: list[Finding]) -> None:
    """Raises PreflightError with every `fail`, each with its fix."""
    failures = [finding for finding in findings if finding.level == "fail"]
    if failures:
        words = [f"{f.check}: {f.message}" + (f"\n      fix: {f.fix}" if f.fix else "") for f in failures]
        raise PreflightError("the run cannot start:\n  " + "\n  ".join(words))

"""What a run will take, before it costs anything: servers, requests at once, tokens, hours, disk, and what limits them.

Everything is foretold from the config, the model's files, the cards and the prompts, or measured in the run folder once
there is something in it; what is not known is null, with the reason. Starts nothing and writes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill import launch, plugins, stage
from tokenmill.config import Config
from tokenmill.core.capacity import Forecast, Given, in_flight, tokens_of_one
from tokenmill.core.shape import CACHE_BYTES
from tokenmill.engines.base import Engine
from tokenmill.errors import PreflightError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.formats.base import Format
from tokenmill.machine import filesystems, gpus, nvml
from tokenmill.machine.gpus import Gpu
from tokenmill.planning import advice, lengths
from tokenmill.planning import forecast as foretelling
from tokenmill.planning.advice import Situation
from tokenmill.planning.answer import NodePlan, Plan, Range
from tokenmill.planning.lengths import Lengths
from tokenmill.planning.measured import Measured, measure
from tokenmill.staging import bring

LOW_SHARE = 1 / 8
"""Of max_tokens, that completions are taken to have at least in the mean while none is measured: reasoning models at a
limit of 8,192 were seen at a quarter to a half of it."""

JOURNAL_BYTES, PARQUET_BYTES = 11.2, 4.2
"""Of a token of prompt or output, as a journal line and sealed: English prose and code with ids of five digits,
measured on 331 records of 7,000 characters. Ids are half of the first."""

RECORD_BYTES = 450
"""Of a journal line besides text and ids."""

OPEN_SEGMENTS = 3
"""Journals on the disk at once: one is written, others are being sealed."""

DRAFTER_LAYERS = 5
"""Layers whose hidden states a DFlash drafter reads."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What is asked for: `one` is the mean of a completion's tokens, `prompts` their prompts' lengths."""

    completions: int
    measured: Measured
    prompts: Lengths
    one: Range
    how: str

    @property
    def pending(self) -> int:
        return max(0, self.completions - self.measured.records)

    def to_generate(self) -> Range:
        return Range(round(self.pending * self.one.low), round(self.pending * self.one.high))

    def in_all(self) -> Range:
        """All tokens of the finished run, prompts included."""
        told, left = self.measured.tokens + self.completions * self.prompts.mean, self.to_generate()
        return Range(round(told + left.low), round(told + left.high))


@dataclass(frozen=True, slots=True)
class _Machine:
    """What one machine would run."""

    engine: Engine
    cards: Sequence[Gpu]
    servers: int
    given: Given
    found: Forecast
    running: int
    limit: str


def _machine(config: Config, cards: Sequence[Gpu] | None, notes: list[str]) -> _Machine:
    """Raises PreflightError where the cards are not as the config asks."""
    engine: Engine = plugins.load("engines", config.engine.kind)()
    chosen = gpus.choose(nvml.read() if cards is None else cards, config.gpus) if config.gpus != "none" else None
    places = launch.places(config, chosen)
    known = foretelling.given(config, chosen, _version(config, engine, notes))
    found = foretelling.forecast(engine, known)
    running, limit = in_flight(found.limits, known.asked, tokens_of_one(known.max_tokens, found.context))
    notes += [words for words in (found.trouble, found.doubt) if words]
    if known.shape is None and engine.package and not Path(config.model.path).is_file():
        notes.append(f"the model's config.json cannot be read at {config.model.path}: its memory is not counted")
    return _Machine(engine, chosen or (), len(places), known, found, running, limit)


def of_node(config: Config, node: str) -> NodePlan:
    """This machine's part of a cluster's plan."""
    notes: list[str] = []
    try:
        own = _machine(config, None, notes)
    except PreflightError as error:
        return NodePlan(node, trouble=str(error))
    return NodePlan(
        node=node,
        servers=own.servers,
        running_per_server=own.running,
        limited_by=own.limit,
        context=own.found.context,
        kv_tokens_per_server=own.found.limits.kv_tokens,
        cards=gpus.counted(own.cards),
        changes=tuple(advice.changes(_situation(config, own))),
        notes=tuple(notes),
    )


def _situation(
    config: Config, own: _Machine, prompts: Lengths | None = None, disk: dict[str, int] | None = None
) -> Situation:
    needed = disk or {}
    return Situation(
        config=config,
        engine=own.engine,
        given=own.given,
        forecast=own.found,
        running=own.running,
        servers=own.servers,
        cards=len(own.cards),
        prompts=prompts,
        disk_needed=needed.get("journal", 0) + needed.get("parquet", 0),
        disk_free=filesystems.free_bytes(config.folder),
    )


def build(
    config: Config,
    cards: Sequence[Gpu] | None = None,
    tokens_per_s: float | None = None,
    nodes: Sequence[NodePlan] = (),
) -> Plan:
    """`cards` are the machine's GPUs, read where the run uses some and they are not given; `tokens_per_s` is of all
    servers together, if it is known; `nodes` are a cluster's machines, which then count in this one's place. Raises
    PreflightError where the cards are not as the config asks.
    """
    notes: list[str] = []
    able = [node for node in nodes if not node.trouble]
    if nodes and not able:
        raise PreflightError(f"no machine of the cluster can have a node; {nodes[0].node}: {nodes[0].trouble}")
    here = config.model_copy(update={"fleet": config.fleet.model_copy(update={"gpus": "none"})}) if able else config
    own = _machine(here, cards, [] if able else notes)
    if able:
        own = _of_all(own, able)
        notes += [f"node {node.node}: {node.trouble}" for node in nodes if node.trouble]
        notes += dict.fromkeys(words for node in able for words in node.notes)
    work = _work(config, own.found, own.running * own.servers, notes)
    rate, hours_from = _rate(work, tokens_per_s)
    disk = _disk(config, own.engine, work, notes)
    situation = _situation(config, own, work.prompts if work else None, disk)
    tokens = work.to_generate() if work else None
    shape = own.given.shape
    return Plan(
        servers=own.servers,
        running_per_server=own.running,
        limited_by=own.limit,
        waiting_per_server=max(0, (own.given.asked or 0) - own.running),
        tokens=tokens,
        hours=_hours(tokens, rate),
        disk_bytes=disk,
        lost_with_the_machine_s=advice.lost_with_the_machine_s(config),
        changes=list(dict.fromkeys(words for node in able for words in node.changes)) or advice.changes(situation),
        completions=work.completions if work else 0,
        pending=work.pending if work else 0,
        tokens_from=work.how if work else "no prompts can be read",
        hours_from=hours_from,
        prompt_tokens=_percentiles(work.prompts) if work else None,
        prompt_tokens_from=work.prompts.how if work else "",
        context=own.found.context,
        kv_tokens_per_server=own.found.limits.kv_tokens,
        disk_free_bytes=situation.disk_free,
        hidden_states_bytes=_hidden_states(shape.hidden, work) if work and shape else None,
        notes=notes,
        nodes=tuple(nodes),
    )


def _of_all(own: _Machine, nodes: Sequence[NodePlan]) -> _Machine:
    """The nodes in place of this machine, which may have no card: all their servers, the mean of what each runs, and
    the least context and cache."""
    servers = sum(node.servers for node in nodes)
    running = sum(node.servers * node.running_per_server for node in nodes) // max(servers, 1)
    least = min(nodes, key=lambda node: node.running_per_server)
    contexts = [node.context for node in nodes if node.context is not None]
    limits = replace(own.found.limits, kv_tokens=least.kv_tokens_per_server)
    found = replace(own.found, context=min(contexts, default=None), limits=limits)
    return replace(own, servers=servers, running=running, limit=least.limited_by, found=found)


def _version(config: Config, engine: Engine, notes: list[str]) -> str:
    try:
        return launch.engine_version(config, engine)
    except PreflightError as error:
        notes.append(f"{error}; so its version is not known")
        return ""


# -- tokens and hours --------------------------------------------------------------------------------------------------
def _work(config: Config, found: Forecast, in_flight_now: int, notes: list[str]) -> _Work | None:
    generation, path = config.generation, Path(config.model.path)
    try:
        sample = lengths.sample(Path(config.prompts.path), config.prompts.limit)
    except UsageError as error:
        notes.append(f"tokens, hours and disk are not known: {error}")
        return None
    known = path if config.model.path and path.exists() else None
    every_turn = generation.turns == "all"
    told = lengths.measure(sample, known, thinking=generation.thinking, every_turn=every_turn)
    most = generation.max_tokens
    if found.context is not None:
        most = max(1, min(most, found.context - found.reserve - round(told.mean)))
    done = measure(RunFolder(config.folder), most=most, in_flight=in_flight_now)
    completions = -(-sample.total // int(config.prompts.shard.partition("/")[2])) * generation.samples
    if every_turn:
        completions = round(completions * lengths.mean_turns(sample))
    if done.mean is not None:
        how = f"measured on {done.completions:,} completions of this run"
        return _Work(completions, done, told, Range(*done.mean), how)
    few = f"only {done.completions} are measured yet" if done.completions else "none is measured yet"
    how = f"{few}: taken to be between an eighth of max_tokens and all of {most:,}"
    return _Work(completions, done, told, Range(most * LOW_SHARE, most), how)


def _rate(work: _Work | None, tokens_per_s: float | None) -> tuple[Range | None, str]:
    if tokens_per_s is not None and not math.isfinite(tokens_per_s):
        raise UsageError(f"--tokens-per-s {tokens_per_s}: must be a number of tokens")
    if tokens_per_s:
        return Range(tokens_per_s, tokens_per_s), f"at {tokens_per_s:,.0f} tokens/s, as given"
    if work is None:
        return None, "no prompts can be read"
    if work.measured.rate is None:
        return (
            None,
            "no rate is known: this run has not generated for a minute yet; --calibrate or --tokens-per-s tells",
        )
    low, high = work.measured.rate
    shown = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    return Range(low, high), f"at {shown} tokens/s, measured in this run"


def _hours(tokens: Range | None, rate: Range | None) -> Range | None:
    if tokens is None or rate is None:
        return None
    return Range(round(tokens.low / rate.high / 3600, 2), round(tokens.high / rate.low / 3600, 2))


def _percentiles(told: Lengths) -> dict[str, int]:
    return {f"p{percent}": told.percentile(percent) for percent in (1, 50, 99)}


def _hidden_states(hidden: int, work: _Work) -> Range:
    """Storing what a drafter reads of every token, as some trainers ask for it."""
    each, tokens = hidden * CACHE_BYTES * DRAFTER_LAYERS, work.in_all()
    return Range(each * int(tokens.low), each * int(tokens.high))


# -- disk --------------------------------------------------------------------------------------------------------------
def _disk(config: Config, engine: Engine, work: _Work | None, notes: list[str]) -> dict[str, int]:
    """At most, for the whole run: journals that are open at once, the sealed set, each export, the staged model."""
    found = _staging(config, engine, notes)
    if work is None:
        return found
    tokens = work.in_all().high
    journals = round(tokens * JOURNAL_BYTES) + work.completions * RECORD_BYTES
    found["journal"] = min(journals, OPEN_SEGMENTS * config.output.segment)
    found["parquet"] = round(tokens * PARQUET_BYTES)
    for name in plugins.names("formats"):
        form: type[Format] = plugins.load("formats", name)
        found[f"export_{name}"] = round(tokens * form.bytes_a_token)
    return found


def _staging(config: Config, engine: Engine, notes: list[str]) -> dict[str, int]:
    source = Path(config.model.path)
    if not config.model.path or not engine.loads:
        return {"ram_disk": 0}
    if not source.exists():
        notes.append(f"{source} is not here: what staging takes is not counted")
        return {"ram_disk": 0}
    try:
        place = stage.decide(config, source, *bring.named(source)).place
        root = place.root if place else None
    except PreflightError as error:  # a plan tells what is needed, also where there is no room for it
        notes.append(str(error))
        root = Path(config.stage.to)
    if root is None:
        return {"ram_disk": 0}
    size = filesystems.size_of(source)
    return {"ram_disk": size} if filesystems.mount_of(root).is_ram else {"ram_disk": 0, "staged_model": size}

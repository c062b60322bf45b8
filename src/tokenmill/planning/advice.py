"""The changes to a config that would help a run most, each with what it brings: judged by foretelling again with it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokenmill.config import Config
from tokenmill.core.capacity import Forecast, Given, in_flight, tokens_of_one
from tokenmill.engines.base import Engine, normal
from tokenmill.planning import forecast as foretelling
from tokenmill.planning.lengths import Lengths

SHOWN = 3

FATAL, LOSING, CUTTING = 1e9, 1.05, 1.2
"""Weights beside those of changes that make a run so many times as fast: it would not end; it could lose all; the
longest completions are cut short."""


WORTH = 1.1
"""Times as many requests at once that make a change worth telling."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plan has found: `running` requests at once on each of `servers`; `cards` may be used."""

    config: Config
    engine: Engine
    given: Given
    forecast: Forecast
    running: int
    servers: int
    cards: int
    prompts: Lengths | None
    disk_needed: int
    disk_free: int


@dataclass(frozen=True, slots=True)
class Change:
    """`weight` orders changes: how many times as much runs at once, or one of the weights above."""

    weight: float
    words: str


def changes(found: Situation) -> list[str]:
    """The best three at most, as sentences: the key of the config, and the effect."""
    every = [*_disk(found), *_cards(found), *_concurrency(found), *levers(found), *_context(found), *_copy(found)]
    return [change.words for change in sorted(every, key=lambda change: -change.weight)[:SHOWN]]


def levers(found: Situation) -> Iterator[Change]:
    """Flags of the engine that let it run more at once; those that would not start, or bring nothing, are left out."""
    for lever in found.forecast.levers:
        known = replace(found.given, args={**found.given.args, **lever})
        then = foretelling.forecast(found.engine, known)
        count, _ = in_flight(then.limits, known.asked, tokens_of_one(known.max_tokens, then.context))
        if then.trouble or then.doubt or count < found.running * WORTH:
            continue
        flags = " and ".join(f"engine.args.{name} = {_toml(value)}" for name, value in lever.items())
        words = f"{flags}: {count:,} requests at once per server instead of {found.running:,}"
        if any(normal(name) in found.engine.content_args for name in lever):
            words += "; it changes what the model writes, so it is for a new run"
        yield Change(count / found.running, words)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _concurrency(found: Situation) -> Iterator[Change]:
    asked = found.given.asked
    if asked is None or asked > found.running:
        return
    own, _ = in_flight(found.forecast.limits, None, tokens_of_one(found.given.max_tokens, found.forecast.context))
    if own > found.running:
        words = f'generation.concurrency = "auto": {own:,} requests at once per server instead of {found.running:,}'
        yield Change(own / found.running, words)


def _cards(found: Situation) -> Iterator[Change]:
    could = found.cards // found.config.fleet.gpus_per_server
    if found.servers < could:
        words = f"fleet.servers = 0: a server on each GPU, {could} instead of {found.servers}"
        yield Change(could / found.servers, words)


def _disk(found: Situation) -> Iterator[Change]:
    if found.disk_needed > found.disk_free:
        need, free = (f"{count / 1e9:,.0f} GB" for count in (found.disk_needed, found.disk_free))
        yield Change(FATAL, f"output.dir on a larger disk: the run may take {need}, {free} are free")


def _context(found: Situation) -> Iterator[Change]:
    """A context that leaves the longest prompts fewer than max_tokens."""
    context, flag, wanted = found.forecast.context, found.forecast.context_flag, found.given.max_tokens
    if context is None or found.prompts is None or not found.prompts.tokens or not flag:
        return
    long = found.prompts.percentile(99)
    need = long + wanted + found.forecast.reserve
    most = found.given.shape.context if found.given.shape else None
    if need > context and (most is None or need <= most):
        left = max(0, context - found.forecast.reserve - long)
        words = f"engine.args.{flag} = {need}: all of max_tokens {wanted:,} for a prompt of {long:,} tokens (p99)"
        yield Change(CUTTING, f"{words}, which leaves {left:,} now")


def _copy(found: Situation) -> Iterator[Change]:
    every = dict(found.config.output).get("copy_every")
    if every and lost_with_the_machine_s(found.config) is None:
        cost = f"losing the machine then costs {every / 60:.0f} min of work instead of all"
        yield Change(LOSING, f"output.copy_to = a folder that outlives the machine: {cost}")


def lost_with_the_machine_s(config: Config) -> float | None:
    """Seconds of work that a lost machine costs at most; None where nothing is copied from it, so that all is lost."""
    output = dict(config.output)
    return float(output["copy_every"]) if output.get("copy_to") else None

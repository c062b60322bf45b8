"""Capacity: what the engine will really run at once against what is asked for; prompts and max_tokens against the
context.
"""

from collections.abc import Iterator
from pathlib import Path

from tokenmill.checks.base import Context, Finding, Level
from tokenmill.core.capacity import Forecast, Given, in_flight, tokens_of_one
from tokenmill.errors import PreflightError, UsageError
from tokenmill.machine import gpus
from tokenmill.machine.gpus import Gpu
from tokenmill.planning import advice, lengths
from tokenmill.planning import forecast as foretelling
from tokenmill.planning.advice import Situation
from tokenmill.planning.lengths import Lengths

NAME = "capacity"

ENOUGH = 0.5
"""Of max_tokens, left to a long prompt: it is cut to what the context leaves anyway, and few completions need all."""


def check_capacity(context: Context) -> Iterator[Finding]:
    """As many requests run at once as are asked for, and prompts with their completions fit the context."""
    config = context.config
    known = foretelling.given(config, _cards(context), _version(context))
    found = foretelling.forecast(context.engine, known)
    if found.trouble:
        yield Finding(NAME, "fail", "engine.args", found.trouble, "raise it, or leave it out")
        return
    if found.doubt:
        yield Finding(NAME, "warn", "engine.args", found.doubt, "tokenmill plan CONFIG   shows what each setting takes")
    yield from _concurrency(context, known, found)
    if found.context is not None:
        yield from _lengths(context, found, found.context)


def _cards(context: Context) -> list[Gpu] | None:
    """None where there are none, or none that can be read: the check of the GPUs says so."""
    asked = context.config.gpus
    if asked == "none":
        return None
    try:
        return gpus.choose(context.gpus, asked)
    except PreflightError:
        return None


def _version(context: Context) -> str:
    if not context.engine.package or context.config.engine.command:
        return ""
    try:
        return context.package.version
    except PreflightError:
        return ""  # the check of the engine says so


def _concurrency(context: Context, known: Given, found: Forecast) -> Iterator[Finding]:
    tokens = tokens_of_one(known.max_tokens, found.context)
    running, limit = in_flight(found.limits, known.asked, tokens)
    situation = Situation(context.config, context.engine, known, found, running, 1, 0, None, 0, 0)
    better = max(advice.levers(situation), key=lambda change: change.weight, default=None)
    if running == 1 and known.asked is None and better is not None:
        words = f"one request at a time per server: {limit} allows no more"
        yield Finding(NAME, "warn", "generation.concurrency", words, better.words)
    elif known.asked is None or running >= known.asked:
        if found.limits.running or found.limits.good:
            yield Finding(NAME, "ok", "", f"{running:,} requests at once per server, limited by {limit}")
    else:
        words = (
            f"{known.asked:,} requests at once per server are asked for, {running:,} will run: {limit} allows no more"
        )
        fix = better.words if better else f"generation.concurrency = {running}"
        yield Finding(NAME, "warn", "generation.concurrency", words, fix)


def _lengths(context: Context, found: Forecast, room: int) -> Iterator[Finding]:
    wanted, reserve = context.config.generation.max_tokens, found.reserve
    told = _prompts(context)
    kept = f" ({reserve} of it are kept for drafts)" if reserve else ""
    flag = found.context_flag
    if told is None or not told.tokens:
        if wanted + reserve >= room:
            words = f"max_tokens {wanted:,} leaves no room for a prompt in the context of {room:,}{kept}"
            yield Finding(NAME, "warn", "generation.max_tokens", words, _raise(flag))
        return
    over = sum(tokens + reserve >= room for tokens in told.tokens)
    cut = sum(tokens + wanted + reserve > room for tokens in told.tokens) - over
    of = f"of {len(told.tokens):,} sampled prompts ({told.how})"
    if over:
        words = f"{over:,} {of} do not fit the context of {room:,}{kept}: they will be failed records, prompt_too_long"
        yield Finding(NAME, "warn", "prompts", words, _raise(flag))
    if cut:
        long = told.percentile(99)
        left = max(0, room - reserve - long)
        words = (
            f"{cut:,} {of} leave less than max_tokens {wanted:,} in the context of {room:,}{kept}; "
            f"a long one of {long:,} leaves {left:,}"
        )
        level: Level = "warn" if left < ENOUGH * wanted else "ok"
        yield Finding(NAME, level, "generation.max_tokens", words, _raise(flag, long + wanted + reserve))


def _raise(flag: str, to: int = 0) -> str:
    if not flag:
        return "a larger context, or a smaller generation.max_tokens"
    return f"engine.args.{flag}{f' = {to}' if to else ''}, or a smaller generation.max_tokens"


def _prompts(context: Context) -> Lengths | None:
    prompts, model = context.config.prompts, Path(context.config.model.path)
    try:
        sample = lengths.glance(Path(prompts.path), prompts.limit)
    except UsageError:
        return None  # the check of the prompts says so
    return lengths.measure(sample, model if model.exists() else None, thinking=context.config.generation.thinking)

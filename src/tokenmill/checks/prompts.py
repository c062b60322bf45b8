"""The prompt set: can it be read, how many rows does it hold, which are bad or doubled, how long are they?"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill import prompts, render, rows
from tokenmill.checks.base import Context, Finding
from tokenmill.errors import BadPromptError, PluginError, PreflightError, boundary

SAMPLE = 512
"""Rows that are rendered and tokenized: percentiles to a few percent, in half a second."""

SAMPLE_SEED = 20240229
"""The same rows at every call: a figure that changes by itself is no figure."""

MANY_BAD = 0.05
"""The gate's own limit (gate.max_failed): more bad rows than this would be worth a look at the set."""

COUNTED_BYTES = 8 << 30
"""Of sets larger than this only the beginning is read, so that the check ends in time."""


def check_prompts(context: Context) -> Iterator[Finding]:
    """The prompt set can be read and holds rows, most of them good, none of them twice."""
    path = Path(context.config.prompts.path)
    files = rows.files(path)
    if next(prompts.rows(path), None) is None:
        yield Finding("prompts", "fail", str(path), f"{path} holds no row", "one JSON object a line")
        return
    where = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    if not context.thorough:
        yield Finding("prompts", "ok", str(path), where)
        return
    size = sum(file.stat().st_size for file in files)
    if size > COUNTED_BYTES:
        yield Finding("prompts", "unknown", str(path), f"{size / 1e9:.0f} GB of prompts are not counted here")
        return
    every_turn = context.config.generation.turns == "all"
    index = prompts.scan(path, context.config.prompts.limit, every_turn=every_turn)
    count = len(index)
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[random.Random(SAMPLE_SEED).sample(range(count), min(SAMPLE, count))] = True
    good, bad = _read(path, chosen)
    values = {"rows": count, "bytes": size}
    words = f"{count:,} rows in {where}"
    if index.turns is not None:
        values["turns"] = int(index.turns.sum())
        words += f", {values['turns']:,} turns to write"
    yield Finding("prompts", "ok", str(path), words, values=values)
    yield from _bad(path, bad, int(chosen.sum()))
    yield from _doubled(path, index)
    yield from _lengths(context, path, good)


def _read(path: Path, chosen: rows.Mask) -> tuple[list[tuple[msgspec.Raw, msgspec.Raw]], dict[str, str]]:
    """The sampled rows as messages and tools, and the others by place with what is wrong with them."""
    good, bad = [], {}
    for raw in prompts.rows(path, chosen):
        try:
            good.append(prompts.messages(raw.data))
        except BadPromptError as error:
            bad[raw.place] = str(error)
    return good, bad


def _bad(path: Path, bad: dict[str, str], looked_at: int) -> Iterator[Finding]:
    if not bad:
        return
    place, why = next(iter(bad.items()))
    words = f"{len(bad)} of {looked_at} rows cannot be used, such as {place}: {why}"
    values = {"bad": len(bad), "looked_at": looked_at, "reasons": dict(Counter(bad.values()).most_common(5))}
    if len(bad) == looked_at:
        fix = 'a row is {"prompt": …}, {"messages": […]}, {"conversations": […]} or a line of OpenAI\'s batch form'
        yield Finding("prompts", "fail", str(path), words, fix, values)
    else:
        share = "more than the gate lets pass" if len(bad) > MANY_BAD * looked_at else "they become failed records"
        yield Finding("prompts", "warn", str(path), f"{words} ({share})", values=values)


def _doubled(path: Path, index: prompts.Index) -> Iterator[Finding]:
    """Equal contents, and ids that several rows have."""
    repeats = int(index.repeats_content().sum())
    if repeats:
        words = f"{repeats:,} of {len(index):,} rows have the content of an earlier row"
        yield Finding("prompts", "warn", str(path), words, "prompts.dedup = true", {"repeats": repeats})
    elif index.duplicate_count:
        words = f"{index.duplicate_count:,} rows have an id that an earlier row has: {index.duplicates[0]}"
        yield Finding("prompts", "warn", str(path), words, values={"duplicate_ids": index.duplicate_count})


def _lengths(context: Context, path: Path, good: list[tuple[msgspec.Raw, msgspec.Raw]]) -> Iterator[Finding]:
    """Token lengths of the rendered prompts, by the model's own tokenizer."""
    model = Path(context.config.model.path)
    if not good or not (model / "tokenizer.json").is_file():
        return
    try:
        counts = sorted(_tokens(model, good, context.config.generation.thinking))
    except (PluginError, PreflightError) as error:
        yield Finding("prompts", "unknown", str(path), f"prompts cannot be counted in tokens: {error}")
        return
    if counts:
        p50, p90, p99 = (counts[min(len(counts) - 1, len(counts) * part // 100)] for part in (50, 90, 99))
        words = f"tokens of a prompt: {p50} (half), {p90} (90 %), {p99} (99 %), {counts[-1]} (longest of {len(counts)})"
        values = {"p50": p50, "p90": p90, "p99": p99, "longest": counts[-1], "sample": len(counts)}
        yield Finding("prompts", "ok", str(path), words, values=values)


def _tokens(model: Path, good: list[tuple[msgspec.Raw, msgspec.Raw]], thinking: bool) -> Iterator[int]:
    with boundary(f"counting the tokens of prompts with {model}"):
        tokenizer: Any = render.load_tokenizer(model)
        for messages, tools in good:
            text = tokenizer.apply_chat_template(
                msgspec.json.decode(messages),
                tools=msgspec.json.decode(tools),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
            yield len(tokenizer(text, add_special_tokens=False)["input_ids"])

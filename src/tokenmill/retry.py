"""Second chances: `run --retry LABEL,…` asks once more for what was judged so. The older records stay, superseded.

A retry has a number, and a row of its own in settings.jsonl that its records name: so the store alone tells what a
killed retry has made already. The same command, given again, goes on with it; once it has ended, it begins another one.
"""

import shlex
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, get_args

import msgspec

from tokenmill import settings
from tokenmill.config import Config
from tokenmill.core.judge import GROUPS, Verdict
from tokenmill.core.records import Label
from tokenmill.engines.base import Sampling
from tokenmill.errors import UsageError
from tokenmill.settings import Settings

VERDICTS = (Verdict.REJECTED.value, Verdict.FAILED.value)
"""Words for all records of a verdict."""

NEVER_ASKED: frozenset[str] = frozenset({"broken_off"})
"""Turns that nothing was generated for: they follow by themselves once the turn before them is good."""

WORDS = (*(label for label in get_args(Label) if label not in NEVER_ASKED), *GROUPS, *VERDICTS)
"""All that --retry takes."""


@dataclass(frozen=True, slots=True)
class Retry:
    """`words` are labels and verdicts, `made` the settings of the records that it has made already."""

    number: int
    words: frozenset[str]
    made: frozenset[str]

    def wants(self, made_with: str, verdict: Verdict, labels: Collection[str]) -> bool:
        """Whether a record, by its settings, verdict and labels, is to be made again."""
        if made_with in self.made or not NEVER_ASKED.isdisjoint(labels):
            return False
        return verdict.value in self.words or not self.words.isdisjoint(labels)


def parse(text: str) -> tuple[str, ...]:
    """The words of --retry, groups written out; raises UsageError for one that is not known, or none at all."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := sorted({*words} - {*WORDS}):
        raise UsageError(f"--retry: no label named {', '.join(unknown)}", fix=f"one of: {', '.join(sorted(WORDS))}")
    if not words:
        raise UsageError("--retry names no label", fix="--retry truncated,empty_reasoning")
    return tuple(sorted({label for word in words for label in GROUPS.get(word, {word})}))


def of_run(run: Config, asked: Config) -> Config:
    """The run's own config, in which a retry that is asked for as `asked` leaves what it was made with and judges by
    the rules of now. Raises UsageError where that would ask for other prompts than the run was asked for."""
    for name in ("prompts.limit", "prompts.shard", "generation.samples"):
        section, key = name.split(".")
        was, now = (getattr(getattr(config, section), key) for config in (run, asked))
        if was != now:
            raise UsageError(
                f"a retry asks again for what the run was asked for: {name} was {was!r}, is {now!r}",
                fix=f"leave {name} as it was, or `run` without --retry first",
            )
    return run.model_copy(update={"judge": asked.judge})


def begin(row: Settings, words: tuple[str, ...], recorded: list[Settings]) -> tuple[Settings, Retry]:
    """The retry's own settings, and itself: the last one where that was cut short and is asked for again, else a new
    one. `row` are the settings of this start."""
    last, number = _last(recorded), 1
    if last is not None:
        is_same = not last.ended and (last.labels, last.content) == (words, row.content)
        number = last.retry if is_same else last.retry + 1
    own = settings.for_retry(row, number, words)
    made = frozenset({own.id, *(old.id for old in recorded if old.retry == number)})
    return own, Retry(number, frozenset(words), made)


def is_in_vain(row: Settings, recorded: list[Settings]) -> bool:
    """Whether what decides what the model writes is as it was, and nothing is left to chance."""
    is_fixed = row.content["seed"] is not None or row.content["sampling"].get("temperature") == 0
    return is_fixed and any(old.content == row.content for old in recorded if old.retry != row.retry)


def unfinished(recorded: list[Settings]) -> Settings | None:
    """The settings of the last retry, where it was cut short."""
    last = _last(recorded)
    return None if last is None or last.ended else last


def _last(recorded: list[Settings]) -> Settings | None:
    return max((row for row in recorded if row.retry), key=lambda row: row.retry, default=None)


def flags(row: Settings, recorded: list[Settings]) -> str:
    """What is to be given to `run` to go on with a retry: labels, and the sampling that is not the run's own."""
    base: dict[str, Any] = next((old.content for old in recorded if not old.retry), {})
    wanted = {**row.content["sampling"], "seed": row.content["seed"]}
    own = {**base.get("sampling", {}), "seed": base.get("seed")}
    changed = {name: value for name, value in wanted.items() if value != own.get(name) and value is not None}
    plain = {field.name for field in fields(Sampling)} | {"seed"}
    keys = {name: name if name in plain else f"extra.{name}" for name in changed}
    given = (shlex.quote(f"generation.{keys[name]}={_toml(value)}") for name, value in changed.items())
    return " ".join([f"--retry {','.join(row.labels)}", *(f"--set {words}" for words in given)])


def _toml(value: Any) -> str:
    """A value in a line, as --set reads it. (tomli_w writes tables and long lists over several.)"""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(name)} = {_toml(own)}' for name, own in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return msgspec.json.encode(value).decode()  # texts, numbers and booleans are written as in JSON

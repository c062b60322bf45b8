"""Are these runs the shards of one dataset? What differs, what is missing; and the proof, by every key that is stored.

Reads the run folders alone: the prompt set may be on another machine. Nothing is written.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import asked, dataset, settings, store
from tokenmill.asked import Asked
from tokenmill.config import Config
from tokenmill.configfile import load
from tokenmill.core.rendering import differences
from tokenmill.errors import GuardError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.prompts import key_hash
from tokenmill.settings import Settings

SHOWN = 3
"""Names in a message: enough to look them up."""

AGAIN = "start it once more: it goes on where it is"


@dataclass(frozen=True, slots=True)
class Shard:
    """One run, opened: what it was asked for, how, and its files, the oldest first."""

    folder: RunFolder
    config: Config
    asked: Asked
    settings: tuple[Settings, ...]
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        return f"{self.folder.path} (shard {self.asked.shard[0]}/{self.asked.shard[1]})"

    @property
    def own(self) -> Settings | None:
        """What the run itself was made with; None where it has no record."""
        return next((row for row in reversed(self.settings) if not row.retry), None)


@dataclass(slots=True)
class Stored:
    """What the shards hold: rows of each, superseded ones included, and all keys' hashes."""

    rows: list[int] = field(default_factory=list)
    superseded: list[int] = field(default_factory=list)
    keys: list[npt.NDArray[np.uint64]] = field(default_factory=list)


def opened(folder: RunFolder) -> Shard:
    """A run that nobody may write to meanwhile; raises UsageError where it does not say what it was asked for."""
    if not folder.config.is_file():
        raise UsageError(f"{folder.path} has no config.toml", fix=AGAIN)
    found = asked.read(folder.data)
    if found is None:
        lacks = f"no {folder.data / 'prompts.json'}"
        raise UsageError(f"{folder.path} does not say what it was asked for: {lacks}", fix=AGAIN)
    for journal in store.journals(folder.data):
        store.wait_for_sealer(journal)
    parts = store.parts(folder.data)
    unsealed = [journal for journal in store.journals(folder.data) if store.part_of(journal) not in parts]
    files = tuple(sorted((*parts, *unsealed), key=store.number_of))
    rows = tuple(settings.read(folder.data))
    if all(row.retry for row in rows) and any(True for _ in dataset.ids(folder.data)):
        lost = f"{folder.data / 'settings.jsonl'} is lost or damaged"
        raise GuardError(
            f"{lost}: it does not say what the records were made with",
            fix="bring that file back, or begin that shard anew",
        )
    return Shard(folder, load(folder.config), found, rows, files)


# -- alike? ------------------------------------------------------------------------------------------------------------
def compare(shards: Sequence[Shard]) -> list[str]:
    """What differs and may; raises GuardError for what would mix two datasets."""
    first = shards[0]
    grave = [
        line
        for other in shards[1:]
        for line in (*_differences(_grave(first, other), first, other), *_rendered_otherwise(first, other))
    ]
    if grave:
        raise GuardError(
            "these runs would make no one dataset:\n  " + "\n  ".join(grave),
            fix="merge runs of one prompt set that were made alike",
        )
    return [line for other in shards[1:] for line in _differences(_light(first, other), first, other)]


Pairs = Iterator[tuple[str, Any, Any]]
"""A thing's name, and what it is in one run and in another."""


def _differences(pairs: Pairs, first: Shard, other: Shard) -> Iterator[str]:
    for what, one, two in pairs:
        if one != two:
            yield f"{what}: {one!r} in {first.folder.path}, {two!r} in {other.folder.path}"


def _grave(first: Shard, other: Shard) -> Pairs:
    yield "shards", first.asked.shard[1], other.asked.shard[1]
    yield "rows of the prompt set", first.asked.rows, other.asked.rows
    yield "prompt set, hash of its keys and content", first.asked.content, other.asked.content
    yield "generation.samples", first.asked.samples, other.asked.samples
    yield "generation.turns", first.config.generation.turns, other.config.generation.turns
    yield "prompts.dedup", first.config.prompts.dedup, other.config.prompts.dedup
    one, two = first.own, other.own
    if one is None or two is None:
        return  # a shard without a single prompt was made with nothing
    yield "engine", one.engine, two.engine
    left, right = _flat(one.content), _flat(two.content)
    for name in sorted({*left, *right}):
        is_unknown = name == "model_fingerprint" and not (left.get(name) and right.get(name))
        if not is_unknown:
            yield name, left.get(name), right.get(name)


def _rendered_otherwise(first: Shard, other: Shard) -> Iterator[str]:
    """Template, tokenizer and the first prompt, as a run is held to them when it goes on."""
    one, two = first.own, other.own
    for found in differences(one.rendering, two.rendering) if one is not None and two is not None else ():
        if not found.dated:
            yield f"from {first.folder.path} to {other.folder.path}: {found.text}"


def _light(first: Shard, other: Shard) -> Pairs:
    """The verdict is computed from what is stored, so [judge] decides nothing yet: the first run's goes into the merged
    one. Versions and flags of throughput may change within a run as well."""
    left, right = first.config.judge.model_dump(), other.config.judge.model_dump()
    yield from ((f"judge.{name}", value, right[name]) for name, value in left.items())
    one, two = first.own, other.own
    if one is not None and two is not None:
        yield f"version of {one.engine}", one.engine_version, two.engine_version
        for name in sorted({*one.args, *two.args}):
            yield f"engine.args.{name}", one.args.get(name), two.args.get(name)
    yield "retries", _retries(first), _retries(other)


def _retries(shard: Shard) -> list[str]:
    return [settings.title(row).partition(", ")[2] for row in shard.settings if row.retry]


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """One level of tables written out, so that a message names what differs and no more."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat |= {f"{name}.{part}": found for part, found in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def check_numbers(shards: Sequence[Shard]) -> None:
    """Raises UsageError unless each of the n shards is there exactly once."""
    of = shards[0].asked.shard[1]
    by_number: dict[int, list[Path]] = defaultdict(list)
    for shard in shards:
        by_number[shard.asked.shard[0]].append(shard.folder.path)
    doubled = [
        f"shard {number}/{of} is given {len(paths)} times: {', '.join(map(str, paths))}"
        for number, paths in sorted(by_number.items())
        if len(paths) > 1
    ]
    if doubled:
        raise UsageError("; ".join(doubled), fix="name one run of each shard")
    missing = [f"{number}/{of}" for number in islice((n for n in range(of) if n not in by_number), SHOWN + 1)]
    if missing:
        more = f" and {of - len(by_number) - SHOWN} more" if len(missing) > SHOWN else ""
        raise UsageError(
            f"{of - len(by_number)} of {of} shards are missing: {', '.join(missing[:SHOWN])}{more}",
            fix="name one run of each shard",
        )


# -- every key once? ---------------------------------------------------------------------------------------------------
def prove(shards: Sequence[Shard], told: Callable[[int], None]) -> Stored:
    """Every key of the prompt set in exactly one run, with all its completions; else GuardError says which is not.

    A key belongs to one shard by its hash. So: each run holds only keys of its own shard, as many ids as it was asked
    for, and all keys together have the hash of the prompt set's. `told` hears the rows read so far.
    """
    found = Stored()
    for shard in shards:
        _look(shard, found, told)
    keys = np.concatenate(found.keys)
    whole = shards[0].asked
    if len(keys) != whole.rows or asked.keys_hash(keys) != whole.keys:
        raise GuardError(
            f"the runs hold {len(keys):,} keys, and they are not the {whole.rows:,} keys of their prompt set",
            fix="has a run records of prompts that it is not asked for any more? Begin that shard anew",
        )
    return found


def _look(shard: Shard, found: Stored, told: Callable[[int], None]) -> None:
    """Reads one run's ids; 16 bytes a row."""
    part, of = shard.asked.shard
    hashes, keys = array("Q"), array("Q")
    strange: list[str] = []
    read = sum(found.rows)
    for own in dataset.ids(shard.folder.data):
        hashed = key_hash(own.key)
        if (hashed % of != part or own.sample >= shard.asked.samples) and len(strange) <= SHOWN:
            strange.append(f"{own.key} (sample {own.sample})")
        hashes.append(dataset.id_hash(own))
        keys.append(hashed)
        if len(keys) % dataset.BATCH == 0:
            told(read + len(keys))
    if strange:
        raise GuardError(
            f"{shard.name} holds records that this shard is not asked for: {', '.join(strange[:SHOWN])}",
            fix="begin that shard anew",
        )
    ids = len(np.unique(np.array(hashes, dtype=np.uint64)))
    if ids != shard.asked.completions:
        pending = shard.asked.completions - ids
        raise GuardError(
            f"{shard.name}: {pending:,} of {shard.asked.completions:,} completions have no record"
            if pending > 0
            else f"{shard.name} holds {ids:,} completions, and was asked for {shard.asked.completions:,}",
            fix=AGAIN,
        )
    found.rows.append(len(hashes))
    found.superseded.append(len(hashes) - ids)
    found.keys.append(np.unique(np.array(keys, dtype=np.uint64)))

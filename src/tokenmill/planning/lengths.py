"""How long prompts are, in tokens: of a sample spread evenly over the set, by the model's own tokenizer where it can be
had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tokenmill import prompts, rows
from tokenmill.errors import BadPromptError, PluginError, PreflightError
from tokenmill.render import TokenizerRenderer

SAMPLED = 256
"""Rows of the sample, up to twice as many: enough for a percentile, a second for the tokenizer."""

SMALL = 16 << 20
"""Bytes of a set that is read whole in any case, which takes some 10 ms."""

BYTES_A_TOKEN = 4
"""Where no tokenizer can be had: English prose has 4 to 4.5 bytes a token, code and other languages fewer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """`total` are the set's rows (at most the limit), `rows` some of them, evenly spread."""

    total: int
    rows: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the sample's prompts, ascending, rows that cannot be used left out; `how` says what counted them."""

    tokens: tuple[int, ...]
    how: str

    @property
    def mean(self) -> float:
        return sum(self.tokens) / max(1, len(self.tokens))

    def percentile(self, percent: float) -> int:
        return int(np.percentile(self.tokens, percent)) if self.tokens else 0


def sample(path: Path, limit: int = 0) -> Sample:
    """Every k-th row, k as large as it must be; raises UsageError where the set cannot be read.

    Works on blocks of rows: a step for each of 902,087 rows would take longer than the reading.
    """
    total, step = 0, 1
    taken: list[bytes] = []
    for file in rows.files(path):
        for _, _, lines in rows.blocks(file, prompts.COLUMNS):
            block = lines if b"" not in lines else [line for line in lines if line]
            block = block[: limit - total] if limit else block
            taken += block[-total % step :: step]  # rows 0, step, 2 step … of the whole set
            total += len(block)
            while len(taken) >= 2 * SAMPLED:
                taken, step = taken[::2], step * 2
            if total == limit:
                return Sample(total, tuple(taken))
    return Sample(total, tuple(taken))


def glance(path: Path, limit: int = 0) -> Sample:
    """Rows from all over the set without reading it all: the one after each of evenly spread bytes. `total` is theirs.

    A set that is small or packed, or of which only the beginning counts, is read as by `sample`.
    """
    files = rows.files(path)
    every = sum(file.stat().st_size for file in files)
    if limit or every < SMALL or any(file.suffix != ".jsonl" for file in files):
        return sample(path, limit)
    taken: dict[tuple[str, int], bytes] = {}
    for file in files:
        size = file.stat().st_size
        wanted = -(-SAMPLED * size // every)
        with file.open("rb") as stream:
            for number in range(wanted):
                place = size * number // wanted
                stream.seek(place)
                if place:
                    stream.readline(rows.MAX_LINE)  # the rest of a row
                start, row = stream.tell(), stream.readline(rows.MAX_LINE).strip()
                if row:
                    taken[file.name, start] = row
    return Sample(len(taken), tuple(taken.values()))


def measure(found: Sample, model: Path | None, *, thinking: bool, every_turn: bool = False) -> Lengths:
    """By the tokenizer and template in the model's folder, else by bytes, and says so. With `every_turn` of each turn,
    the answers that a conversation holds taken for the model's."""
    usable = [parts for data in found.rows for parts in _messages(data, every_turn)]
    if model is not None and model.is_dir():
        try:
            renderer = TokenizerRenderer(model, thinking)
            return Lengths(tuple(sorted(_counted(renderer, usable))), "by the model's tokenizer")
        except (PreflightError, PluginError) as error:
            why = str(error)
    else:
        why = "the model has no tokenizer that can be read here"
    sizes = sorted(-(-len(bytes(messages)) // BYTES_A_TOKEN) for messages, _ in usable)
    return Lengths(tuple(sizes), f"bytes ÷ {BYTES_A_TOKEN}: {why}")


def mean_turns(found: Sample) -> float:
    """The answers that a row asks for where every turn is asked for, in the mean."""
    return sum(map(prompts.count_turns, found.rows)) / max(1, len(found.rows))


def _messages(data: bytes, every_turn: bool) -> list[tuple[msgspec.Raw, msgspec.Raw]]:
    try:
        return prompts.as_given(data) if every_turn else [prompts.messages(data)]
    except BadPromptError:
        return []  # becomes a failed record; doctor's prompts check counts them


def _counted(renderer: TokenizerRenderer, usable: Sequence[tuple[msgspec.Raw, msgspec.Raw]]) -> list[int]:
    found = []
    for messages, tools in usable:
        try:
            found.append(renderer.count(messages, tools))
        except PluginError:
            continue  # the template refuses this one: a failed record, too
    return found

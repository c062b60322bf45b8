"""What an export format is: a class that writes records into a folder, and reads its own files back to count them.

A new format is one file with a subclass and a line in plugins.py (or an entry point of group `tokenmill.formats`).
What goes out is decided before (sieve.py): a format writes all that it is given.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from tokenmill.core import turns
from tokenmill.core.records import NULL, Record, count_ids, record_id
from tokenmill.errors import PluginError
from tokenmill.settings import Settings

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

RETOKENISED = "retokenised"
"""Stands with a record's labels where its ids come from its text (tokens/filling.py)."""

CUT = "cut"
"""The `finish_reason` of a row that the export itself has cut at --max-length: it has lost its end."""


class Format(ABC):
    """`several`: the run has several completions of a prompt, so ids say which. `settings` are the run's, by id."""

    name: ClassVar[str]
    """The word on the command line."""

    bytes_a_token: ClassVar[float] = 3.7
    """About what a token of prompt or answer takes in its files, as text; ids take more."""

    needs_ids: ClassVar[bool] = False
    """Its rows are token ids: records without them are left out, and rows can be cut at a length."""

    is_closed: ClassVar[bool] = False
    """Its reader renders rows by a chat template, which writes an end token behind every answer: records that were cut
    off are left out, since they have none."""

    story: ClassVar[str] = (
        "`finish_reason` tells the rows that were cut off from those that ended: a chat template would end both."
    )
    """What whoever uses its rows must know, for the card."""

    keeps_failures: ClassVar[bool] = False
    """It has a place for failed records: `write_failures` is called."""

    tells_source: bool = False
    """Some rows' ids may come from their text: each row says whether its own do."""

    def __init__(self, *, several: bool, settings: Mapping[str, Settings] | None = None) -> None:
        self.several = several
        self.settings = settings or {}

    @abstractmethod
    def write(self, records: Iterable[Record], folder: Path, split: Split = "train") -> int:
        """Writes all records of a split, in the order given, into a folder; returns their number."""

    @abstractmethod
    def count(self, folder: Path, split: Split = "train") -> int:
        """The rows that a reader finds in the files of a split. Raises ValueError where a row is not as it must be."""

    @abstractmethod
    def pattern(self, split: Split) -> str:
        """The files of a split, as a glob pattern below the folder."""

    def write_failures(self, records: Iterable[Record], folder: Path) -> None:
        """Writes the records for which there is no completion; called for formats that keep them only."""
        raise PluginError(f"the format {self.name} says that it keeps failures, and has no write_failures")

    def source(self, record: Record) -> dict[str, Any]:
        """The field of a row that tells where its ids come from, where that is to be told."""
        return {RETOKENISED: RETOKENISED in record.labels} if self.tells_source else {}

    def id_of(self, record: Record) -> str:
        return record_id(record.key, record.sample, record.turn, several=self.several)


# -- conversations -----------------------------------------------------------------------------------------------------
UNLIKE = {"name": ""}
"""A field of the generated turn that means nothing. `datasets` 5 takes a file's form from its first 10 MB and fails at
a field that comes later, such as `tool_calls`; but lists of unlike objects it reads as JSON, whatever comes."""


def talk(record: Record) -> list[dict[str, Any]]:
    """The prompt's messages and the answer, its thought in `reasoning_content`, where chat templates look for it."""
    messages: list[dict[str, Any]] = msgspec.json.decode(record.messages)
    return [*messages, {**answer_of(record), **UNLIKE}]


def answer_of(record: Record) -> dict[str, Any]:
    """The assistant's turn that was generated. Its thought's field is there wherever thinking was on, for readers that
    take a file's form from its first rows, and nowhere else: an empty one would say that a thought was lost."""
    said: dict[str, Any] = dict(turns.answer(record))
    if record.thinking:
        said.setdefault("reasoning_content", "")
    return said


def tools_text(record: Record) -> str:
    """The tools that a prompt offers, as JSON text. TRL, Axolotl, SpecForge and speculators decode it themselves; as
    lists, tools of different parameters would be no column that Arrow can hold."""
    return "[]" if record.tools == NULL else bytes(record.tools).decode()


# -- token ids ---------------------------------------------------------------------------------------------------------
IDS = (
    "`input_ids` are the prompt's ids and then the output's, as the engine gave them; `loss_mask`, not shifted, is 0 "
    "for the first and 1 for the second, the end token that was sampled included. A row that was cut off has none."
)
"""The `story` of formats that hold `tokens`."""


class Tokens(NamedTuple):
    """JSON lists of equal length. The mask is not shifted: 1 says that the engine generated this very token."""

    input_ids: msgspec.Raw
    loss_mask: msgspec.Raw


def first_ids(raw: msgspec.Raw, count: int) -> msgspec.Raw:
    """A list's first ids."""
    return msgspec.Raw(b"[" + b",".join(bytes(raw)[1:-1].split(b",", count)[:count]) + b"]")


def tokens(record: Record) -> Tokens:
    """Prompt and output as the engine gave them, with the boundary between them as the mask: zeros, then ones."""
    parts = [bytes(raw)[1:-1] for raw in (record.prompt_ids, record.output_ids) if raw != NULL]
    mask = b"0," * count_ids(record.prompt_ids) + b"1," * count_ids(record.output_ids)
    return Tokens(
        msgspec.Raw(b"[" + b",".join(part for part in parts if part) + b"]"), msgspec.Raw(b"[" + mask[:-1] + b"]")
    )

"""What an export format is: a class that writes records into a folder, and reads its own files back to count them.

A new format is one file with a subclass and a line in plugins.py (or an entry point of group `tokenmill.formats`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tokenmill.core.records import NULL, Record, record_id


class Format(ABC):
    """`several`: the run has several completions of a prompt, so ids say which."""

    name: ClassVar[str]
    """The word on the command line."""

    bytes_a_token: ClassVar[float] = 3.7
    """About what a token of prompt or answer takes in its files, as text; ids take more."""

    def __init__(self, *, several: bool) -> None:
        self.several = several

    @abstractmethod
    def write(self, records: Iterable[Record], folder: Path) -> int:
        """Writes all records, in the order given, into an empty folder; returns their number."""

    @abstractmethod
    def count(self, folder: Path) -> int:
        """The rows that a reader finds in the folder's files."""

    def id_of(self, record: Record) -> str:
        return record_id(record.key, record.sample, record.turn, several=self.several)


def conversation(record: Record) -> list[dict[str, Any]]:
    """The prompt's messages and the answer, its thought in `reasoning_content`, where chat templates look for it."""
    messages: list[dict[str, Any]] = msgspec.json.decode(record.messages)
    answer: dict[str, Any] = {"role": "assistant", "content": record.answer}
    if record.reasoning:
        answer["reasoning_content"] = record.reasoning
    return [*messages, answer]


def tools(record: Record) -> Any:
    """The tools a prompt offers, None where it offers none."""
    return None if record.tools == NULL else msgspec.json.decode(record.tools)

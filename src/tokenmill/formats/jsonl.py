"""What all formats of JSON lines share: one row a line, files of bounded size, each line read back and checked.

The ending is .jsonl and never .zst: the trainers open their data with plain open().
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tokenmill.core.records import NULL, Record, count_ids
from tokenmill.formats.base import Format, Split

FILE_BYTES = 1_000_000_000
"""Of a file of token ids: SpecForge 0.2 reads a whole file into lists (prompt_builder._materialize_prompt_tasks), which
takes five times as much memory."""

BUFFER_BYTES = 1 << 20
"""Written at once: a row of 8,000 tokens has 60 KB."""


class JsonLines(Format):
    """`file_bytes`, `file_rows`: where a split goes on in a next file; 0 for never, and then its name has no number."""

    file_bytes: ClassVar[int] = 0
    file_rows: ClassVar[int] = 0

    @abstractmethod
    def row(self, record: Record) -> dict[str, Any]:
        """What stands in a record's line."""

    @abstractmethod
    def stem(self, split: Split) -> str:
        """The path of a split's files below the folder, without number and ending."""

    def check(self, line: bytes) -> None:
        """Raises ValueError (as msgspec's own errors are) where a line that was written is no row."""
        msgspec.json.decode(line)

    def pattern(self, split: Split) -> str:
        return f"{self.stem(split)}-*.jsonl" if self._is_bounded else f"{self.stem(split)}.jsonl"

    @property
    def _is_bounded(self) -> bool:
        return bool(self.file_bytes or self.file_rows)

    def write(self, records: Iterable[Record], folder: Path, split: Split = "train") -> int:
        encode = msgspec.json.Encoder().encode
        return self._write((encode(self.row(record)) + b"\n" for record in records), folder, self.stem(split))

    def _write(self, lines: Iterator[bytes], folder: Path, stem: str) -> int:
        """Writes lines to as many files as they need, at least one, and then names them as one of so many."""
        (folder / stem).parent.mkdir(exist_ok=True)
        written = rows = 0
        files: list[Path] = []
        more = True
        while more:
            files.append(folder / (f"{stem}-{len(files):05d}.jsonl" if self._is_bounded else f"{stem}.jsonl"))
            rows, more = self._fill(files[-1], lines)
            written += rows
        if len(files) > 1 and rows == 0:
            files.pop().unlink()  # the one before was full just then
        for number, file in enumerate(files if self._is_bounded else ()):
            file.rename(folder / f"{stem}-{number:05d}-of-{len(files):05d}.jsonl")
        return written

    def _fill(self, file: Path, lines: Iterator[bytes]) -> tuple[int, bool]:
        """Returns the rows written, and whether there may be more of them."""
        rows = size = 0
        with file.open("wb", buffering=BUFFER_BYTES) as out:
            for line in lines:
                out.write(line)
                rows, size = rows + 1, size + len(line)
                if rows == self.file_rows or (self.file_bytes and size >= self.file_bytes):
                    return rows, True
        return rows, False

    def count(self, folder: Path, split: Split = "train") -> int:
        rows = 0
        for path in sorted(folder.glob(self.pattern(split))):
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        raise ValueError(f"{path.name}: the last line does not end")
                    self.check(line)
                    rows += 1
        return rows


class _Tokens(msgspec.Struct):
    id: str
    input_ids: msgspec.Raw = NULL
    loss_mask: msgspec.Raw = NULL


_tokens = msgspec.json.Decoder(_Tokens)


def check_tokens(line: bytes) -> None:
    """Raises ValueError unless a row has as many mask entries as ids, zeros and then ones, at least one of them."""
    row = _tokens.decode(line)
    zeros, one, ones = bytes(row.loss_mask)[1:-1].replace(b",", b"").partition(b"1")
    if not one or zeros.strip(b"0") or ones.strip(b"1"):
        raise ValueError(f"{row.id}: the mask is not zeros and then ones")
    if count_ids(row.input_ids) != count_ids(row.loss_mask):
        raise ValueError(f"{row.id}: {count_ids(row.input_ids)} ids, {count_ids(row.loss_mask)} mask entries")

"""messages: a .jsonl of conversations, as TRL, Axolotl and others read them. Text only; for ids see parquet."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tokenmill.core.records import Record
from tokenmill.formats.base import Format, conversation, tools

FILE = "messages.jsonl"


class Messages(Format):
    name = "messages"

    def write(self, records: Iterable[Record], folder: Path) -> int:
        rows = 0
        encoder = msgspec.json.Encoder()
        with (folder / FILE).open("wb", buffering=1 << 20) as out:
            for record in records:
                row = {
                    "id": self.id_of(record),
                    "messages": conversation(record),
                    "finish_reason": record.finish_reason,
                }
                offered = tools(record)
                if offered is not None:
                    row["tools"] = offered
                out.write(encoder.encode(row) + b"\n")
                rows += 1
        return rows

    def count(self, folder: Path) -> int:
        decoder = msgspec.json.Decoder()
        with (folder / FILE).open("rb") as file:
            return sum(1 for line in file if decoder.decode(line))

"""messages: conversations, as TRL, Axolotl and others read them. Text only; for ids see specforge and parquet.

A multi-turn prompt gives a row for each turn that was generated, its history as it was served. Trainers render it by
the model's template: `finish_reason` tells the rows whose end such a template would invent.
"""

from typing import Any

from tokenmill.core.records import Record
from tokenmill.formats.base import Format, Split, conversation, tools
from tokenmill.formats.jsonl import JsonLines


class Messages(JsonLines):
    name = "messages"
    story = f"{Format.story} Of several turns each has a row, its history as it was sent: train the last turn only."

    def row(self, record: Record) -> dict[str, Any]:
        row = {
            "id": self.id_of(record),
            "messages": conversation(record),
            "finish_reason": record.finish_reason,
        }
        offered = tools(record)
        return row if offered is None else {**row, "tools": offered}

    def stem(self, split: Split) -> str:
        return "messages" if split == "train" else f"messages-{split}"

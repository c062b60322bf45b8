"""messages: conversations, as TRL, Axolotl and others read them. Text only; for ids see specforge and parquet.

TRL 1.16 (trainer/sft_trainer.py) and Axolotl 0.19 (prompt_strategies/chat_template.py) take `tools` as JSON text, too.
So every row has it, and `datasets` knows the column from the first row; for the turns see base.UNLIKE.

A multi-turn prompt gives a row for each turn that was generated, its history as it was served. Trainers render it by
the model's template: `finish_reason` tells the rows whose end such a template would invent.
"""

from typing import Any

from tokenmill.core.records import Record
from tokenmill.formats.base import Format, Split, talk, tools_text
from tokenmill.formats.jsonl import JsonLines


class Messages(JsonLines):
    name = "messages"
    story = f"{Format.story} Of several turns each has a row, its history as it was sent: train the last turn only."

    def row(self, record: Record) -> dict[str, Any]:
        return {
            "id": self.id_of(record),
            "messages": talk(record),
            "finish_reason": record.finish_reason,
            "tools": tools_text(record),
        }

    def stem(self, split: Split) -> str:
        return "messages" if split == "train" else f"messages-{split}"

"""specforge-chat: conversations for SpecForge's own templates, for who cannot take token ids (specforge.py).

SpecForge 0.2 passes every column but `conversations`, `id` and `tools` on to the chat template as a variable
(data/preprocessing.py: `**examples`): a column named enable_thinking or tools_in_user_message would change every row.
So there is none beyond `status`, which its validate_regenerated_data.py asks for.

It reads rows through `datasets` 5.2, which takes their form from the first 10 MB and fails at a field that comes later.
So every row has every field, `tools` and `tool_calls` as JSON text, which SpecForge decodes itself.
"""

from typing import Any

import msgspec

from tokenmill.core.records import Record
from tokenmill.formats.base import Split, conversation, tools_text
from tokenmill.formats.jsonl import JsonLines

FIELDS = {"tool_calls": "[]", "tool_call_id": "", "name": ""}
"""What other turns may have, and the generated one gets empty: `datasets` then knows of it from the first row."""


class SpecForgeChat(JsonLines):
    name = "specforge-chat"
    is_closed = True
    story = (
        "A row for each turn, its history as it was served: train the last turn only. Rows that were cut off are left "
        "out, since a template writes an end token behind each answer."
    )

    def row(self, record: Record) -> dict[str, Any]:
        *history, answer = conversation(record)
        turns = [*map(_plain, history), {**answer, **FIELDS}]
        return {
            "id": self.id_of(record),
            "conversations": turns,
            "status": "success",
            "tools": tools_text(record),
        }

    def stem(self, split: Split) -> str:
        return f"{split}/specforge-chat"


def _plain(turn: dict[str, Any]) -> dict[str, Any]:
    calls = turn.get("tool_calls")
    return turn if calls is None or isinstance(calls, str) else {**turn, "tool_calls": _text(calls)}


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()

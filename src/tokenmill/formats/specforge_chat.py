"""specforge-chat: conversations for SpecForge's own templates, for who cannot take token ids (specforge.py).

SpecForge 0.2 passes every column but `conversations`, `id` and `tools` on to the chat template as a variable
(data/preprocessing.py: `**examples`): a column named enable_thinking or tools_in_user_message would change every row.
So there is none beyond `status`, which its validate_regenerated_data.py asks for.

It reads rows through `datasets`, and decodes `tools` itself: see base.UNLIKE and base.tools_text. speculators 0.9 takes
these rows, too, where a vLLM server renders them for it.
"""

from typing import Any

from tokenmill.core.records import Record
from tokenmill.formats.base import Split, talk, tools_text
from tokenmill.formats.jsonl import JsonLines


class SpecForgeChat(JsonLines):
    name = "specforge-chat"
    is_closed = True
    story = (
        "A row for each turn, its history as it was served: train the last turn only. Rows that were cut off are left "
        "out, since a template writes an end token behind each answer."
    )

    def row(self, record: Record) -> dict[str, Any]:
        return {
            "id": self.id_of(record),
            "conversations": talk(record),
            "status": "success",
            "tools": tools_text(record),
        }

    def stem(self, split: Split) -> str:
        return f"{split}/specforge-chat"

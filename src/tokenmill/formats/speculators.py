"""speculators: token ids, loss mask and where they come from, in the rows of its own `regenerate-responses`.

speculators 0.9, data_generation/preprocessing.py: rows with `input_ids` and `loss_mask` are passed through, cut at
--seq-length, without a server or a template; rows of unequal lengths end the whole preparation. A folder given to
`prepare-data --data` is searched for .json and .jsonl in all its depth: so each split has a folder of its own.
`datasets` reads it: every row has the same fields, of the same types.
"""

from typing import Any

from tokenmill.core.records import Record
from tokenmill.formats.base import IDS, Split, tokens
from tokenmill.formats.jsonl import FILE_BYTES, JsonLines, check_tokens


class Speculators(JsonLines):
    name = "speculators"
    bytes_a_token = 12
    needs_ids = True
    story = IDS
    file_bytes = FILE_BYTES

    def row(self, record: Record) -> dict[str, Any]:
        ids, mask = tokens(record)
        return {
            "id": self.id_of(record),
            "primary_id": record.key,
            "input_ids": ids,
            "loss_mask": mask,
            "text": record.text,  # to be looked at; trainers leave it alone
            "metadata": self._metadata(record),
        }

    def _metadata(self, record: Record) -> dict[str, Any]:
        made = self.settings.get(record.settings)
        content = made.content if made else {}
        return {
            "idx": record.row,
            "finish_reason": record.finish_reason,
            "usage": {
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.output_tokens,
                "total_tokens": record.prompt_tokens + record.output_tokens,
            },
            "endpoint": f"server {record.server}",
            "model": content.get("model", ""),
            "thinking": record.thinking,
            "sampling_params": content.get("sampling", {}),
            "settings": record.settings,
            **self.source(record),
        }

    def stem(self, split: Split) -> str:
        return f"{split}/speculators"

    def check(self, line: bytes) -> None:
        check_tokens(line)

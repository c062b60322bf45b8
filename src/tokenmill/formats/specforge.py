"""specforge: token ids and loss mask, as SpecForge (DFlash, EAGLE-3, Domino, DSpark) reads them without any template.

SpecForge 0.2, data/prompt_builder.py: a file whose first row holds `input_ids` and `loss_mask` is taken as it is, as
JSON lines from plain open(); both must be lists of equal length, the mask 0 or 1. It cuts at its max_length, and drops
rows with fewer than min_loss_tokens ones (DFlash: two in a row). No other column is read.
"""

from typing import Any

from tokenmill.core.records import Record
from tokenmill.formats.base import IDS, Split, tokens
from tokenmill.formats.jsonl import FILE_BYTES, JsonLines, check_tokens


class SpecForge(JsonLines):
    name = "specforge"
    bytes_a_token = 8.3
    needs_ids = True
    story = IDS
    file_bytes = FILE_BYTES

    def row(self, record: Record) -> dict[str, Any]:
        ids, mask = tokens(record)
        return {
            "id": self.id_of(record),
            "input_ids": ids,
            "loss_mask": mask,
            "finish_reason": record.finish_reason,
            **self.source(record),
        }

    def stem(self, split: Split) -> str:
        return f"{split}/specforge"

    def check(self, line: bytes) -> None:
        check_tokens(line)

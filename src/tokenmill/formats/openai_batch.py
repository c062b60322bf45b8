"""openai-batch: the lines of an OpenAI Batch's output file, and of its error file. Joined to the input by `custom_id`.

{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}; the body is a chat completion. A prompt
for which there is no completion stands in the error file, with the label that says why. The input's lines are read as
prompts (prompts.py).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tokenmill.core.records import Record
from tokenmill.formats.base import Split, answer_of
from tokenmill.formats.jsonl import JsonLines


class OpenAIBatch(JsonLines):
    name = "openai-batch"
    bytes_a_token = 4.0
    keeps_failures = True
    story = "Join to the input by `custom_id`; prompts without a completion stand in `errors-*.jsonl`."
    file_rows = 50_000
    """As many lines as an input file may have."""

    def row(self, record: Record) -> dict[str, Any]:
        name = self._name(record)
        body = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": int(record.started),
            "model": self._model(record),
            "choices": [{"index": 0, "message": answer_of(record), "finish_reason": record.finish_reason}],
            "usage": {
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.output_tokens,
                "total_tokens": record.prompt_tokens + record.output_tokens,
                "completion_tokens_details": {"reasoning_tokens": record.reasoning_tokens},
            },
        }
        response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
        return {"id": f"batch_req_{name}", "custom_id": self.id_of(record), "response": response, "error": None}

    def write_failures(self, records: Iterable[Record], folder: Path) -> None:
        encode = msgspec.json.Encoder().encode
        self._write((encode(self._failure(record)) + b"\n" for record in records), folder, "errors")

    def _failure(self, record: Record) -> dict[str, Any]:
        error = {"code": record.labels[0], "message": record.error}
        name = f"batch_req_{self._name(record)}"
        return {"id": name, "custom_id": self.id_of(record), "response": None, "error": error}

    def _name(self, record: Record) -> str:
        """The same at every export of the record."""
        return xxhash.xxh3_64_hexdigest(
            f"{record.key}\0{record.sample}\0{record.turn}\0{record.attempt}".encode("utf-8", "surrogatepass")
        )

    def _model(self, record: Record) -> str:
        made = self.settings.get(record.settings)
        return str(made.content.get("model", "")) if made else ""

    def stem(self, split: Split) -> str:
        return "output" if split == "train" else f"{split}-output"

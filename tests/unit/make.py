"""Small values that several unit tests need: records, completions, prompt files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.records import Completion, Parts, Record

MESSAGES = msgspec.Raw(b'[{"role":"user","content":"hi"}]')
TEXT = "<think>\nIt is a greeting, so a greeting is due.\n</think>\n\nHello there!"


def record(key: str = "k", row: int = 0, **fields: Any) -> Record:
    """An accepted record with a thought and an answer; `fields` replaces what a test is about."""
    base: dict[str, Any] = {
        "key": key,
        "sample": 0,
        "turn": 0,
        "row": row,
        "cohort": 0,
        "digest": f"{row + 1:016x}",
        "settings": "abc",
        "messages": MESSAGES,
        "prompt_ids": msgspec.Raw(b"[1,2,3]"),
        "output_ids": msgspec.Raw(b"[4,5,6,7]"),
        "text": TEXT,
        "parts": Parts(8, 47, 58, 70),
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "output_tokens": 40,
        "reasoning_tokens": 20,
        "thinking": True,
        "server": "0",
        "started": 1_700_000_000.25,
        "seconds": 1.5,
    }
    return Record(**{**base, **fields})


def completion(text: str, finish: str = "stop", *, tokens: int = 100, **fields: Any) -> Completion:
    return Completion(text, finish, output_tokens=tokens, **fields)


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """A .jsonl file; a row that is bytes stands as it is."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path

"""Runs made of hand-made records, their exports, and what a reader finds in them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tokenmill import settings
from tokenmill.core.records import Record
from tokenmill.folder import RunFolder
from tokenmill.settings import Settings
from tokenmill.store import line_of


def stored(path: Path, records: Iterable[Record], rows: Iterable[Settings] = ()) -> RunFolder:
    """A run folder below `path` with these records in one open journal, and these settings."""
    folder = RunFolder(path / "run")
    folder.create()
    (folder.data / "journal-000001.jsonl").write_bytes(b"".join(map(line_of, records)))
    for row in rows:
        settings.keep(folder.data, row)
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    """All rows of the .jsonl files below a folder, in the files' order."""
    return [json.loads(line) for file in sorted(path.rglob("*.jsonl")) for line in file.read_bytes().splitlines()]


def raw(*ids: int) -> msgspec.Raw:
    """Token ids as records carry them."""
    return msgspec.Raw(msgspec.json.encode(list(ids)))

"""Prompt files and run folders of any size, made on the spot."""

import json
import random
from pathlib import Path

import msgspec
import pyarrow.parquet as pq

from tokenmill.core.records import Parts, Record
from tokenmill.prompts import identity
from tokenmill.seal import SCHEMA, to_table

WORDS = [
    "write",
    "a",
    "short",
    "program",
    "that",
    "explains",
    "the",
    "idea",
    "of",
    "how",
    "to",
    "prove",
    "this",
    "theorem",
    "about",
    "numbers",
    "in",
    "simple",
    "words",
]
_POOL: list[str] = []


def prompt(row: int) -> str:
    """About 1 KB of text that carries the row's mark."""
    if not _POOL:
        rng = random.Random(1)
        _POOL.extend(" ".join(rng.choices(WORDS, k=200))[:1000] for _ in range(512))
    return f"ROW{row:08d} {_POOL[row % 512]}"


def line(row: int) -> bytes:
    return json.dumps({"id": f"ROW{row:08d}", "messages": [{"role": "user", "content": prompt(row)}]}).encode() + b"\n"


def write_prompts(path: Path, count: int) -> Path:
    """A prompt file, made once."""
    if not path.exists():
        with path.open("wb", buffering=1 << 20) as out:
            for row in range(count):
                out.write(line(row))
    return path


def write_records(data: Path, rows: range, settings: str, *, per_part: int = 20_000) -> None:
    """A store in which these rows are done, sealed as a run would have left it."""
    data.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(rows.start, rows.stop, per_part), 1):
        with pq.ParquetWriter(data / f"part-{number:06d}.parquet", SCHEMA, compression="zstd") as writer:
            for group in range(start, min(start + per_part, rows.stop), 1000):
                stop = min(group + 1000, rows.stop)
                writer.write_table(to_table([record(row, settings) for row in range(group, stop)]))


def record(row: int, settings: str) -> Record:
    own = identity(line(row))
    text = f"<think>\nI think about ROW{row:08d}.\n</think>\n\nIt is so."
    return Record(
        key=own.key,
        sample=0,
        turn=0,
        row=row,
        cohort=1 + row // 200,
        digest=own.digest,
        settings=settings,
        messages=msgspec.Raw(msgspec.json.encode([{"role": "user", "content": prompt(row)}])),
        text=text,
        parts=Parts(8, 33, 44, len(text)),
        finish_reason="stop",
        output_tokens=400,
        reasoning_tokens=300,
        thinking=True,
        server="0",
    )

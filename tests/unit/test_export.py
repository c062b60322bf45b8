"""Exports: accepted records in the prompts' order, counted again, whole or not at all."""

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from tests.unit.make import record
from tokenmill import plugins
from tokenmill.core.judge import BROKEN, Rules
from tokenmill.core.records import NULL, Parts, Record
from tokenmill.errors import StoreError, UsageError
from tokenmill.export import export
from tokenmill.folder import RunFolder
from tokenmill.formats.base import Format
from tokenmill.formats.messages import Messages
from tokenmill.formats.parquet import Parquet
from tokenmill.seal import seal
from tokenmill.store import line_of

RECORDS = [
    record("c", 2, labels=("truncated_in_answer",), finish_reason="length"),
    record("bad", 1, labels=("empty_answer",)),
    record("a", 0, tools=msgspec.Raw(b'[{"type":"function"}]')),
    record("gone", 3, labels=("aborted",), text="", parts=Parts(0, 0, 0, 0)),
    record("plain", 4, text="Hi", parts=Parts(0, 0, 0, 2), thinking=False, prompt_ids=NULL, output_ids=NULL),
    record("a", 0, attempt=2, sample=1),
]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose first four records are sealed."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for number, rows in enumerate((RECORDS[:4], RECORDS[4:]), 1):
        (folder.data / f"journal-{number:06d}.jsonl").write_bytes(b"".join(map(line_of, rows)))
    seal(folder.data / "journal-000001.jsonl", folder.data / "part-000001.parquet")
    return folder


def messages(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "messages.jsonl").read_text(encoding="utf-8").splitlines()]


def test_conversations_hold_thought_answer_and_tools(run: RunFolder, tmp_path: Path) -> None:
    assert export(run, "messages", tmp_path / "out", Rules(), samples=2) == 4
    first, second, third, plain = messages(tmp_path / "out")
    assert [row["id"] for row in (first, second, third, plain)] == ["a#0.0", "a#1.0", "c#0.0", "plain#0.0"]
    assert first["messages"] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Hello there!",
            "reasoning_content": "It is a greeting, so a greeting is due.",
        },
    ]
    assert (first["tools"], first["finish_reason"], third["finish_reason"]) == (
        [{"type": "function"}],
        "stop",
        "length",
    )
    assert plain["messages"][-1] == {"role": "assistant", "content": "Hi"}
    assert "tools" not in plain


def test_the_rules_of_now_decide_what_goes_out(run: RunFolder, tmp_path: Path) -> None:
    strict = Rules(reject=BROKEN | {"truncated_in_answer"})
    assert export(run, "messages", tmp_path / "strict", strict, samples=1) == 3
    lenient = Rules(reject=frozenset())
    assert export(run, "messages", tmp_path / "lenient", lenient, samples=1) == 5
    assert [row["id"] for row in messages(tmp_path / "lenient")] == [
        *("a#0.0", "a#1.0", "bad#0.0", "c#0.0", "plain#0.0")
    ], "ids are told apart by what is stored, whatever is asked for now"


def test_parquet_keeps_the_ids_as_the_engine_gave_them(run: RunFolder, tmp_path: Path) -> None:
    assert export(run, "parquet", tmp_path / "out", Rules(), samples=1) == 4
    assert sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file()) == [
        "README.md",
        "train-00000-of-00001.parquet",
    ]
    rows = pq.read_table(tmp_path / "out" / "data" / "train-00000-of-00001.parquet").to_pylist()
    assert [(row["key"], row["prompt_ids"], row["output_ids"]) for row in rows] == [
        ("a", [1, 2, 3], [4, 5, 6, 7]),
        ("a", [1, 2, 3], [4, 5, 6, 7]),
        ("c", [1, 2, 3], [4, 5, 6, 7]),
        ("plain", None, None),
    ]
    assert rows[0]["reasoning"] == "It is a greeting, so a greeting is due."


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_a_run_without_an_accepted_record_gives_an_empty_dataset(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert export(folder, name, tmp_path / "out", Rules(), samples=1) == 0


def test_nothing_is_overwritten(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="out exists already"):
        export(run, "messages", tmp_path / "out", Rules(), samples=1)


def test_an_unknown_format_is_named_with_the_known_ones(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no format named 'jsonl'") as caught:
        export(run, "jsonl", tmp_path / "out", Rules(), samples=1)
    assert caught.value.fix == "one of: messages, parquet"
    assert not (tmp_path / "out").exists()


class Forgetful(Messages):
    """Says less than it wrote."""

    def count(self, folder: Path) -> int:
        return super().count(folder) - 1


class Full(Messages):
    """The disk is full half-way."""

    def write(self, records: Iterable[Record], folder: Path) -> int:
        super().write(records, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("kind", "told"), [(Forgetful, "4 rows were written to .*, and 3 are found"), (Full, "No space left")]
)
def test_an_export_is_whole_or_not_there(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Format], told: str
) -> None:
    monkeypatch.setitem(plugins.TABLES["formats"], "odd", f"{__name__}:{kind.__name__}")
    with pytest.raises(StoreError, match=told):
        export(run, "odd", tmp_path / "new" / "out", Rules(), samples=1)
    assert list(tmp_path.rglob("*out*")) == []


def test_a_large_dataset_is_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.formats.parquet.SHARD_BYTES", 1)
    monkeypatch.setattr("tokenmill.seal.GROUP_ROWS", 256)
    written = Parquet(several=False)
    assert written.write((record(str(row), row) for row in range(600)), tmp_path) == 600
    assert written.count(tmp_path) == 600
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        f"train-{n:05d}-of-00003.parquet" for n in range(3)
    ]


def test_characters_that_readers_trip_over_survive(tmp_path: Path) -> None:
    odd = 'a\u2028b\u0085c 🙂 \\n "q" \x1f'
    Messages(several=False).write([record(text=odd, parts=Parts(0, 0, 0, len(odd)))], tmp_path)
    (line,) = (tmp_path / "messages.jsonl").read_bytes().rstrip(b"\n").split(b"\n")
    assert json.loads(line)["messages"][-1]["content"] == odd

"""Every export format: what is written is counted, in order, under the right ids, and reads back as it was.

`datasets` is no dependency: files are read back by json and pyarrow, as it does it itself.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from tests.unit.make import TEXT, record
from tokenmill import plugins
from tokenmill.core.records import Parts, Record, record_id
from tokenmill.formats.base import Format

every_format = pytest.mark.parametrize("name", plugins.names("formats"))
either_way = pytest.mark.parametrize("several", [False, True])

ODD = 'ü 模型 🙂 e\u0301 \u2028\u2029\u0085 \ufeff \x00\x1b "\\\t\r\n {{ jinja }} </think> \u202eabc'
"""Line ends that are none in JSON, a byte order mark, NUL, quotes, direction marks, template and tag look-alikes."""

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "One.", "reasoning_content": "It is one."},
    {"role": "user", "content": "And two?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
CALLS = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def spoken(text: str, answer_from: int) -> dict[str, Any]:
    """A record's text that is all answer from a place on."""
    return {"text": text, "parts": Parts(0, 0, answer_from, len(text))}


CUT = {
    "finish_reason": "length",
    "text": TEXT[:30],
    "parts": Parts(8, 30, 30, 30),
    "labels": ("truncated_in_thinking",),
}

RECORDS: list[Record] = [
    record("plain", 0),
    record("turns", 1, messages=raw(TURNS)),
    record("tools", 2, messages=raw(CALLS), tools=raw(TOOLS)),
    record("cut", 3, **CUT),
    record("no thought", 4, thinking=False, reasoning_tokens=0, **spoken("Hello!", 0)),
    record("odd", 5, messages=raw([{"role": "user", "content": ODD}]), **spoken(ODD, 0)),
    record("no ids", 6, prompt_ids=msgspec.Raw(b"null"), output_ids=msgspec.Raw(b"null")),
    record('key "with" ü\u2028🙂', 7),
    record("long", 8, output_ids=raw(list(range(20_000))), text="x" * 50_000, parts=Parts(0, 0, 0, 50_000)),
]  # fmt: skip


def samples() -> list[Record]:
    """Three completions of each of two prompts, in the prompts' order."""
    return [record(f"p{row}", row, sample=sample) for row in range(2) for sample in range(3)]


def write(name: str, folder: Path, records: list[Record], *, several: bool = False) -> tuple[Format, int]:
    made: Format = plugins.load("formats", name)(several=several)
    folder.mkdir()
    return made, made.write(iter(records), folder)


def read(folder: Path) -> list[dict[str, Any]]:
    """All rows of a folder, file by file in the order of their names, as a reader that knows the endings would."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".jsonl":
            rows += [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        elif path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                rows += file.read().to_pylist()
    return rows


def id_of(row: dict[str, Any], *, several: bool) -> str:
    """A row's id; table formats carry its parts instead."""
    if "id" in row or "custom_id" in row:
        return str(row.get("id") or row["custom_id"])
    return record_id(row["key"], row["sample"], row["turn"], several=several)


# -- all formats -------------------------------------------------------------------------------------------------------
@every_format
def test_what_is_written_is_counted_and_found_in_order(name: str, tmp_path: Path) -> None:
    made, written = write(name, tmp_path / "out", RECORDS)
    assert written == len(RECORDS) == made.count(tmp_path / "out")
    assert [id_of(row, several=False) for row in read(tmp_path / "out")] == [record.key for record in RECORDS]


@every_format
def test_many_records_stay_in_order(name: str, tmp_path: Path) -> None:
    """More than any buffer or row group holds."""
    records = [record(f"p{row}", row) for row in range(1000)]
    made, written = write(name, tmp_path / "out", records)
    assert written == 1000 == made.count(tmp_path / "out")
    assert [id_of(row, several=False) for row in read(tmp_path / "out")] == [f"p{row}" for row in range(1000)]


@every_format
@either_way
def test_ids_tell_the_samples_of_a_prompt_apart(name: str, several: bool, tmp_path: Path) -> None:
    records = samples() if several else samples()[::3]
    write(name, tmp_path / "out", records, several=several)
    ids = [id_of(row, several=several) for row in read(tmp_path / "out")]
    wanted = [f"p{row}#{sample}.0" for row in range(2) for sample in range(3)] if several else ["p0", "p1"]
    assert ids == wanted


@every_format
def test_nothing_to_write_is_no_rows(name: str, tmp_path: Path) -> None:
    made, written = write(name, tmp_path / "out", [])
    assert (written, made.count(tmp_path / "out"), read(tmp_path / "out")) == (0, 0, [])


@every_format
def test_records_are_taken_one_by_one(name: str, tmp_path: Path) -> None:
    """902,087 of them do not fit into memory."""
    taken = 0

    def stream() -> Any:
        nonlocal taken
        for row in range(3000):
            taken += 1
            yield record(f"p{row}", row, **spoken("x" * 2000, 0))
            if row == 2500:
                assert any(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())

    made: Format = plugins.load("formats", name)(several=False)
    (tmp_path / "out").mkdir()
    assert made.write(stream(), tmp_path / "out") == taken == 3000


# -- messages ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def rows(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The messages format's rows by id."""
    write("messages", tmp_path / "out", RECORDS)
    return {row["id"]: row for row in read(tmp_path / "out")}


def test_messages_the_answer_ends_the_conversation_with_its_thought_beside_it(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["plain"]["messages"] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Hello there!",
            "reasoning_content": "It is a greeting, so a greeting is due.",
        },
    ]
    assert rows["no thought"]["messages"][-1] == {"role": "assistant", "content": "Hello!"}


def test_messages_earlier_turns_and_tools_stand_as_they_were(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["turns"]["messages"][:-1] == TURNS
    assert rows["tools"]["messages"][:-1] == CALLS
    assert rows["tools"]["tools"] == TOOLS
    assert "tools" not in rows["plain"]


def test_messages_a_cut_answer_says_so(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["cut"]["finish_reason"] == "length"
    assert rows["cut"]["messages"][-1]["content"] == ""
    assert rows["cut"]["messages"][-1]["reasoning_content"] == TEXT[8:30]
    assert rows["plain"]["finish_reason"] == "stop"


def test_messages_odd_text_comes_back_whole_and_on_one_line(rows: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert [message["content"] for message in rows["odd"]["messages"]] == [ODD, ODD]
    files = list((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["messages.jsonl"]
    assert files[0].read_bytes().count(b"\n") == len(RECORDS)


# -- parquet -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def table(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The parquet format's rows by key."""
    write("parquet", tmp_path / "out", RECORDS)
    return {row["key"]: row for row in read(tmp_path / "out")}


def test_parquet_ids_are_the_engines_own(table: dict[str, dict[str, Any]]) -> None:
    assert (table["plain"]["prompt_ids"], table["plain"]["output_ids"]) == ([1, 2, 3], [4, 5, 6, 7])
    assert table["long"]["output_ids"] == list(range(20_000))
    assert (table["no ids"]["prompt_ids"], table["no ids"]["output_ids"]) == (None, None)


def test_parquet_texts_come_back_whole(table: dict[str, dict[str, Any]]) -> None:
    assert (table["odd"]["text"], table["odd"]["answer"]) == (ODD, ODD)
    assert json.loads(table["odd"]["messages"])[0]["content"] == ODD
    assert (table["plain"]["reasoning"], table["plain"]["answer"]) == (RECORDS[0].reasoning, "Hello there!")
    assert json.loads(table["turns"]["messages"]) == TURNS
    assert json.loads(table["tools"]["tools"]) == TOOLS
    assert table["plain"]["tools"] is None


def test_parquet_measurements_and_labels_come_along(table: dict[str, dict[str, Any]]) -> None:
    cut, plain = table["cut"], table["plain"]
    assert (cut["labels"], cut["finish_reason"], plain["labels"]) == (["truncated_in_thinking"], "length", [])
    assert (plain["prompt_tokens"], plain["output_tokens"], plain["reasoning_tokens"]) == (3, 40, 20)
    assert (plain["settings"], plain["server"], plain["started"]) == ("abc", "0", 1_700_000_000.25)


def test_parquet_the_card_names_the_files_that_are_there(table: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    pattern = next(line.split()[1] for line in card.splitlines() if line.strip().startswith("path:"))
    found = sorted(path.name for path in (tmp_path / "out").glob(pattern))
    assert found == sorted(path.name for path in (tmp_path / "out" / "data").iterdir())
    assert found == ["train-00000-of-00001.parquet"]

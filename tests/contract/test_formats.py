"""Every export format: what is written is counted, in order, under the right ids, and reads back as it was.

`datasets` is no dependency: files are read back by json and pyarrow, as it does it itself.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from tests.unit.make import TEXT, jsonl, record
from tokenmill import plugins
from tokenmill.core.records import NULL, Parts, Record, record_id
from tokenmill.formats.base import SPLITS, Format
from tokenmill.prompts import COLUMNS, identity
from tokenmill.prompts import messages as messages_of
from tokenmill.rows import rows as rows_of
from tokenmill.settings import Settings

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
CALLS: list[dict[str, Any]] = [
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


def fit(name: str) -> list[Record]:
    """The records that the sieve lets through to a format."""
    kind: type[Format] = plugins.load("formats", name)
    return [
        own
        for own in RECORDS
        if not (kind.needs_ids and own.output_ids == NULL) and not (kind.is_closed and own.finish_reason != "stop")
    ]


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
        return str(row.get("custom_id") or row["id"])
    return record_id(row["key"], row["sample"], row["turn"], several=several)


# -- all formats -------------------------------------------------------------------------------------------------------
@every_format
def test_what_is_written_is_counted_and_found_in_order(name: str, tmp_path: Path) -> None:
    records = fit(name)
    made, written = write(name, tmp_path / "out", records)
    assert written == len(records) == made.count(tmp_path / "out")
    assert [id_of(row, several=False) for row in read(tmp_path / "out")] == [record.key for record in records]


@every_format
def test_the_splits_lie_apart_where_the_patterns_say(name: str, tmp_path: Path) -> None:
    made, _ = write(name, tmp_path / "out", [record("a", 0), record("b", 1)])
    assert made.write(iter([record("c", 2)]), tmp_path / "out", "validation") == 1
    assert [made.count(tmp_path / "out", split) for split in SPLITS] == [2, 1]
    files = {split: set((tmp_path / "out").glob(made.pattern(split))) for split in SPLITS}
    assert files["train"]
    assert files["train"].isdisjoint(files["validation"])
    assert files["train"] | files["validation"] == {path for path in (tmp_path / "out").rglob("*") if path.is_file()}


@every_format
def test_a_record_is_written_alike_every_time(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "a", fit(name))
    write(name, tmp_path / "b", fit(name))
    one, other = ([path.read_bytes() for path in sorted((tmp_path / x).rglob("*.*l*"))] for x in "ab")
    assert one == other


@every_format
def test_many_records_stay_in_order(name: str, tmp_path: Path) -> None:
    """More than any buffer or row group holds."""
    records = [record(f"p{row}", row) for row in range(1000)]
    made, written = write(name, tmp_path / "out", records)
    assert written == 1000 == made.count(tmp_path / "out")
    assert [id_of(row, several=False) for row in read(tmp_path / "out")] == [f"p{row}" for row in range(1000)]


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 8])
@pytest.mark.parametrize("name", ["specforge", "speculators", "openai-batch"])
def test_files_are_of_bounded_size_and_numbered_in_order(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = plugins.load("formats", name)
    monkeypatch.setattr(kind, "file_bytes", 0)
    monkeypatch.setattr(kind, "file_rows", 4)
    made, written = write(name, tmp_path / "out", [record(f"p{row}", row) for row in range(rows)])
    assert written == rows == made.count(tmp_path / "out")
    assert [id_of(row, several=False) for row in read(tmp_path / "out")] == [f"p{row}" for row in range(rows)]
    files = max(1, -(-rows // 4))
    names = sorted(path.name for path in (tmp_path / "out").rglob("*.jsonl"))
    assert [found.rpartition("-00")[0].split("-0", 1)[1] for found in names] == [
        f"{number:04d}-of" for number in range(files)
    ]


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
    long = raw(list(range(1000)))

    def stream() -> Any:
        nonlocal taken
        for row in range(3000):
            taken += 1
            yield record(f"p{row}", row, output_ids=long, **spoken("x" * 2000, 0))
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
            "name": "",
        },
    ]
    assert rows["no thought"]["messages"][-1] == {"role": "assistant", "content": "Hello!", "name": ""}


def test_messages_earlier_turns_and_tools_stand_as_they_were(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["turns"]["messages"][:-1] == TURNS
    assert rows["tools"]["messages"][:-1] == CALLS
    assert json.loads(rows["tools"]["tools"]) == TOOLS
    assert rows["plain"]["tools"] == "[]"


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


def test_parquet_files_are_named_as_the_hub_names_them(table: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert [path.name for path in (tmp_path / "out" / "data").iterdir()] == ["train-00000-of-00001.parquet"]


# -- token ids: masks by hand ------------------------------------------------------------------------------------------
OPENED = {"prompt_ids": raw([1, 2, 90]), "output_ids": raw([11, 12, 91, 21, 99])}
"""Thinking on, Qwen3.5 and later: the prompt ends with <think> (90), the output has thought, </think> (91), answer,
end."""

CLOSED = {"prompt_ids": raw([1, 2, 90, 91]), "output_ids": raw([21, 99]), **spoken("Hi", 0)}
"""Thinking off: the prompt holds an empty thought."""

IN_THOUGHT = {"prompt_ids": raw([1, 2, 90]), "output_ids": raw([11, 12]), **CUT}
SECOND = {"prompt_ids": raw([1, 2, 21, 99, 3, 90]), "output_ids": raw([13, 91, 22, 99]), "turn": 1}
"""The second turn: its history as served, without the first one's thought."""

BY_HAND = [
    (record("on", 0, **OPENED), [1, 2, 90, 11, 12, 91, 21, 99], [0, 0, 0, 1, 1, 1, 1, 1]),
    (record("off", 1, **CLOSED), [1, 2, 90, 91, 21, 99], [0, 0, 0, 0, 1, 1]),
    (record("cut", 2, **IN_THOUGHT), [1, 2, 90, 11, 12], [0, 0, 0, 1, 1]),
    (record("on", 3, **SECOND), [1, 2, 21, 99, 3, 90, 13, 91, 22, 99], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]),
    (record("no prompt", 4, prompt_ids=raw([]), output_ids=raw([7, 99])), [7, 99], [1, 1]),
]

of_ids = pytest.mark.parametrize("name", ["specforge", "speculators"])


@of_ids
def test_ids_and_mask_are_as_made_by_hand(name: str, tmp_path: Path) -> None:
    """Zeros for the prompt, ones for the output: the sampled end token in, none invented, nothing shifted."""
    write(name, tmp_path / "out", [own for own, *_ in BY_HAND])
    assert [(row["input_ids"], row["loss_mask"]) for row in read(tmp_path / "out")] == [
        (ids, mask) for _, ids, mask in BY_HAND
    ]


@of_ids
def test_the_trainers_own_rules_accept_every_row(name: str, tmp_path: Path) -> None:
    """SpecForge 0.2 prompt_builder._prompt_from_record and has_consecutive_supervised_tokens; speculators 0.9
    preprocessing._passthrough_pretokenized: both take the lists as they are, and cut them at their length."""
    write(name, tmp_path / "out", [own for own, *_ in BY_HAND])
    for row, (_, ids, mask) in zip(read(tmp_path / "out"), BY_HAND, strict=True):
        assert all(type(number) is int for number in (*row["input_ids"], *row["loss_mask"]))
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert set(row["loss_mask"]) <= {0, 1}
        assert any(a and b for a, b in pairwise(row["loss_mask"]))
        assert (row["input_ids"][:4096], row["loss_mask"][:4096]) == (ids, mask)


@of_ids
@pytest.mark.parametrize(
    ("ids", "mask"), [("[1,2,3]", "[0,1]"), ("[1,2]", "[0,0]"), ("[1,2]", "[1,0]"), ("[1,2]", "[0,2]"), ("[]", "[]")]
)
def test_a_row_that_is_wrong_on_the_disk_is_found_when_it_is_read_back(
    name: str, ids: str, mask: str, tmp_path: Path
) -> None:
    made, _ = write(name, tmp_path / "out", [record("a", 0)])
    (file,) = (tmp_path / "out").rglob("*.jsonl")
    file.write_text(f'{{"id":"a","input_ids":{ids},"loss_mask":{mask}}}\n')
    with pytest.raises(ValueError, match="a: "):
        made.count(tmp_path / "out")


def test_specforge_has_no_column_that_anybody_could_take_for_an_argument(tmp_path: Path) -> None:
    write("specforge", tmp_path / "out", [BY_HAND[0][0]])
    assert list(read(tmp_path / "out")[0]) == ["id", "input_ids", "loss_mask", "finish_reason"]


def test_specforge_chat_has_no_column_that_a_template_would_be_given(tmp_path: Path) -> None:
    """All but conversations, id and tools become variables of the template; no template knows a `status`."""
    write("specforge-chat", tmp_path / "out", fit("specforge-chat"))
    rows = {row["id"]: row for row in read(tmp_path / "out")}
    assert {tuple(row) for row in rows.values()} == {("id", "conversations", "status", "tools")}
    assert {row["status"] for row in rows.values()} == {"success"}
    assert rows["plain"]["conversations"][-1] == {
        "role": "assistant",
        "content": "Hello there!",
        "reasoning_content": RECORDS[0].reasoning,
        "name": "",
    }
    assert rows["plain"]["conversations"][0] == {"role": "user", "content": "hi"}
    assert rows["no thought"]["conversations"][-1] == {"role": "assistant", "content": "Hello!", "name": ""}
    assert [json.loads(rows[name]["tools"]) for name in ("tools", "plain")] == [TOOLS, []]
    assert rows["tools"]["conversations"][1]["tool_calls"] == CALLS[1]["tool_calls"]


@pytest.mark.parametrize("name", ["specforge", "specforge-chat", "speculators", "messages", "openai-batch"])
def test_a_reader_knows_every_field_from_the_first_row(name: str, tmp_path: Path) -> None:
    """`datasets` 5 takes a file's form from its first 10 MB, and fails at a field, or a type, that comes later; but for
    lists of unlike objects (utils/json.py, find_mixed_struct_types_field_paths), which it reads as JSON."""
    row = Settings("abc", {"model": "Q", "sampling": {"temperature": 0.6}}, "vllm", "0.33", {})
    made: Format = plugins.load("formats", name)(several=False, settings={"abc": row})
    made.write(fit(name), tmp_path)
    rows = read(tmp_path)
    for turns in (row.pop(field) for row in rows for field in ("messages", "conversations") if field in row):
        assert len({frozenset(turn) for turn in turns}) > 1, "each row's turns are unlike"
    first, *others = (_form(found) for found in rows)
    assert [other - first for other in others if other - first] == []


def _form(value: Any, at: str = "") -> set[tuple[str, str]]:
    """The places in a row with the types found there."""
    if isinstance(value, dict):
        return {found for name, inner in value.items() for found in _form(inner, f"{at}.{name}")}
    if isinstance(value, list):
        return {found for inner in value for found in _form(inner, f"{at}[]")}
    return {(at, type(value).__name__)}


def test_speculators_rows_say_where_they_come_from(tmp_path: Path) -> None:
    row = Settings("abc", {"model": "Qwen", "sampling": {"temperature": 0.6, "max_tokens": 99}}, "vllm", "0.33", {})
    made: Format = plugins.load("formats", "speculators")(several=True, settings={"abc": row})
    made.write([record("on", 3, **SECOND), record("off", 4, settings="lost")], tmp_path)
    found, lost = read(tmp_path)
    assert (found["id"], found["primary_id"], found["text"]) == ("on#0.1", "on", TEXT)
    assert found["metadata"] == {
        "idx": 3,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 40, "total_tokens": 43},
        "endpoint": "server 0",
        "model": "Qwen",
        "thinking": True,
        "sampling_params": {"temperature": 0.6, "max_tokens": 99},
        "settings": "abc",
    }
    assert (lost["metadata"]["model"], lost["metadata"]["sampling_params"]) == ("", {})


# -- openai-batch ------------------------------------------------------------------------------------------------------
def test_batch_lines_hold_a_chat_completion_and_failures_stand_apart(tmp_path: Path) -> None:
    made, _ = write("openai-batch", tmp_path / "out", [record("b1", 0), record("cut", 1, **CUT)])
    failure = record("b2", 2, labels=("prompt_too_long",), error="9,000 tokens do not fit")
    made.write_failures([failure], tmp_path / "out")
    errors, first, second = read(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "errors-00000-of-00001.jsonl",
        "output-00000-of-00001.jsonl",
    ]
    assert (first["custom_id"], first["error"], first["response"]["status_code"]) == ("b1", None, 200)
    body = first["response"]["body"]
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there!", "reasoning_content": RECORDS[0].reasoning},
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"] == 43
    assert second["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert (errors["custom_id"], errors["response"]) == ("b2", None)
    assert errors["error"] == {"code": "prompt_too_long", "message": "9,000 tokens do not fit"}
    assert len({line["id"] for line in (errors, first, second)}) == 3


def test_batch_input_lines_and_output_lines_meet_by_custom_id(tmp_path: Path) -> None:
    """In as prompts, out as an export; the order may differ, the join may not."""
    bodies: dict[str, Any] = {
        f"b{n}": {"messages": [{"role": "user", "content": f"{n}?"}], "tools": TOOLS} for n in range(5)
    }
    lines: list[dict[str, Any]] = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat", "body": body} for name, body in bodies.items()
    ]
    prompts = jsonl(tmp_path / "in.jsonl", lines)
    records = []
    for line in rows_of(prompts, COLUMNS):
        messages, offered = messages_of(line.data)
        records.append(record(identity(line.data).key, line.row, messages=messages, tools=offered))
    write("openai-batch", tmp_path / "out", records[::-1])
    answered = {line["custom_id"]: line["response"]["body"] for line in read(tmp_path / "out")}
    assert set(answered) == set(bodies)
    for name, body in bodies.items():
        (own,) = [found for found in records if found.key == name]
        assert json.loads(bytes(own.messages)) == body["messages"]
        assert json.loads(bytes(own.tools)) == TOOLS

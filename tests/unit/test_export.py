"""Exports: accepted records in the prompts' order, counted again, whole or not at all."""

import errno
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from tests.exports import rows_of, stored
from tests.unit.make import record
from tokenmill import plugins
from tokenmill.core.judge import BROKEN, Rules
from tokenmill.core.records import NULL, Parts, Record
from tokenmill.errors import GateError, StoreError, UsageError
from tokenmill.export import chosen, export, suggestion
from tokenmill.folder import RunFolder
from tokenmill.formats.base import Format, Split
from tokenmill.formats.messages import Messages
from tokenmill.formats.parquet import Parquet
from tokenmill.machine.modelfiles import vocabulary_fingerprint
from tokenmill.seal import seal
from tokenmill.settings import Settings
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
            "name": "",
        },
    ]
    assert (first["tools"], first["finish_reason"], third["finish_reason"]) == (
        '[{"type":"function"}]',
        "stop",
        "length",
    )
    assert plain["messages"][-1] == {"role": "assistant", "content": "Hi", "name": ""}
    assert plain["tools"] == "[]"


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
    known = "specforge, specforge-chat, speculators, messages, openai-batch, parquet"
    assert caught.value.fix == f"one of: {known}"
    assert not (tmp_path / "out").exists()


class Forgetful(Messages):
    """Says less than it wrote."""

    def count(self, folder: Path, split: Split = "train") -> int:
        return super().count(folder, split) - 1


class Torn(Messages):
    """The last line loses its end on the way to the disk."""

    def write(self, records: Iterable[Record], folder: Path, split: Split = "train") -> int:
        rows = super().write(records, folder, split)
        whole = (folder / "messages.jsonl").read_bytes()
        (folder / "messages.jsonl").write_bytes(whole[:-9])
        return rows


class Full(Messages):
    """The disk is full half-way."""

    def write(self, records: Iterable[Record], folder: Path, split: Split = "train") -> int:
        super().write(records, folder, split)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Forgetful, "4 rows were written to .*, and 3 are found"),
        (Torn, "does not read back: messages.jsonl: the last line does not end"),
        (Full, "No space left"),
    ],
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


class Dying(Messages):
    """The process is killed in mid-write."""

    def row(self, record: Record) -> dict[str, Any]:
        if record.row == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().row(record)


def test_a_killed_export_leaves_no_dataset_and_the_next_one_no_trace_of_it(tmp_path: Path) -> None:
    everything = stored(tmp_path / "more", [record(str(row), row) for row in range(9)])
    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from tokenmill import plugins; from tokenmill.core.judge import Rules\n"
        "from tokenmill.export import export; from tokenmill.folder import RunFolder\n"
        f"plugins.TABLES['formats']['dying'] = '{__name__}:Dying'\n"
        f"export(RunFolder(Path({str(everything.path)!r})), 'dying', Path({str(out)!r}), Rules(frozenset()), samples=1)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    (left,) = tmp_path.glob(".out.*")
    assert left.name.startswith(f".out.{socket.gethostname()}-")
    assert export(everything, "messages", out, Rules(), samples=1) == 9
    assert list(tmp_path.glob(".out.*")) == []


@pytest.mark.parametrize("name", plugins.names("formats"))
@pytest.mark.parametrize("limit", [1000, 20_000])
def test_a_disk_that_is_full_on_the_way_leaves_no_dataset(tmp_path: Path, name: str, limit: int) -> None:
    """A real one: no file may grow beyond the limit, in bytes."""
    seed = random.randrange(1 << 32)
    noise = random.Random(seed).randbytes(400).hex()
    run = stored(
        tmp_path, (record(str(row), row, text=f"{noise} {row}", parts=Parts(0, 0, 0, 700)) for row in range(200))
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    choice = chosen(validation=0.5)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(StoreError, match="out could not be written: File too large"):
            export(run, name, tmp_path / "out", Rules(), samples=1, choice=choice)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [run.path], f"seed {seed}"
    assert export(run, name, tmp_path / "out", Rules(), samples=1, choice=choice) == 200


def test_two_exports_to_one_place_at_once(run: RunFolder, tmp_path: Path) -> None:
    """One of them has it, the other is told so, and nobody's half is left."""
    code = (
        "import sys; from pathlib import Path; from tokenmill.core.judge import Rules; from tokenmill.folder import *\n"
        "from tokenmill.export import export; from tokenmill.errors import UsageError\n"
        "sys.stdin.readline()\n"
        f"try: export(RunFolder(Path({str(run.path)!r})), sys.argv[1], Path({str(tmp_path / 'out')!r}), Rules(), "
        "samples=1)\n"
        "except UsageError as error: print(error); sys.exit(2)"
    )
    forms = ["messages", "specforge"]
    both = [
        subprocess.Popen([sys.executable, "-c", code, form], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for form in forms
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0] for process in both]
    won = [form for form, process in zip(forms, both, strict=True) if process.returncode == 0]
    assert len(won) == 1, told
    assert any("out exists already" in text for text in told)
    assert len(rows_of(tmp_path / "out")) == (4 if won == ["messages"] else 3)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_nothing_is_written_where_the_run_keeps_its_records(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.data)
    for out in (run.data / "out", tmp_path / "link" / "out"):
        with pytest.raises(UsageError, match="lies where the run keeps its records"):
            export(run, "parquet", out, Rules(), samples=1)
    assert export(run, "parquet", run.path / "out", Rules(), samples=1) == 4
    assert export(run, "parquet", tmp_path / "again", Rules(), samples=1) == 4


KEYS = ["a/b/../c", "two\nlines", "\t", "ключ 🔑", "#0.1", "~2", "x" * 100_000, "{{ key }}", "|`<b>", "NULL", "1e5"]


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_unusual_keys_come_back_as_they_are(tmp_path: Path, name: str) -> None:
    run = stored(tmp_path, (record(key, row) for row, key in enumerate(KEYS)))
    assert export(run, name, tmp_path / "out", Rules(), samples=1) == len(KEYS)
    if name == "parquet":
        found = pq.read_table(tmp_path / "out" / "data").column("key").to_pylist()
    else:
        found = [row.get("custom_id") or row["id"] for row in rows_of(tmp_path / "out")]
    assert found == KEYS


def test_a_folder_whose_name_is_no_text_can_be_written(run: RunFolder, tmp_path: Path) -> None:
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/out\xff"))
    assert export(run, "messages", out, Rules(), samples=1) == 4
    assert (out / "README.md").read_text(encoding="utf-8").count("# out?") == 1


@pytest.mark.parametrize(
    ("records", "purpose", "form"),
    [
        ([record()], "drafter", "specforge"),
        ([record()], "sft", "messages"),
        ([record("gone", labels=("aborted",), prompt_ids=NULL, output_ids=NULL), record("b", 1)], "", "specforge"),
        ([record(output_ids=NULL)], "drafter", "specforge-chat"),
        ([], "drafter", "specforge"),
    ],
)
def test_the_export_that_a_run_is_for_is_suggested(
    tmp_path: Path, records: list[Record], purpose: str, form: str
) -> None:
    folder = stored(tmp_path / "a b", records)
    if purpose:
        text = f'name = "r"\n[model]\npath = "m"\n[prompts]\npath = "p"\n[judge]\npurpose = "{purpose}"\n'
        folder.config.write_text(text)
    assert suggestion(folder) == f"tokenmill export '{folder.path}' {form} OUT"


# -- choices -----------------------------------------------------------------------------------------------------------
def ids(path: Path) -> list[str]:
    return [row["id"] for row in rows_of(path)]


@pytest.mark.parametrize("name", ["specforge", "speculators", "specforge-chat"])
def test_validation_is_a_folder_of_its_own_disjoint_and_the_same_whatever_else_is_there(
    tmp_path: Path, name: str
) -> None:
    """speculators reads all .jsonl below the folder it is given: a split beside the other would be trained on."""
    records = [record(f"p{row}", row, sample=sample) for row in range(200) for sample in range(2)]
    folder = stored(tmp_path, records)
    choice = chosen(validation=0.2)
    assert export(folder, name, tmp_path / "all", Rules(), samples=2, choice=choice) == 400
    train, held = ids(tmp_path / "all" / "train"), ids(tmp_path / "all" / "validation")
    assert sorted(train + held) == sorted(f"{own.key}#{own.sample}.0" for own in records)
    assert 50 < len(held) < 110, "a fifth"
    keys = [{name.split("#")[0] for name in split} for split in (train, held)]
    assert keys[0].isdisjoint(keys[1]), "completions of one prompt stand on one side"
    assert train == sorted(train, key=lambda name: int(name[1:].split("#")[0])), "in the prompts' order"

    fewer = stored(tmp_path / "fewer", records[::6])
    export(fewer, name, tmp_path / "some", Rules(), samples=2, choice=choice)
    assert set(ids(tmp_path / "some" / "validation")) <= set(held)
    assert set(ids(tmp_path / "some" / "train")) <= set(train)


def test_a_cap_holds_for_the_share_of_all_that_goes_out(tmp_path: Path) -> None:
    cut: dict[str, Any] = {"labels": ("truncated_in_thinking",), "finish_reason": "length"}
    folder = stored(tmp_path, [record(f"p{row}", row, **(cut if row % 2 else {})) for row in range(100)])
    told: list[str] = []
    choice = chosen(cap=["truncated=0.1"], dedup=False)
    assert export(folder, "specforge", tmp_path / "out", Rules(), samples=1, choice=choice, tell=told.append) == 55
    assert "  left out: 45 over the cap of truncated" in told
    rows = rows_of(tmp_path / "out" / "train")
    assert [row["finish_reason"] for row in rows].count("length") == 5
    assert [int(row["id"][1:]) for row in rows] == sorted(int(row["id"][1:]) for row in rows)
    assert export(folder, "specforge", tmp_path / "b", Rules(), samples=1, choice=chosen(cap=["truncated=0.6"])) == 100


def test_equal_rows_go_out_once_and_dropped_labels_not_at_all(tmp_path: Path) -> None:
    same = [record("a", 0), record("b", 1), record("c", 2, output_ids=msgspec.Raw(b"[4,5,6,8]"))]
    cut = record("d", 3, labels=("truncated_in_answer",), finish_reason="length")
    folder = stored(tmp_path, [*same, cut])
    told: list[str] = []
    choice = chosen(drop="truncated", dedup=True)
    assert export(folder, "specforge", tmp_path / "out", Rules(), samples=1, choice=choice, tell=told.append) == 2
    assert ids(tmp_path / "out" / "train") == ["a", "c"]
    assert told[0] == "2 rows (2 train) of 4 records"
    assert {"  left out: 1 equal rows", "  left out: 1 dropped: truncated"} <= set(told)


def test_rows_without_ids_are_left_out_of_formats_of_ids_and_none_left_is_an_error(tmp_path: Path) -> None:
    bare: dict[str, Any] = {"prompt_ids": NULL, "output_ids": NULL}
    told: list[str] = []
    some = stored(tmp_path / "some", [record("a", 0), record("b", 1, **bare)])
    assert export(some, "speculators", tmp_path / "out", Rules(), samples=1, tell=told.append) == 1
    assert "  left out: 1 no token ids" in told
    none = stored(tmp_path / "none", [record("b", 1, **bare)])
    with pytest.raises(GateError, match="nothing is left to export of 1 records: 1 no token ids") as caught:
        export(none, "specforge", tmp_path / "no", Rules(), samples=1)
    assert "export messages or parquet" in caught.value.fix
    assert not (tmp_path / "no").exists()
    assert export(none, "messages", tmp_path / "text", Rules(), samples=1) == 1


def test_all_rejected_is_an_error_that_says_why(tmp_path: Path) -> None:
    folder = stored(tmp_path, [record(str(row), row, labels=("empty",)) for row in range(20)])
    with pytest.raises(GateError, match="20 records: 20 rejected: empty"):
        export(folder, "messages", tmp_path / "out", Rules(), samples=1)


def test_a_chat_format_that_templates_close_leaves_cut_rows_out_and_messages_tells_of_them(tmp_path: Path) -> None:
    cut = record("b", 1, labels=("truncated_in_answer",), finish_reason="length")
    folder = stored(tmp_path, [record("a", 0), cut])
    told: list[str] = []
    assert export(folder, "specforge-chat", tmp_path / "chat", Rules(), samples=1) == 1
    assert export(folder, "messages", tmp_path / "text", Rules(), samples=1, tell=told.append) == 2
    assert any("1 rows end at max_tokens" in line and "--drop truncated" in line for line in told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"cap": ["truncated"]}, "is not LABEL=SHARE"),
        ({"cap": ["truncated=2"]}, "2 is no share"),
        ({"validation": 1.0}, "1 is no share"),
        ({"drop": "loops"}, "no label named loops"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(words: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        chosen(**words)


def test_text_cannot_be_cut_at_a_length(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="messages holds text"):
        export(run, "messages", tmp_path / "out", Rules(), samples=1, choice=chosen(max_length=9))


def test_the_remains_of_a_killed_export_are_cleared_away_and_a_living_ones_are_not(
    run: RunFolder, tmp_path: Path
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname()
    left = [tmp_path / f".out.{host}-{dead.pid}", tmp_path / f".out.{host}-1", tmp_path / ".out.elsewhere-1"]
    for folder in left:
        folder.mkdir()
    export(run, "messages", tmp_path / "out", Rules(), samples=1)
    assert [folder.exists() for folder in left] == [False, True, True]


# -- the card ----------------------------------------------------------------------------------------------------------
MADE = Settings(
    "abc",
    {"model": "Qwen", "model_fingerprint": "f00d", "thinking": True, "sampling": {"temperature": 0.6}},
    "sglang",
    "0.5.11",
    {"mem-fraction-static": 0.9},
    "beef",
)


def test_the_card_says_what_made_it_what_is_in_it_and_whose_tokens(tmp_path: Path) -> None:
    folder = stored(tmp_path, [*(record(str(n), n, accept_length=2.5) for n in range(3)), RECORDS[0]], [MADE])
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<think>"}]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 8}}))
    choice = chosen(validation=0.5)
    export(folder, "parquet", tmp_path / "out", Rules(), samples=1, choice=choice, model=model)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for split in ("train", "validation"):
        assert f"  - split: {split}\n    path: data/{split}-*.parquet\n" in card
        assert list((tmp_path / "out" / "data").glob(f"{split}-00000-of-00001.parquet"))
    for line in (
        "| model | Qwen |",
        "| engine | sglang 0.5.11 |",
        "| flags | `mem-fraction-static 0.9` |",
        "| thinking | on |",
        "| sampling | `temperature 0.6` |",
        "| chat template, sha256 | beef |",
        "| truncated_in_answer | 1 |",
        "| tokens accepted a step, mean | 2.50 |",
        "| tokens | 3 |",
        f"| tokens, fingerprint | {vocabulary_fingerprint({0: 'a', 1: 'b', 2: '<think>'})} |",
        "| ids of the model's head | 8 |",
        "| 16 to 63 | 4 |",
    ):
        assert line in card


def test_memory_stays_flat_and_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3,000 rows with 100 KB each at most a few are held at once."""
    monkeypatch.setattr("tokenmill.steps.AFTER_S", 0.0)
    big = msgspec.Raw(b"[" + b"1," * 5_000 + b"2]")
    folder = stored(tmp_path, (record(str(row), row, output_ids=big) for row in range(3000)))
    told: list[str] = []
    tracemalloc.start()
    export(folder, "specforge", tmp_path / "out", Rules(), samples=1, choice=chosen(validation=0.1), tell=told.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert told[0].startswith("read 1 records")

"""Is a dataset worth training on? The reference run's bad set fails with the right sentence; good sets pass."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.unit.make import jsonl, record
from tokenmill.core.judge import Rules
from tokenmill.core.records import Parts, Record
from tokenmill.errors import UsageError
from tokenmill.export import export
from tokenmill.folder import RunFolder, State
from tokenmill.inspection import Inspection, inspect
from tokenmill.seal import seal
from tokenmill.store import line_of

THOUGHT = "First I look at it from one side, and then, since that is not enough, from the other side as well."
LOOP = "I should check this again. " * 300


def turns(**answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, {"role": "assistant", **answer}]


def masked(supervised: int, prompt: int = 50) -> dict[str, Any]:
    return {"input_ids": [1] * (prompt + supervised), "loss_mask": [0] * prompt + [1] * supervised}


def thinking(number: int = 0) -> dict[str, Any]:
    return {"id": f"r{number}", "messages": turns(content=f"Answer {number}.", reasoning_content=THOUGHT)}


def looked(folder: Path, rows: Iterable[Any]) -> Inspection:
    return inspect(jsonl(folder / "data.jsonl", rows))


# -- the reference run's bad set ---------------------------------------------------------------------------------------
BAD_SET = [masked(6)] * 87 + [masked(400 + n) for n in range(13)]


def as_jsonl(folder: Path, rows: list[Any]) -> Path:
    return jsonl(folder / "set.jsonl", rows)


def as_zst(folder: Path, rows: list[Any]) -> Path:
    path = folder / "set.jsonl.zst"
    path.write_bytes(zstandard.compress(jsonl(folder / "plain", rows).read_bytes()))
    return path


def as_parquet(folder: Path, rows: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "set.parquet")
    return folder / "set.parquet"


FORMS = [as_jsonl, as_zst, as_parquet]
Form = Callable[[Path, list[Any]], Path]


@pytest.mark.parametrize("form", FORMS)
def test_a_set_of_empty_thoughts_fails_with_its_mask_sum(tmp_path: Path, form: Form) -> None:
    found = inspect(form(tmp_path, BAD_SET))
    assert (found.rows, found.verdict) == (100, "fail")
    assert found.reasons[0] == "87% of the rows train exactly 6 tokens"
    assert found.labels == {"short_mask": 87}
    assert found.supervised_tokens is not None
    assert (found.supervised_tokens["p1"], found.supervised_tokens["p50"]) == (6, 6)
    assert found.supervised_tokens["histogram"]["1-7"] == 87
    assert len(found.examples) == 3


EMPTY_THOUGHTS = [
    {"messages": turns(content="<think>\n\n</think>\n\nOK.")},
    {"messages": turns(content="OK.", reasoning_content="")},
    {"messages": turns(content="OK.", reasoning=None)},
    {"messages": turns(content="OK.", thinking=" \n")},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "<think></think>OK."}]},
]


@pytest.mark.parametrize("row", EMPTY_THOUGHTS)
@pytest.mark.parametrize("form", [as_jsonl, as_parquet])
def test_the_same_set_as_messages_fails_for_its_empty_thoughts(tmp_path: Path, form: Form, row: dict[str, Any]) -> None:
    found = inspect(form(tmp_path, [row] * 87 + [thinking(n) for n in range(13)] if form is as_jsonl else [row] * 87))
    assert found.verdict == "fail"
    assert found.labels == {"empty_reasoning": 87}
    assert found.reasons[0].startswith("87 of ")
    assert found.reasons[0].endswith("are empty_reasoning")


# -- good sets ---------------------------------------------------------------------------------------------------------
GOOD: list[dict[str, Any]] = [
    thinking(),
    {"messages": turns(content=f"<think>\n{THOUGHT}\n</think>\n\nAn answer.")},
    {"messages": turns(content="An answer without a thought, from a set that has none.")},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "An answer."}]},
    {"messages": turns(content=f"<think>\n{THOUGHT}"), "finish_reason": "length"},
    masked(400),
]


@pytest.mark.parametrize("row", GOOD)
@pytest.mark.parametrize("form", FORMS)
def test_good_sets_pass(tmp_path: Path, form: Form, row: dict[str, Any]) -> None:
    found = inspect(form(tmp_path, [row] * 30))
    assert (found.rows, found.verdict, found.reasons, found.examples) == (30, "pass", [], [])


def test_a_thought_in_another_script_is_no_empty_one(tmp_path: Path) -> None:
    row = {
        "messages": turns(
            content="好的。",
            reasoning_content="我们先从一个角度来看这个问题然后再从另一个角度来看直到得出正确的结论为止并检查一遍",
        )
    }
    assert looked(tmp_path, [row] * 30).verdict == "pass"


# -- one row -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "label"),
    [
        (masked(0), "empty"),
        (masked(15), "short_mask"),
        ({**masked(40), "loss_mask": [1]}, "bad_prompt"),
        ({"messages": turns(content="")}, "empty"),
        ({"messages": turns(content="", reasoning_content=THOUGHT)}, "empty_answer"),
        ({"messages": turns(content=LOOP)}, "repetition"),
        ({"messages": turns(content=f"{THOUGHT}</think>a</think>b")}, "orphan_think_tag"),
        ({"messages": turns(content="a\0b")}, "bad_text"),
        ({"messages": turns(content="a")[:1]}, "bad_prompt"),
        ({"messages": []}, "bad_prompt"),
        ({"prompt": "hi"}, "bad_prompt"),
        (b"not json", "bad_prompt"),
        (b'{"messages":[{"role":"assistant","content":"\\ud835"}]}', "bad_prompt"),
        ({**masked(40), "loss_mask": [False] * 50 + [True] * 40}, None),
        ({**masked(40), "loss_mask": [-100] * 50 + [1] * 40}, "bad_prompt"),
    ],
)
def test_what_is_wrong_with_a_row_is_labelled(tmp_path: Path, row: Any, label: str | None) -> None:
    found = looked(tmp_path, [row])
    assert found.verdict == ("fail" if label else "pass")
    assert label in found.labels if label else found.labels == {}


@pytest.mark.parametrize(("bad", "verdict"), [(0, "pass"), (5, "pass"), (6, "warn"), (20, "warn"), (21, "fail")])
def test_the_share_of_bad_rows_decides(tmp_path: Path, bad: int, verdict: str) -> None:
    found = looked(tmp_path, [{"messages": turns(content="")}] * bad + [thinking(n) for n in range(100 - bad)])
    assert found.verdict == verdict
    assert len(found.examples) == min(3, bad)


def test_examples_name_their_rows(tmp_path: Path) -> None:
    found = looked(
        tmp_path, [thinking(), {"id": "odd", "messages": turns(content=LOOP)}, {"messages": turns(content="")}]
    )
    assert [(example["id"], example["label"]) for example in found.examples] == [
        ("odd", "repetition"),
        ("data.jsonl:3", "empty"),
    ]
    assert len(found.examples[0]["text"]) == 300


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no row"):
        looked(tmp_path, [])
    with pytest.raises(UsageError, match="no such file"):
        inspect(tmp_path / "none.jsonl")


# -- runs and their exports --------------------------------------------------------------------------------------------
SPANS = Parts(7, 7 + len(THOUGHT), 15 + len(THOUGHT), 19 + len(THOUGHT))
RECORDS: list[Record] = [
    *(record(f"good{n}", n, text=f"<think>{THOUGHT}</think>Yes.", parts=SPANS) for n in range(8)),
    record("loop", 8, text=LOOP, repetition=60.0),
    record("gone", 9, text="", labels=("aborted",), error="after 3 attempts: HTTP 500"),
]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_state(State())
    for number, rows in enumerate((RECORDS[:5], RECORDS[5:]), 1):
        (folder.data / f"journal-{number:06d}.jsonl").write_bytes(b"".join(map(line_of, rows)))
    seal(folder.data / "journal-000001.jsonl", folder.data / "part-000001.parquet")
    return folder


def test_a_run_is_judged_by_all_its_ended_records(run: RunFolder) -> None:
    found = inspect(run.path)
    assert (found.rows, found.verdict, found.labels) == (10, "warn", {"repetition": 1, "aborted": 1})
    assert {(example["id"], example["text"][:20]) for example in found.examples} == {
        ("loop", LOOP[:20]),
        ("gone", "after 3 attempts: HTTP 500"[:20]),
    }
    assert found.supervised_tokens is not None
    assert found.supervised_tokens["p50"] == 40


def test_a_run_is_judged_by_its_own_rules(run: RunFolder) -> None:
    assert inspect(run.path, Rules(max_repetition=100.0)).labels == {"aborted": 1}


@pytest.mark.parametrize(("form", "file"), [("messages", "messages.jsonl"), ("parquet", ""), ("parquet", "data")])
def test_what_was_exported_passes(run: RunFolder, tmp_path: Path, form: str, file: str) -> None:
    rules = Rules()
    assert export(run, form, tmp_path / "out", rules, samples=1) == 8
    found = inspect(tmp_path / "out" / file)
    assert (found.rows, found.verdict, found.labels) == (8, "pass", {})

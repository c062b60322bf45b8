"""Is a dataset worth training on? The reference run's bad set fails with the right sentence; good sets pass."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.exports import raw, stored
from tests.unit.make import jsonl, record
from tokenmill.core.judge import Rules
from tokenmill.core.records import Parts, Record
from tokenmill.errors import UsageError
from tokenmill.export import export
from tokenmill.folder import RunFolder, State
from tokenmill.inspecting.verdict import Inspection
from tokenmill.inspection import inspect, inspect_any
from tokenmill.seal import seal
from tokenmill.store import line_of

THOUGHT = "First I look at it from one side, and then, since that is not enough, from the other side as well."
LOOP = "I should check this again. " * 300


def turns(**answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, {"role": "assistant", **answer}]


def masked(supervised: int, prompt: int = 50, number: int = 0) -> dict[str, Any]:
    ids = [*range(prompt), *(1000 + number + n for n in range(supervised))]
    return {"input_ids": ids, "loss_mask": [0] * prompt + [1] * supervised}


def numbered(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The row with an answer of its own: rows of a real set are not alike."""
    text = json.dumps(row).replace("An answer", f"Answer {number}").replace("OK.", f"OK {number}.")
    found: dict[str, Any] = json.loads(text.replace("First I look", f"First, {number}, I look"))
    if "input_ids" in row:
        found["input_ids"] = [token + number for token in row["input_ids"]]
    return found


def thinking(number: int = 0) -> dict[str, Any]:
    return {"id": f"r{number}", "messages": turns(content=f"Answer {number}.", reasoning_content=THOUGHT)}


def looked(folder: Path, rows: Iterable[Any]) -> Inspection:
    return inspect(jsonl(folder / "data.jsonl", rows))


# -- the reference run's bad set ---------------------------------------------------------------------------------------
BAD_SET = [masked(6, number=n) for n in range(87)] + [masked(400 + n) for n in range(13)]


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
    assert found.reasons[0].startswith("87% of the rows train exactly 6 tokens: an empty think block")
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
    rows = [numbered(row, n) for n in range(87)]
    found = inspect(form(tmp_path, [*rows, *(thinking(n) for n in range(13))] if form is as_jsonl else rows))
    assert found.verdict == "fail"
    assert found.labels == {"empty_reasoning": 87}
    assert found.reasons[0].startswith("87 of ")
    assert "have an empty thought" in found.reasons[0]


# -- good sets ---------------------------------------------------------------------------------------------------------
GOOD: list[dict[str, Any]] = [
    thinking(),
    {"messages": turns(content=f"<think>\n{THOUGHT}\n</think>\n\nAn answer.")},
    {"messages": turns(content="An answer without a thought, from a set that has none.")},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "An answer."}]},
    masked(400),
]


@pytest.mark.parametrize("row", GOOD)
@pytest.mark.parametrize("form", FORMS)
def test_good_sets_pass(tmp_path: Path, form: Form, row: dict[str, Any]) -> None:
    found = inspect(form(tmp_path, [numbered(row, n) for n in range(30)]))
    assert (found.rows, found.verdict, found.reasons, found.examples) == (30, "pass", [], [])


@pytest.mark.parametrize(("cut", "verdict"), [(15, "pass"), (16, "warn")])
def test_cut_off_thoughts_are_good_rows_but_not_most_of_them(tmp_path: Path, cut: int, verdict: str) -> None:
    row = {"messages": turns(content=f"<think>\n{THOUGHT}"), "finish_reason": "length"}
    found = looked(tmp_path, [*(numbered(row, n) for n in range(cut)), *(thinking(n) for n in range(30 - cut))])
    assert (found.verdict, found.labels) == (verdict, {"truncated_in_thinking": cut})
    assert found.closed_thoughts == round(1 - cut / 30, 4)


def test_a_thought_in_another_script_is_no_empty_one(tmp_path: Path) -> None:
    row = {
        "messages": turns(
            content="好的。",
            reasoning_content="我们先从一个角度来看这个问题然后再从另一个角度来看直到得出正确的结论为止并检查一遍",
        )
    }
    assert looked(tmp_path, [row]).verdict == "pass"


# -- rendered text -----------------------------------------------------------------------------------------------------
def rendered(answer: str, end: str = "<|im_end|>\n") -> dict[str, Any]:
    """As SpecForge takes it with `is_preformatted`."""
    history = "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n1.<|im_end|>\n"
    return {"id": "r", "text": f"{history}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{answer}{end}"}


def test_of_rendered_text_the_last_answer_is_looked_at(tmp_path: Path) -> None:
    found = looked(tmp_path, [rendered(f"<think>\n{THOUGHT}\n</think>\n\nAnswer {n}.") for n in range(30)])
    assert (found.rows, found.verdict, found.labels, found.thoughts) == (30, "pass", {}, {"closed": 30})
    assert found.duplicates == {"prompts": 29, "responses": 0, "rows": 0}
    assert found.shapes == {"conversation": 30}


@pytest.mark.parametrize(
    ("row", "label"),
    [
        (rendered("<think>\n\n</think>\n\nOK."), "empty_reasoning"),
        (rendered(f"<think>\n{THOUGHT}", end=""), "truncated_in_thinking"),
        (rendered(LOOP), "repetition"),
        ({"text": LOOP}, "repetition"),
        (
            {"text": f"<｜User｜>hi<｜Assistant｜><think>\n{THOUGHT}\n</think>a</think>b<｜end▁of▁sentence｜>"},
            "orphan_think_tag",
        ),
        ({"text": ""}, "bad_row"),
        ({"text": 5}, "bad_row"),
    ],
)
def test_what_is_wrong_with_rendered_text_is_labelled(tmp_path: Path, row: Any, label: str) -> None:
    assert looked(tmp_path, [thinking(), row]).labels == {label: 1}


# -- one row -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "label"),
    [
        (masked(0), "empty"),
        (masked(15), "short_mask"),
        ({**masked(40), "loss_mask": [1]}, "bad_row"),
        ({"messages": turns(content="")}, "empty"),
        ({"messages": turns(content="", reasoning_content=THOUGHT)}, "empty_answer"),
        ({"messages": turns(content=LOOP)}, "repetition"),
        ({"messages": turns(content=f"{THOUGHT}</think>a</think>b")}, "orphan_think_tag"),
        ({"messages": turns(content="a\0b")}, "bad_text"),
        ({"messages": turns(content="a")[:1]}, "bad_row"),
        ({"messages": []}, "bad_row"),
        ({"prompt": "hi"}, "bad_row"),
        ({"id": 7}, "bad_row"),
        (b"[1, 2]", "bad_row"),
        ({**masked(40), "input_ids": [-1] * 90}, "bad_row"),
        ({**masked(40), "input_ids": ["a"] * 90}, "bad_row"),
        ({**masked(40), "input_ids": [1 << 70] * 90}, "bad_row"),
        (b"not json", "bad_row"),
        (b'{"messages":[{"role":"assistant","content":"\\ud835"}]}', "bad_row"),
        ({**masked(40), "loss_mask": [False] * 50 + [True] * 40}, None),
        ({**masked(40), "loss_mask": [-100] * 50 + [1] * 40}, "bad_row"),
    ],
)
def test_what_is_wrong_with_a_row_is_labelled(tmp_path: Path, row: Any, label: str | None) -> None:
    found = looked(tmp_path, [masked(300), row])
    assert found.verdict == ("fail" if label else "pass")
    assert label in found.labels if label else found.labels == {}
    assert found.bad_rows == (label == "bad_row")
    assert [example.label for example in found.examples] == ([label] if label else [])


@pytest.mark.parametrize(("bad", "verdict"), [(0, "pass"), (5, "pass"), (6, "warn"), (20, "warn"), (21, "fail")])
def test_the_share_of_bad_rows_decides(tmp_path: Path, bad: int, verdict: str) -> None:
    found = looked(tmp_path, [{"messages": turns(content="")}] * bad + [thinking(n) for n in range(100 - bad)])
    assert found.verdict == verdict
    assert [example.label for example in found.examples].count("empty") == min(3, bad)


def test_examples_name_their_rows(tmp_path: Path) -> None:
    found = looked(
        tmp_path, [thinking(), {"id": "odd", "messages": turns(content=LOOP)}, {"messages": turns(content="")}]
    )
    assert [(example.id, example.label) for example in found.examples] == [
        ("odd", "repetition"),
        ("data.jsonl:3", "empty"),
    ]
    assert len(found.examples[0].text) == 300


def test_three_examples_of_each_kind(tmp_path: Path) -> None:
    bad = [{"messages": turns(content=LOOP + str(n))} for n in range(5)] + [masked(0, number=n) for n in range(5)]
    found = looked(tmp_path, [*bad, *[b"no json"] * 5, masked(300)])
    assert Counter(example.label for example in found.examples) == {"repetition": 3, "empty": 3, "bad_row": 3}
    assert [example.id for example in found.examples if example.label == "bad_row"] == [
        f"data.jsonl:{line}" for line in (11, 12, 13)
    ]


# -- what a set is as a whole ------------------------------------------------------------------------------------------
def test_responses_that_repeat_are_counted_and_shown(tmp_path: Path) -> None:
    rows = [{"messages": turns(content=f"Answer {n // 2}.")} for n in range(20)]
    found = looked(tmp_path, [*rows, *({"messages": turns(content=f"Another {n}.")} for n in range(80))])
    assert found.duplicates == {"prompts": 99, "responses": 10, "rows": 10}
    assert found.verdict == "warn"
    assert "10 of 100 rows (10.0%) have a response that was there before" in found.reasons[0]
    assert [example.id for example in found.examples] == ["data.jsonl:2", "data.jsonl:4", "data.jsonl:6"]


def test_a_set_of_one_response_fails(tmp_path: Path) -> None:
    found = looked(tmp_path, [masked(40)] * 20)
    assert (found.verdict, found.duplicates) == ("fail", {"prompts": 19, "responses": 19, "rows": 19})
    assert "the most frequent one is there 20 times" in found.reasons[0]


def test_what_a_maximum_length_clips_is_told(tmp_path: Path) -> None:
    rows = [masked(3000, prompt=1100, number=n) for n in range(4)] + [masked(100, prompt=2040, number=9)]
    found = looked(tmp_path, rows)
    assert found.clipped is not None
    behind = 4 * (4100 - 2048) + (2140 - 2048)
    assert found.clipped["2048"] == {"tokens": round(behind / 12100, 4), "rows": 5, "rows_emptied": 1}
    assert found.clipped["4096"] == {"tokens": round(16 / 12100, 4), "rows": 4, "rows_emptied": 0}
    assert found.clipped["8192"] == {"tokens": 0, "rows": 0, "rows_emptied": 0}
    assert found.lengths == {"p1": 2140, "p50": 4100, "p99": 4100}
    assert any("maximum length of 2,048 clips 69%" in note for note in found.notes)


def test_the_vocabulary_is_counted_over_supervised_tokens_only(tmp_path: Path) -> None:
    common = [{"input_ids": [5, *range(30_000)], "loss_mask": [0] + [1] * 30_000} for _ in range(2)]
    rare = {"input_ids": [*range(200_000, 204_000)], "loss_mask": [1] * 4000}
    found = looked(tmp_path, [*common, rare])
    assert found.vocabulary == {"tokens": 64_000, "distinct": 34_000, "top_32k": round(62_000 / 64_000, 4)}
    assert any("cover 96.9% of the supervised ones" in note for note in found.notes)


def test_a_mixture_of_modes_is_told(tmp_path: Path) -> None:
    plain = [{"messages": turns(content=f"Answer {n}.")} for n in range(10)]
    found = looked(tmp_path, [*plain, *(thinking(n) for n in range(90))])
    assert (found.verdict, found.thoughts) == ("warn", {"none": 10, "closed": 90})
    assert found.reasons[0].startswith("90 rows think and 10 do not")


def test_a_few_masks_of_zeros_are_an_accident_more_have_a_cause(tmp_path: Path) -> None:
    good = [masked(300, number=n) for n in range(99)]
    assert looked(tmp_path, [*good, masked(0)]).verdict == "pass"
    found = looked(tmp_path, [*good, masked(0), masked(0, number=1)])
    assert found.verdict == "fail"
    assert found.reasons[0].startswith("2 of 101 rows (2.0%) have a mask of zeros: ")
    assert "{% generation %}" in found.reasons[0]


def test_rows_that_train_their_prompts_are_told(tmp_path: Path) -> None:
    found = looked(tmp_path, [masked(300, prompt=0, number=n) for n in range(9)])
    assert (found.verdict, found.reasons) == ("warn", ["9 of 9 rows (100.0%) train every token, the prompt's too"])


def test_what_cannot_be_known_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    found = looked(tmp_path, [masked(300), thinking()])
    assert found.shapes == {"tokens": 1, "conversation": 1}
    assert sum("--model" in note for note in found.notes) == 2


def test_progress_is_told_after_two_seconds_and_says_what_is_bad_so_far(tmp_path: Path) -> None:
    told: list[str] = []
    ticks = iter(range(1000))
    path = jsonl(tmp_path / "data.jsonl", (masked(6, number=n) for n in range(6 * 256)))
    inspect(path, tell=told.append, clock=lambda: float(next(ticks)))
    assert told == [told[0]]
    assert re.match(
        r"read \d+ rows, \d+ rows/s, .* MB/s; it fails so far: 100% of the rows train exactly 6 tok", told[0]
    )


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_no_known_shape_are_an_error_that_says_what_is_there(tmp_path: Path, form: Form) -> None:
    with pytest.raises(UsageError, match=r"question, answer") as caught:
        inspect(form(tmp_path, [{"question": "a", "answer": "b"}] * 2000))
    assert "input_ids with loss_mask" in caught.value.fix


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no row"):
        looked(tmp_path, [])
    with pytest.raises(UsageError, match="no such file"):
        inspect(tmp_path / "none.jsonl")


def test_a_folder_of_unlike_files_is_counted_whole(run: RunFolder, tmp_path: Path) -> None:
    """A Parquet export of ours beside what others wrote: neither hides the other."""
    folder = tmp_path / "mixed"
    assert export(run, "parquet", folder, Rules(), samples=1) == 8
    assert export(run, "messages", folder / "m", Rules(), samples=1) == 8
    as_zst(folder, [thinking(n) for n in range(3)])
    as_parquet(folder, [masked(400, number=n) for n in range(5)])
    jsonl(folder / "empty.jsonl", [])
    found = inspect(folder)
    assert found.shapes == {"record": 8, "conversation": 8 + 3, "tokens": 5}


@pytest.mark.parametrize("form", ["messages", "specforge-chat"])
def test_an_export_of_a_run_without_thoughts_has_no_empty_ones(tmp_path: Path, form: str) -> None:
    folder = stored(
        tmp_path,
        (
            record(str(n), n, thinking=False, reasoning_tokens=0, text=f"Answer {n}.", parts=Parts(0, 0, 0, 9))
            for n in range(9)
        ),
    )
    export(folder, form, tmp_path / "out", Rules(), samples=1)
    found = inspect(tmp_path / "out")
    assert (found.verdict, found.thoughts) == ("pass", {"none": 9})


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Nothing is mapped at address 0 of a process: reading there is EIO, as of a broken disk."""
    (tmp_path / "broken.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(UsageError, match=r"broken\.jsonl cannot be read: Input/output error"):
        inspect(tmp_path)


# -- runs and their exports --------------------------------------------------------------------------------------------
SPANS = Parts(7, 7 + len(THOUGHT), 15 + len(THOUGHT), 19 + len(THOUGHT))
RECORDS: list[Record] = [
    *(record(f"good{n}", n, text=f"<think>{THOUGHT}</think>Ye{n}.", parts=SPANS) for n in range(8)),
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
    assert {(example.id, example.text[:20]) for example in found.examples} == {
        ("loop", LOOP[:20]),
        ("gone", "after 3 attempts: HTTP 500"[:20]),
    }
    assert found.supervised_tokens is not None
    assert found.supervised_tokens["p50"] == 40


def test_a_run_is_judged_by_its_own_rules(run: RunFolder) -> None:
    assert inspect(run.path, Rules(max_repetition=100.0)).labels == {"aborted": 1}


def test_a_run_is_named_by_its_folder_or_its_config(run: RunFolder, tmp_path: Path) -> None:
    text = f'name = "{run.path.name}"\n[model]\npath = "m"\n[prompts]\npath = "p"\n[judge]\nmax_repetition = 100.0\n'
    config = tmp_path / "run.toml"
    config.write_text(f'{text}[output]\ndir = "{tmp_path}"\n')
    run.config.write_text(config.read_text())
    for data in (run.path, config):
        assert inspect_any(data, None, lambda text: None).labels == {"aborted": 1}


@pytest.mark.parametrize("number", [1 << 22, 2**31 - 1, 2**40, 10**30])
def test_an_id_of_no_token_makes_a_bad_row_of_a_record(tmp_path: Path, number: int) -> None:
    """Counting it would take an entry for each smaller number."""
    rows = [record(f"k{n}", n) for n in range(9)] + [record("odd", 9, output_ids=raw(number, 5))]
    found = inspect(stored(tmp_path, rows).path)
    assert found.labels == {"ids_disagree": 1}
    assert ("odd", "ids_disagree") in {(example.id, example.label) for example in found.examples}


def test_a_runs_records_tell_more_than_text(run: RunFolder) -> None:
    found = inspect(run.path)
    assert (found.shapes, found.notes) == ({"record": 10}, [])
    assert (found.thoughts, found.closed_thoughts) == ({"closed": 8, "open": 1}, round(8 / 9, 4))
    assert found.lengths == {"p1": 43, "p50": 43, "p99": 43}
    assert found.thought_tokens == {"p1": 20, "p50": 20, "p99": 20}
    assert found.vocabulary == {"tokens": 36, "distinct": 4, "top_32k": 1.0}


@pytest.mark.parametrize(("form", "file"), [("messages", "messages.jsonl"), ("parquet", ""), ("parquet", "data")])
def test_what_was_exported_passes(run: RunFolder, tmp_path: Path, form: str, file: str) -> None:
    rules = Rules()
    assert export(run, form, tmp_path / "out", rules, samples=1) == 8
    found = inspect(tmp_path / "out" / file)
    assert (found.rows, found.verdict, found.labels) == (8, "pass", {})

"""The prompt set as the doctor sees it: counted, bad and doubled rows told, lengths by the model's own tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.doctoring import context, told
from tokenmill.checks.base import Context
from tokenmill.checks.prompts import check_prompts

GOOD = [{"id": f"p{n}", "prompt": f"what is {n} ?"} for n in range(30)]


def over(tmp_path: Path, rows: list[Any], **sections: Any) -> Context:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    model = {"path": str(models.usual(tmp_path / "model"))}
    return context(tmp_path, **{"model": model, "prompts": {"path": str(path)}, **sections})


def test_rows_and_token_lengths_are_told(tmp_path: Path) -> None:
    found = over(tmp_path, [*GOOD, {"prompt": "what " * 400}])
    rows, lengths = check_prompts(found)
    assert (rows.level, rows.message) == ("ok", "31 rows in 1 file")
    assert lengths.values == {"p50": 4, "p90": 4, "p99": 400, "longest": 400, "sample": 31}


def test_turns_are_counted_where_all_are_asked_for(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "what"}, {"role": "user", "content": "is"}]}
    rows, _ = check_prompts(over(tmp_path, [*GOOD, talk], generation={"turns": "all"}))
    assert (rows.level, rows.message, rows.values["turns"]) == ("ok", "31 rows in 1 file, 32 turns to write", 32)


def test_bad_rows_are_told_with_a_place_and_a_reason(tmp_path: Path) -> None:
    (message,) = told(check_prompts, over(tmp_path, [*GOOD, "no json"]))
    assert message.startswith("1 of 31 rows cannot be used, such as prompts.jsonl:31: not a JSON object")
    assert message.endswith("(they become failed records)")
    (message,) = told(check_prompts, over(tmp_path, [*GOOD, {"prompt": ""}, {"prompt": " "}, "{}"]))
    assert message.endswith("(more than the gate lets pass)")


@pytest.mark.parametrize(
    ("rows", "told_of"), [([], "holds no row"), (["", " "], "holds no row"), (["{}", '{"text": 1}'], "2 of 2 rows")]
)
def test_a_set_without_a_usable_row_stops_the_run(tmp_path: Path, rows: list[str], told_of: str) -> None:
    (message,) = told(check_prompts, over(tmp_path, rows), "fail")
    assert told_of in message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"id": "other", "prompt": "what is 3 ?"}, "1 of 31 rows have the content of an earlier row"),
        ({"id": "p3", "prompt": "another"}, "1 rows have an id that an earlier row has: prompts.jsonl:31: id 'p3'"),
    ],
)
def test_doubled_rows_are_told(tmp_path: Path, more: dict[str, str], words: str) -> None:
    (message,) = told(check_prompts, over(tmp_path, [*GOOD, more]))
    assert message.startswith(words)


def test_a_tokenizer_that_cannot_be_loaded_leaves_lengths_unknown(tmp_path: Path) -> None:
    found = over(tmp_path, GOOD)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert len(told(check_prompts, found, "unknown")) == 1


def test_a_run_leaves_the_counting_to_its_own_reading(tmp_path: Path) -> None:
    found = over(tmp_path, [*GOOD, "no json"])
    found.thorough = False
    (finding,) = check_prompts(found)
    assert (finding.level, finding.message) == ("ok", "1 file")

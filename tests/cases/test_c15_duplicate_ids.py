"""C15: rows that share an id, have an empty one or none: told with their lines, each answered, in the input's order."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Case, answered_prompts, assert_whole, last_turn
from tokenmill import prompts
from tokenmill.core.judge import Rules
from tokenmill.export import export

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "Question one"},
    {"id": "b", "prompt": "Question two"},
    {"id": "a", "prompt": "Question one"},
    {"id": "a", "prompt": "Question three"},
    {"id": "", "prompt": "Question four"},
    {"prompt": "Question five"},
]


def test_rows_of_one_id_are_told_and_each_is_answered_in_the_order_of_the_input(case: Case) -> None:
    _write(case.folder / "prompts.jsonl", ROWS)
    log = case.folder / "requests.jsonl"
    case.write(engine={"args": {"slots": 4, "latency-ms": 50, "sigma": 1.0, "requests": str(log)}})
    assert case.run() == 0
    assert "2 rows repeat an id" in case.output()
    assert "prompts.jsonl:3: id 'a' is taken, so its key is a~2" in case.output()
    assert "prompts.jsonl:4: id 'a' is taken, so its key is a~3" in case.output()
    records = case.records()
    assert [last_turn(record) for record in records] == [row["prompt"] for row in ROWS]
    keys = [record.key for record in records]
    assert keys[:4] == ["a", "b", "a~2", "a~3"]
    assert_whole(case, set(keys))
    assert len(set(keys)) == len(ROWS)

    assert export(case.run_folder, "messages", case.folder / "out", Rules(), samples=1) == len(ROWS)
    exported = [json.loads(line) for line in (case.folder / "out" / "messages.jsonl").read_bytes().splitlines()]
    assert [row["id"] for row in exported] == keys
    assert [row["messages"][0]["content"] for row in exported] == [row["prompt"] for row in ROWS]

    asked = answered_prompts(log)
    assert case.run() == 0
    assert answered_prompts(log) == asked


def test_with_dedup_the_same_content_is_asked_once_and_the_others_are_accounted_for(case: Case) -> None:
    _write(case.folder / "prompts.jsonl", ROWS)
    log = case.folder / "requests.jsonl"
    case.write(engine={"args": {"slots": 4, "requests": str(log)}}, prompts={"dedup": True})
    assert case.run() == 0
    assert set(answered_prompts(log).values()) == {1}
    labels = {record.key: record.labels for record in case.records()}
    assert len(labels) == len(ROWS)
    assert labels["a~2"] == ("duplicate",)
    assert sum("duplicate" in found for found in labels.values()) == 1


@pytest.mark.parametrize(
    ("ids", "keys"),
    [
        pytest.param(["a", "a~2", "a"], ["a", "a~2", "a~3"], id="an id that looks like a repeat"),
        pytest.param(["a", "a", "a~2"], ["a", "a~2", "a~2~2"], id="that comes later"),
        pytest.param([1, "1", 1.5], ["1", "1~2", "1.5"], id="numbers"),
        pytest.param([0, 0], ["0", "0~2"], id="zero is an id"),
        pytest.param(["é", "e\u0301"], ["é", "e\u0301"], id="alike to the eye only"),
        pytest.param(["a " * 4000, "a " * 4000], ["a " * 4000, "a " * 4000 + "~2"], id="very long"),
    ],
)
def test_every_row_has_a_key_of_its_own_by_a_stated_rule(tmp_path: Path, ids: list[Any], keys: list[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    _write(path, [{"id": value, "prompt": f"Question {place}"} for place, value in enumerate(ids)])
    assert _keys(path) == keys


@pytest.mark.parametrize("value", ["", None, [], {}, True])
def test_an_id_that_is_none_is_replaced_by_the_contents_hash(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    _write(path, [{"id": value, "prompt": text} for text in ("one", "two", "one")])
    one, two, again = _keys(path)
    assert one != two
    assert again == f"{one}~2"
    assert Counter([one, two, again]).most_common(1)[0][1] == 1


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _keys(path: Path) -> list[str]:
    index = prompts.scan(path)
    return [index.key(raw.row, prompts.identity(raw.data).key) for raw in prompts.rows(path)]

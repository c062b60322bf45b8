"""C27: odd Unicode in answers or prompts never stops a run: replaced or refused, labelled, and kept out of exports."""

import json
import re

import pyarrow.parquet as pq
import pytest

from tests.harness import Case, answered_prompts, last_turn
from tokenmill.core.judge import Rules
from tokenmill.core.records import Record
from tokenmill.engines import chat
from tokenmill.export import export

TALE = "A long enough answer, with something odd in it:"

ANSWERS = {
    "half": f"{TALE} \ud835 and on",
    "halves the wrong way round": f"{TALE} \udc00\ud835 and on",
    "NUL": f"{TALE} \0 and on",
    "replacements": TALE + "\ufffd" * 50,
    "one replacement": f"{TALE} \ufffd and on",
    "a pair": f"{TALE} \U0001f642 and on",
    "separators": f"{TALE} \u2028 and \u2029 and \x85 and on",
    "controls": f"{TALE} \x1b[31m \x7f and on",
}
BAD = {"half", "halves the wrong way round", "NUL", "replacements"}


def test_odd_answers_are_all_stored_and_the_bad_ones_labelled_and_left_out(case: Case) -> None:
    answers = case.folder / "answers.json"
    answers.write_text(json.dumps({f"Question {name}": text for name, text in ANSWERS.items()}))
    rows = [json.dumps({"id": name, "prompt": f"Question {name}"}).encode() for name in ANSWERS]
    (case.folder / "prompts.jsonl").write_bytes(b"\n".join(rows))
    case.write(engine={"args": {"slots": 4, "answers": str(answers)}}, gate={"max_rejected": 1.0})
    assert case.run() == 0, case.output()

    records = {record.key: record for record in case.records()}
    assert set(records) == set(ANSWERS)
    assert {name for name, record in records.items() if "bad_text" in record.labels} == BAD
    for name, record in records.items():
        assert record.answer == re.sub("[\ud800-\udfff]", "\ufffd", ANSWERS[name])
    _check_exports(case, [record for name, record in records.items() if name not in BAD])


NOT_TEXT, NUL, NOT_UTF8 = "half of a surrogate pair", "NUL", "not UTF-8"

PROMPTS = [
    (rb'{"id": "0", "prompt": "Question \ud835 and on"}', NOT_TEXT),
    (rb'{"id": "1", "messages": [{"role": "user", "content": "Question \udc00\ud835"}]}', NOT_TEXT),
    (rb'{"id": "\ud835", "prompt": "Question"}', NOT_TEXT),
    (rb'{"id": "3", "prompt": "Question \u0000 and on"}', NUL),
    (rb'{"id": "4", "messages": [{"role": "system", "content": "\u0000"}, {"role": "user", "content": "Hi"}]}', NUL),
    (b'{"id": "5", "prompt": "Question \xff\xfe"}', NOT_UTF8),
    (b'{"id": "6", "prompt": "Question \xc0\x80"}', NOT_UTF8),
    (b'{"id": "7", "prompt": "Question \xed\xa0\xb5"}', NOT_UTF8),
    (('{"id": "8", "prompt": "Question ' + "\ufffd" * 50 + '"}').encode(), ""),
    (rb'{"id": "9", "prompt": "Question \ud83d\ude42"}', ""),
    ('{"id": "10", "prompt": "Question \u2028 and \u2029 and \x85"}'.encode(), ""),
]
"""A row, and why it is refused: empty where it is not."""


def test_odd_prompts_are_sent_or_refused_by_their_line(case: Case) -> None:
    log = case.folder / "requests.jsonl"
    (case.folder / "prompts.jsonl").write_bytes(b"\n".join(row for row, _ in PROMPTS) + b"\n")
    case.write(engine={"args": {"slots": 4, "requests": str(log)}})
    assert case.run() == 0, case.output()

    records = {record.row: record for record in case.records()}
    assert set(records) == set(range(len(PROMPTS)))
    for row, (data, complaint) in enumerate(PROMPTS):
        record = records[row]
        if complaint:
            assert record.labels == ("bad_prompt",)
            assert record.error.startswith(f"prompts.jsonl:{row + 1}: ")
            assert complaint in record.error
        else:
            assert record.labels == ()
            assert last_turn(record) == json.loads(data)["prompt"]
    good = [record for record in records.values() if not record.labels]
    assert set(answered_prompts(log)) == {last_turn(record) for record in good}
    _check_exports(case, good)


@pytest.mark.parametrize("broken", [b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\xb5", b"\xf0\x9f"])
def test_an_answer_that_is_no_utf8_is_read_and_known_as_damaged(broken: bytes) -> None:
    body = b'{"choices": [{"message": {"content": "odd: %b"}, "finish_reason": "stop"}]}' % broken
    completion = chat.decode(body)
    assert completion.damaged
    assert completion.text.startswith("odd: \ufffd")


def _check_exports(case: Case, wanted: list[Record]) -> None:
    """Every export holds exactly these rows, in their order, and every line of it is strict JSON in UTF-8."""
    for form in ("messages", "parquet"):
        assert export(case.run_folder, form, case.folder / form, Rules(), samples=1) == len(wanted)
    lines = (case.folder / "messages" / "messages.jsonl").read_bytes().removesuffix(b"\n").split(b"\n")
    rows = [json.loads(line.decode("utf-8", "strict")) for line in lines]
    assert [row["id"] for row in rows] == [record.key for record in wanted]
    assert [row["messages"][-1]["content"] for row in rows] == [record.answer for record in wanted]
    columns = pq.read_table(case.folder / "parquet" / "data").to_pydict()
    assert columns["key"] == [record.key for record in wanted]
    assert columns["answer"] == [record.answer for record in wanted]

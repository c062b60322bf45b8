"""C28: prompts that are empty, too long or of a wrong kind fail by themselves: never sent, or refused once."""

import json
from typing import Any

from tests.harness import Case, answered_prompts, last_turn

GOOD: list[dict[str, Any]] = [{"prompt": f"Question {number}?"} for number in range(5)]

NEVER_SENT: list[dict[str, Any] | str] = [
    {"prompt": ""},
    {"prompt": "   \n\t"},
    {"id": "no messages"},
    {"messages": []},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "an answer"}]},
    {"messages": [{"role": "system", "content": "You are alone."}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": "Question as a text"},
    {"messages": ["Question without a role"]},
    {"messages": [{"role": "nobody", "content": "Question"}]},
    {"conversations": [{"from": "gpt", "value": "an answer without a question"}]},
    {"body": {"messages": [{"role": "user", "content": 5}]}},
    {"prompt": 5},
    {"prompt": {"text": "Question in a table"}},
    {"prompt": ["Question in a list"]},
    "Question as a bare text",
]

LONG = {"prompt": "Question that is long " + "x" * 1_000_000}
REFUSED = {"prompt": "Question that the server will not have: forbidden"}


def test_bad_rows_fail_alone_by_their_line_and_the_server_lives_on(case: Case) -> None:
    rows = [*NEVER_SENT[:9], LONG, *GOOD[:3], REFUSED, *NEVER_SENT[9:], *GOOD[3:]]
    torn = b'{"prompt": "Question that ends in the mid'
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b"\n" + torn
    (case.folder / "prompts.jsonl").write_bytes(data)
    log = case.folder / "requests.jsonl"
    args = {"slots": 4, "die-on-empty": True, "too-long": 1000, "refuse-word": "forbidden", "requests": str(log)}
    case.write(engine={"args": args}, fleet={"servers": 1}, gate={"max_failed": 0.1})
    assert case.run() == 0, case.output()

    records = case.records()
    assert len(records) == len(rows) + 1
    for row, record in zip(rows, records, strict=False):
        if row in GOOD:
            assert record.labels == ()
            assert last_turn(record) == row["prompt"]
        elif row is LONG:
            assert record.labels == ("prompt_too_long",)
        elif row is REFUSED:
            assert record.labels == ("request_refused",)
        else:
            assert record.labels == ("bad_prompt",), row
            assert record.error.startswith(f"prompts.jsonl:{record.row + 1}: ")
            assert len(record.error) > len("prompts.jsonl:10: "), row
    assert records[-1].labels == ("bad_prompt",)
    assert records[-1].error.startswith(f"prompts.jsonl:{len(rows) + 2}: "), "the blank line counts as a line"

    asked = answered_prompts(log)
    assert set(asked.values()) == {1}, "a refused request is not sent again"
    assert len(asked) == len(GOOD) + 2
    assert case.output().count("server 0: started as") == 1


def test_a_prompt_set_of_nothing_but_bad_rows_ends_in_order_and_with_a_warning(case: Case) -> None:
    rows = [json.dumps({"id": f"p{number}", "prompt": ""}) for number in range(30)]
    (case.folder / "prompts.jsonl").write_text("\n".join(rows))
    case.write(fleet={"servers": 1})
    assert case.run() == 0
    assert [record.labels for record in case.records()] == [("bad_prompt",)] * 30
    assert "bad_prompt" in case.output()
    assert "prompts.jsonl:1: the last turn is empty" in case.output()

"""A real llama.cpp run whose grammar makes it think, some of it cut off, one and several turns: exported in every
format, read by the trainers' loaders, and compared token by token with the ids that were recorded."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.exports import rows_of
from tests.harness import Case
from tests.loaders.test_loaders import ALL, MODEL, Peer, by_hand, pairs, peer
from tokenmill import plugins, quickstart
from tokenmill.core.judge import Rules
from tokenmill.core.records import Record
from tokenmill.export import export
from tokenmill.inspection import inspect

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(900)]
__all__ = ["peer"]

TIMEOUT_S = 600.0

GRAMMAR = r'root ::= "<think>\n" s "\n</think>\n\n" s s?' + "\n" + r's ::= [A-Z] [a-z ]{10,40} ". "'
"""Short sentences: on a busy core a token takes a tenth of a second."""

QUESTIONS = ["What is a river?", "Wozu dient ein Kompass? 🧭", "Name three metals.", "Why is the sky blue?"]
HISTORY = [
    {"role": "user", "content": "Hello, I am Ann."},
    {"role": "assistant", "content": "Hello Ann.\n\nWhat can I do?"},
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(tmp_path_factory.mktemp("llama"), free_port())
    rows = [
        {"id": f"p{n}", "messages": [*(HISTORY if n % 2 else []), {"role": "user", "content": QUESTIONS[n % 4]}]}
        for n in range(12)
    ]
    (case.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    case.settings = {
        "model": {"path": str(quickstart.find_model(print)), "name": "smollm2"},
        "engine": {"kind": "llamacpp", "args": {"parallel": 2, "ctx-size": 1024, "threads": 1}},
        "fleet": {"servers": 1, "start_timeout": "4m"},
        "generation": {"thinking": True, "max_tokens": 38, "seed": 1, "extra": {"grammar": GRAMMAR}},
        "judge": {"min_reasoning_tokens": 2},
        "gate": {"max_rejected": 1.0, "max_truncated": 1.0},
    }
    case.write()
    assert case.run(timeout_s=TIMEOUT_S) == 0, case.output()
    yield case
    case.cleanup()


def accepted(case: Case) -> list[Record]:
    found = [record for record in case.records() if not set(record.labels) & Rules().reject]
    finishes = {record.finish_reason for record in found}
    assert finishes == {"stop", "length"}, "some must end, and some be cut off"
    assert all(record.reasoning for record in found)
    return found


def exported(case: Case, form: str) -> Path:
    out = case.folder / form
    if not out.exists():
        export(case.run_folder, form, out, Rules(min_reasoning_tokens=2), samples=1)
    return out


def test_ids_are_those_that_the_engine_gave(done: Case, peer: Peer) -> None:
    own = accepted(done)
    wanted = [by_hand(record) for record in own]
    (file,) = (exported(done, "specforge") / "train").iterdir()
    assert peer("specforge", file=file, length=ALL) == [list(row) for row in wanted]
    out = done.folder / "prepared"
    folder = exported(done, "speculators") / "train"
    assert pairs(peer("speculators", folder=folder, length=ALL, model=MODEL, out=out)) == pairs(wanted)
    rows = [row for split in peer("loaded", folder=exported(done, "parquet")).values() for row in split]
    assert [(row["key"], row["prompt_ids"] + row["output_ids"]) for row in rows] == [
        (record.key, ids) for record, (ids, _) in zip(own, wanted, strict=True)
    ]


def test_text_formats_hold_thought_and_answer_as_they_were_written(done: Case, peer: Peer) -> None:
    own = {record.key: record for record in accepted(done)}
    for form, field in (("messages", "messages"), ("specforge-chat", "conversations")):
        rows = [row for split in peer("loaded", folder=exported(done, form)).values() for row in split]
        wanted = [key for key, each in own.items() if form == "messages" or each.finish_reason == "stop"]
        assert [row["id"] for row in rows] == wanted
        for row in rows:
            *history, last = row[field]
            assert history == json.loads(bytes(own[row["id"]].messages))
            assert (last["reasoning_content"], last["content"]) == (own[row["id"]].reasoning, own[row["id"]].answer)
    lines = rows_of(exported(done, "openai-batch"))
    assert {line["custom_id"] for line in lines if line["error"] is None} == set(own)


@pytest.mark.parametrize("form", plugins.names("formats"))
def test_inspect_finds_nothing_wrong_with_what_went_out(done: Case, form: str) -> None:
    rules = Rules(min_reasoning_tokens=2)
    found = inspect(exported(done, form), rules)
    assert found.verdict != "fail", found.reasons
    assert found.bad_rows == 0

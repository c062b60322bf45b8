"""The export commands as a user gives them, on a run of a scripted fleet: from prompts to files for a trainer."""

import json

import numpy as np
import pytest

from tests.chaos.conftest import Command, Here
from tests.exports import rows_of
from tests.harness import Case

BATCH = [
    {
        "custom_id": f"b{n}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": f"Question {n}" if n else ""}]},
    }
    for n in range(30)
]


@pytest.fixture
def done(here: Here) -> Case:
    """A run of an OpenAI Batch input of 30 lines, the first of which is empty."""
    (here.case.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, BATCH)) + "\n")
    code, said = here()
    assert code == 0, said
    return here.case


def test_a_batch_comes_back_as_a_batch_with_its_failures_apart(done: Case, tokenmill: Command) -> None:
    out = done.folder / "out"
    assert tokenmill("export", done.config, "openai-batch", out)[0] == 0
    answered = {line["custom_id"]: line for line in rows_of(out) if line["error"] is None}
    failed = {line["custom_id"]: line["error"]["code"] for line in rows_of(out) if line["error"] is not None}
    assert set(answered) == {f"b{n}" for n in range(1, 30)}
    assert failed == {"b0": "bad_prompt"}
    records = {record.key: record for record in done.records()}
    for name, line in answered.items():
        assert line["response"]["body"]["choices"][0]["message"]["content"] == records[name].answer
    assert [path.name for path in sorted(out.glob("errors-*"))] == ["errors-00000-of-00001.jsonl"]


def test_options_are_heard_and_what_is_left_out_is_told(done: Case, tokenmill: Command) -> None:
    out = done.folder / "out"
    words = ["--validation", "0.3", "--cap", "truncated=0.5", "--dedup", "--drop", "repetition", "--max-tokens", "9999"]
    code, said = tokenmill("export", done.run_path, "specforge", out, *words)
    assert code == 0, said
    train, held = rows_of(out / "train"), rows_of(out / "validation")
    assert len(train) + len(held) == 29
    assert held
    assert f"29 rows ({len(train)} train, {len(held)} validation) of 30 records" in said
    assert "left out: 1 failed: bad_prompt" in said
    code, said = tokenmill("export", done.run_path, "specforge", out)
    assert (code, "exists already" in said) == (2, True)
    assert not list(done.folder.glob(".out*"))


def test_a_config_that_is_named_judges_as_it_says_now_and_the_run_as_it_was_made(
    done: Case, tokenmill: Command
) -> None:
    done.write(judge={"max_repetition": 1.01})
    code, said = tokenmill("export", done.config, "specforge", done.folder / "none")
    assert code == 5, said
    assert tokenmill("inspect", done.config)[0] == 5
    assert tokenmill("vocab-map", done.config, done.folder / "map", "--vocabulary", 300)[0] != 0
    code, said = tokenmill("export", done.run_path, "specforge", done.folder / "all")
    assert (code, "29 rows" in said) == (0, True), said


def test_a_run_that_goes_on_can_be_exported(case: Case, tokenmill: Command) -> None:
    """What is stored at that moment, whole rows only; the run is not disturbed."""
    case.write(engine={"args": {"slots": 4, "latency-ms": 900}}, fleet={"servers": 1})
    process = case.start()
    case.until_done(8, process)
    assert tokenmill("export", case.run_path, "specforge", case.folder / "early")[0] == 0
    assert process.poll() is None
    early = rows_of(case.folder / "early")
    assert 8 <= len(early) < 40
    assert case.wait(process) == 0, case.output()
    assert "tokenmill export " in case.output()
    assert f"{case.run_path} specforge OUT" in case.output(), "the next command, in the end"
    assert tokenmill("export", case.run_path, "specforge", case.folder / "late")[0] == 0
    late = {row["id"]: row for row in rows_of(case.folder / "late")}
    assert len(late) == 40
    assert all(late[row["id"]] == row for row in early)


def test_the_vocabulary_of_a_drafter(done: Case, tokenmill: Command) -> None:
    """The scripted server's ids are the bytes of its text."""
    out = done.folder / "map"
    code, said = tokenmill("vocab-map", done.run_path, out, "--size", 10, "--vocabulary", 300)
    assert code == 0, said
    d2t, t2d = np.load(out / "d2t-10.npy"), np.load(out / "t2d-10.npy")
    chosen = np.arange(10) + d2t
    assert chosen.tolist() == np.flatnonzero(t2d).tolist()
    assert ord("e") in chosen
    assert "10 of 300 ids cover " in said
    code, said = tokenmill("vocab-map", done.run_path, done.folder / "no", "--size", 10)
    assert (code, "--vocabulary N" in said) == (2, True)

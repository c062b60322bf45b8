"""C20: the mask is the boundary between prompt and output, whatever marks a template has; no row without an answer."""

import json

import pytest

from tests.exports import rows_of
from tests.harness import Case

WORDS = ["specforge", "speculators"]


def _ask(case: Case, answers: dict[str, str], rows: int = 20) -> None:
    """A run of so many prompts; `answers` by prompt, the others are answered at length."""
    path = case.folder / "answers.json"
    path.write_text(json.dumps(answers))
    lines = [json.dumps({"id": f"p{n}", "prompt": f"Question {n}"}) for n in range(rows)]
    (case.folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    case.write(engine={"args": {"slots": 4, "answers": str(path)}}, gate={"max_rejected": 1.0})
    assert case.run() == 0, case.output()


def _export(case: Case, form: str) -> int:
    return case.wait(case.command("export", str(case.config), form, str(case.folder / form)))


def test_every_row_is_supervised_without_any_mark_in_a_template(case: Case) -> None:
    _ask(case, {"Question 7": ""})
    stored = {record.key: record for record in case.records()}
    for form in WORDS:
        assert _export(case, form) == 0, case.output()
        rows = rows_of(case.folder / form)
        assert [row["id"] for row in rows] == [f"p{n}" for n in range(20) if n != 7]
        for row in rows:
            record = stored[row["id"]]
            prompt, output = (json.loads(bytes(ids)) for ids in (record.prompt_ids, record.output_ids))
            assert sum(row["loss_mask"]) == len(output) == record.output_tokens > 0
            assert (row["input_ids"], row["loss_mask"]) == (prompt + output, [0] * len(prompt) + [1] * len(output))
    assert "left out: 1 rejected: empty" in case.output()
    assert "supervised: " in case.output()
    assert "of a row at least " in case.output()


@pytest.mark.parametrize("form", WORDS)
def test_nothing_but_empty_answers_is_no_dataset(case: Case, form: str) -> None:
    _ask(case, {f"Question {n}": "" for n in range(20)})
    assert _export(case, form) == 5
    assert "nothing is left to export of 20 records: 20 rejected: empty" in case.output()
    assert not (case.folder / form).exists()

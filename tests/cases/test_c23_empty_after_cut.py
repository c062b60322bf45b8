"""C23: whether a row teaches anything is asked after the cut to a maximum length, and what was dropped is counted."""

from pathlib import Path

import pytest

from tests.exports import raw, rows_of, stored
from tests.unit.make import record
from tokenmill.core.judge import Rules
from tokenmill.core.records import Record
from tokenmill.export import chosen, export

END = 99


def row(prompt: int, output: int = 20) -> Record:
    ids = raw(*range(1000, 1000 + output - 1), END)
    return record(f"prompt of {prompt}", prompt, prompt_ids=raw(*range(prompt)), output_ids=ids)


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_rows_are_cut_first_and_then_counted(tmp_path: Path, form: str) -> None:
    folder = stored(tmp_path, [row(10), row(60), row(64), row(200)])
    told: list[str] = []
    choice = chosen(max_length=64)
    assert export(folder, form, tmp_path / "out", Rules(), samples=1, choice=choice, tell=told.append) == 1
    (kept,) = rows_of(tmp_path / "out")
    assert (kept["id"], len(kept["input_ids"]), sum(kept["loss_mask"])) == ("prompt of 10", 30, 20)
    assert told[0] == "1 rows (1 train) of 4 records"
    assert "  left out: 1 fewer than 8 tokens" in told
    assert "  left out: 2 no answer within --max-length" in told


def test_a_row_cut_inside_its_answer_is_marked_and_has_no_end_token(tmp_path: Path) -> None:
    folder = stored(tmp_path, [row(10), row(50)])
    told: list[str] = []
    export(folder, "specforge", tmp_path / "out", Rules(), samples=1, choice=chosen(max_length=64), tell=told.append)
    whole, cut = rows_of(tmp_path / "out")
    assert [(row["finish_reason"], row["input_ids"][-1] == END) for row in (whole, cut)] == [
        ("stop", True),
        ("cut", False),
    ]
    assert cut["loss_mask"] == [0] * 50 + [1] * 14
    assert cut["input_ids"][50:] == list(range(1000, 1014))
    assert "  1 rows are cut at --max-length: finish_reason cut, without an end token" in told

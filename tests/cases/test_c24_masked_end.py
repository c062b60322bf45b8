"""C24: masks go by position: the end token is supervised though padding has its id; an answer without it is told."""

from pathlib import Path

import pytest

from tests.exports import raw, rows_of, stored
from tests.unit.make import TEXT, record
from tokenmill.core import judge
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import Completion, Record
from tokenmill.errors import GateError
from tokenmill.export import chosen, export

END = 99
"""Its padding has this id, too."""

READING = Reading(thinking=True, opened=False, end_ids=frozenset({b"99"}))


def judged(key: str, row: int, *output: int, finish: str = "stop") -> Record:
    """A record as the judge labels it; the prompt holds end tokens of earlier turns."""
    ids = raw(*output)
    tokens = bytes(ids).count(b",") + 1
    made = Completion(TEXT, finish, output_ids=ids, output_tokens=tokens, reasoning_tokens=20)
    measured = judge.measure(made, READING, Rules())
    return record(
        key,
        row,
        prompt_ids=raw(1, END, 2, END, 3),
        output_ids=ids,
        finish_reason=finish,
        labels=measured.labels,
        parts=measured.parts,
        reasoning_tokens=measured.reasoning_tokens,
    )


THREE = [judged("a", 0, 5, END), judged("b", 1, 5, 6, 7, END), judged("c", 2, 5, 6, END)]
CUT = judged("cut", 3, 5, 6, finish="length")
LOST = judged("lost", 4, 5, 6)


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_finished_rows_end_with_their_end_token_supervised_and_cut_ones_have_none(tmp_path: Path, form: str) -> None:
    export(stored(tmp_path, [*THREE, CUT]), form, tmp_path / "out", Rules(), samples=1)
    rows = rows_of(tmp_path / "out")
    assert [(row["input_ids"][-1], row["loss_mask"][-1]) for row in rows] == [(END, 1), (END, 1), (END, 1), (6, 1)]
    for row in rows:
        assert row["loss_mask"][:5] == [0] * 5, "the end tokens of earlier turns are context"
        assert len(row["input_ids"]) == len(row["loss_mask"]), "no padding"


def test_an_answer_that_has_lost_its_end_is_told_and_left_out(tmp_path: Path) -> None:
    assert LOST.labels == ("missing_end_token",)
    told: list[str] = []
    assert export(stored(tmp_path, [*THREE, LOST]), "specforge", tmp_path / "out", Rules(), samples=1, tell=told.append)
    assert [row["id"] for row in rows_of(tmp_path / "out")] == ["a", "b", "c"]
    assert "  left out: 1 rejected: missing_end_token" in told


def test_where_rules_let_them_through_more_than_one_in_two_hundred_is_an_error(tmp_path: Path) -> None:
    lenient = Rules(reject=frozenset())
    folder = stored(tmp_path, [*THREE, LOST])
    with pytest.raises(GateError, match="1 of 4 finished answers lack their end token") as caught:
        export(folder, "specforge", tmp_path / "out", lenient, samples=1)
    assert "--drop missing_end_token" in caught.value.fix
    assert not (tmp_path / "out").exists()
    drop = chosen(drop="missing_end_token")
    assert export(folder, "specforge", tmp_path / "out", lenient, samples=1, choice=drop) == 3

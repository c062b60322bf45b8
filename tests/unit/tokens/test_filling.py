"""Ids from text: only where they are asked for, marked, and with the rate at which they are not the engine's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import bytewise
from tests.exports import raw, rows_of, stored
from tests.unit.make import record
from tokenmill.core.judge import Rules
from tokenmill.core.records import NULL, Parts, Record
from tokenmill.errors import GateError, UsageError
from tokenmill.export import export
from tokenmill.testing.script import END_ID
from tokenmill.tokens.filling import Filling
from tokenmill.tokens.retokenise import Retokeniser


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytewise.folder(tmp_path_factory.mktemp("bytes"), merges=(("t", "h"),))


def row(key: str, number: int, text: str, output: Sequence[int] | None = None, **fields: Any) -> Record:
    ids = {
        "prompt_ids": NULL if output is None else raw(*b"hi"),
        "output_ids": NULL if output is None else raw(*output),
    }
    base: dict[str, Any] = {"thinking": False, "parts": Parts(0, 0, 0, len(text)), "reasoning_tokens": 0}
    return record(key, number, text=text, **{**ids, **base, **fields})


def exported(path: Path, records: Sequence[Record], model: Path, form: str = "specforge") -> tuple[list[Any], str]:
    """The rows, and what was said and written into the card."""
    told: list[str] = []
    out = path / "out"
    filling = Filling(Retokeniser(model))
    export(stored(path, records), form, out, Rules(), samples=1, filling=filling, tell=told.append)
    card = (out / "README.md").read_text()
    assert all(words in card for words in filling.words())
    return rows_of(out), "\n".join(told)


def test_a_mixed_run_is_filled_up_and_the_rate_measured_on_the_rows_that_have_ids(tmp_path: Path, model: Path) -> None:
    rows = [
        row("own", 0, "moth", [*b"mo", 300, END_ID]),
        row("split", 1, "moth", [*b"moth", END_ID]),
        row("bare", 2, "moth"),
        row("cut", 3, "mo", finish_reason="length"),
    ]
    found, told = exported(tmp_path, rows, model)
    by_id = {one["id"]: (one["input_ids"], one["loss_mask"], one["retokenised"]) for one in found}
    assert by_id == {
        "own": ([104, 105, 109, 111, 300, END_ID], [0, 0, 1, 1, 1, 1], False),
        "split": ([104, 105, *b"moth", END_ID], [0, 0, 1, 1, 1, 1, 1], False),
        "bare": ([104, 105, 109, 111, 300, END_ID], [0, 0, 1, 1, 1, 1], True),
        "cut": ([104, 105, 109, 111], [0, 0, 1, 1], True),
    }
    assert "2 rows got their token ids from their text: the engine gave none." in told
    assert "Mismatch: of 2 rows of this run that have ids, 1 (50.0%) come back from their text with other ones." in told


def test_where_no_row_has_ids_the_rate_is_not_known_and_that_is_said(tmp_path: Path, model: Path) -> None:
    found, told = exported(tmp_path, [row("a", 0, "moth"), row("b", 1, "the 🙂")], model, "speculators")
    assert [one["metadata"]["retokenised"] for one in found] == [True, True]
    assert "Mismatch: not known" in told
    assert "2 of 2 (100.0%) spell their text." in told


def test_what_the_prompt_opened_is_not_opened_again(tmp_path: Path) -> None:
    opening = bytewise.folder(tmp_path / "model", template=bytewise.PLAIN + "{{- '<think>\\n' -}}")
    text = "<think>\nwell\n</think>\n\nyes"
    (one,), _ = exported(tmp_path, [record(text=text, prompt_ids=NULL, output_ids=NULL)], opening)
    assert bytes(one["input_ids"][:-1]).decode() == "hi<think>\nwell\n</think>\n\nyes"
    assert sum(one["loss_mask"]) == len("well\n</think>\n\nyes") + 1


def test_without_the_option_nothing_is_tokenised_and_the_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="2 no token ids") as caught:
        export(stored(tmp_path, [row("a", 0, "x"), row("b", 1, "y")]), "specforge", tmp_path / "o", Rules(), samples=1)
    assert "--retokenise" in caught.value.fix


def test_a_text_format_needs_no_ids(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UsageError, match="needs no token ids"):
        exported(tmp_path, [row("a", 0, "x")], model, "messages")


def test_the_mark_is_in_every_row_or_in_none(tmp_path: Path, model: Path) -> None:
    """`datasets` fails at a field that first comes later."""
    rows = [row("own", 0, "moth", [*b"moth", END_ID])]
    assert [set(one) for one in exported(tmp_path / "a", rows, model)[0]] == [
        {"id", "input_ids", "loss_mask", "finish_reason", "retokenised"}
    ]
    export(stored(tmp_path, rows), "specforge", tmp_path / "plain", Rules(), samples=1)
    (plain,) = rows_of(tmp_path / "plain")
    assert "retokenised" not in json.dumps(plain)

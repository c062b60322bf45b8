"""C21: what is trained on are the ids that the server saw and wrote, whatever a tokenizer would make of their text."""

from pathlib import Path

import pytest

from tests import models
from tests.exports import raw, rows_of, stored
from tests.unit.make import record
from tokenmill.core.judge import Rules
from tokenmill.core.records import NULL, Parts
from tokenmill.export import export
from tokenmill.render import load_tokenizer


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_stored_ids_go_out_though_their_text_would_be_other_ids(tmp_path: Path, form: str) -> None:
    tokenizer = load_tokenizer(models.folder(tmp_path / "model", {"model.safetensors": {"w": (8, 8)}}))
    text, served = "what is", [1, 0, 2]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] != served
    own = record(prompt_ids=raw(2, 2), output_ids=raw(*served), text=text, parts=Parts(0, 0, 0, 7), thinking=False)
    export(stored(tmp_path, [own]), form, tmp_path / "out", Rules(), samples=1)
    (row,) = rows_of(tmp_path / "out")
    assert (row["input_ids"], row["loss_mask"]) == ([2, 2, *served], [0, 0, 1, 1, 1])


def test_what_the_template_put_before_the_answer_is_not_supervised(tmp_path: Path) -> None:
    """Thinking off: the empty thought is the prompt's last tokens (90 opens it, 91 closes it)."""
    off = record(prompt_ids=raw(1, 90, 91), output_ids=raw(5, 99), thinking=False, reasoning_tokens=0)
    on = record("on", 1, prompt_ids=raw(1, 90), output_ids=raw(4, 91, 5, 99))
    export(stored(tmp_path, [off, on]), "specforge", tmp_path / "out", Rules(), samples=1)
    assert [row["loss_mask"] for row in rows_of(tmp_path / "out")] == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]


def test_text_without_ids_is_never_tokenized_in_silence(tmp_path: Path) -> None:
    told: list[str] = []
    bare = record("bare", 1, prompt_ids=NULL, output_ids=NULL)
    folder = stored(tmp_path, [record(), bare])
    assert export(folder, "specforge", tmp_path / "out", Rules(), samples=1, tell=told.append) == 1
    assert "  left out: 1 no token ids" in told

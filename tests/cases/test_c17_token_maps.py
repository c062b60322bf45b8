"""C17: a drafter whose token ids mean other tokens than the model's is refused, with both fingerprints."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests import doctoring, models
from tests.doctoring import context
from tests.exports import stored
from tests.unit.make import record
from tokenmill.checks.draft import check_draft
from tokenmill.core.judge import Rules
from tokenmill.export import export

WORDS = [f"w{number}" for number in range(32)]


def tokenizer(folder: Path, words: list[str], added: list[str] | None = None) -> None:
    extra = [{"id": len(words) + n, "content": text} for n, text in enumerate(added or [])]
    vocabulary = {word: number for number, word in enumerate(words)}
    models.write(folder / "tokenizer.json", model={"type": "BPE", "vocab": vocabulary}, added_tokens=extra)


def refusals(tmp_path: Path, tensors: models.Tensors | None = None, **config: Any) -> list[str]:
    """What is said of tmp_path/draft as an EAGLE-3 drafter of tmp_path/model."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        tokens = folder / "tokenizer.json"
        kept = tokens.read_text() if tokens.exists() else ""
        content = {"model.safetensors": {"w": (8, 8), **(tensors or {})}}
        models.folder(folder, content, **({"architectures": ["A"]} if folder == model else config))
        if kept:
            tokens.write_text(kept)
    args = {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": str(draft)}
    return doctoring.told(check_draft, context(tmp_path, model={"path": str(model)}, engine={"args": args}), "fail")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        tokenizer(tmp_path / name, WORDS, ["<think>"])
    return tmp_path


def test_alike_tokenizers_fit(folders: Path) -> None:
    assert refusals(folders) == []


def test_a_drafter_that_lacks_the_last_added_tokens_fits(folders: Path) -> None:
    tokenizer(folders / "draft", WORDS)
    assert refusals(folders) == []


def test_two_swapped_ids_are_refused_with_both_fingerprints(folders: Path) -> None:
    swapped = [*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:]]
    tokenizer(folders / "draft", swapped, ["<think>"])
    (message,) = refusals(folders)
    assert "id 5 is 'w6' to it and 'w5' to the model" in message
    assert len(set(re.findall(r"\b[0-9a-f]{12}\b", message))) == 2


def test_an_added_token_with_another_meaning_is_refused(folders: Path) -> None:
    tokenizer(folders / "draft", WORDS, ["<tool>"])
    (message,) = refusals(folders)
    assert "id 32 is '<tool>' to it and '<think>' to the model" in message


@pytest.mark.parametrize(("tensors", "fits"), [({}, False), ({"d2t": (8,)}, True), ({"model.d2t": (8,)}, True)])
def test_a_reduced_vocabulary_needs_its_map(folders: Path, tensors: models.Tensors, fits: bool) -> None:
    found = refusals(folders, tensors, vocab_size=32, draft_vocab_size=8)
    assert found == [] if fits else "writes 8 of 32 tokens and holds no map" in found[0]


def test_another_size_of_vocabulary_is_refused(folders: Path) -> None:
    assert any(
        "its vocabulary has 16 tokens, the model's 32" in message for message in refusals(folders, vocab_size=16)
    )


def test_an_export_carries_the_fingerprint_that_a_misfit_is_told_by(folders: Path) -> None:
    """So that whoever trains on it can prove whose tokens the ids are, long after the model's folder is gone."""
    told: dict[str, str] = {}
    for name, words in (("model", WORDS), ("draft", [*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:]])):
        tokenizer(folders / name, words, ["<think>"])
        run = stored(folders / f"run of {name}", [record()])
        out = folders / f"out of {name}"
        export(run, "specforge", out, Rules(), samples=1, model=folders / name)
        (told[name],) = re.findall(r"tokens, fingerprint \| ([0-9a-f]{12}) ", (out / "README.md").read_text())
    assert told["model"] != told["draft"]
    (message,) = refusals(folders)
    assert set(re.findall(r"\b[0-9a-f]{12}\b", message)) == set(told.values())

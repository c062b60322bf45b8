"""C16: a drafter of another kind than the flags say, or none at all, is told before the servers load for minutes.

(That a running server's accept length is 1.00 is the watch's to tell, from its metrics.)
"""

from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.doctoring import context, levels, told
from tests.reference import ARGS as REFERENCE
from tokenmill.checks.base import Context
from tokenmill.checks.draft import check_draft


def made_for(folder: Path, architecture: str, **config: Any) -> Path:
    return models.folder(folder, {"model.safetensors": {"fc.weight": (8, 8)}}, architectures=[architecture], **config)


def asking(tmp_path: Path, args: dict[str, Any], kind: str = "sglang") -> Context:
    model = tmp_path / "model"
    if not model.exists():
        models.usual(model)
    return context(tmp_path, model={"path": str(model)}, engine={"kind": kind, "args": args}, fleet={"gpus": "none"})


@pytest.mark.parametrize(
    ("architecture", "algorithm", "fits"),
    [
        ("LlamaForCausalLMEagle3", "EAGLE", False),
        ("LlamaForCausalLMEagle3", "EAGLE3", True),
        ("LlamaForCausalLMEagle", "EAGLE3", False),
        ("LlamaForCausalLMEagle", "EAGLE", True),
        ("DFlashDraftModel", "EAGLE", False),
        ("DFlashDraftModel", "DFLASH", True),
        ("Qwen3_5ForCausalLMMTP", "NEXTN", True),
        ("LlamaForCausalLM", "STANDALONE", True),
        ("LlamaForCausalLM", "EAGLE3", True),  # says nothing of itself: the engine relabels it
    ],
)
def test_a_drafter_of_another_kind_than_the_flag_is_refused(
    tmp_path: Path, architecture: str, algorithm: str, fits: bool
) -> None:
    draft = made_for(tmp_path / "draft", architecture)
    flags = {"speculative-algorithm": algorithm, "speculative-draft-model-path": str(draft)}
    found = told(check_draft, asking(tmp_path, flags), "fail")
    assert found == ([] if fits else [found[0]])
    if not fits:
        assert architecture in found[0]
        assert f"the flags say {algorithm}" in found[0]


def test_the_same_is_read_from_vllms_table(tmp_path: Path) -> None:
    draft = made_for(tmp_path / "draft", "LlamaForCausalLMEagle3")
    for value in ({"method": "eagle", "model": str(draft)}, f'{{"method": "eagle", "model": "{draft}"}}'):
        (message,) = told(check_draft, asking(tmp_path, {"speculative-config": value}, "vllm"), "fail")
        assert "made for EAGLE3" in message


def test_a_drafter_with_fewer_positions_than_the_context_is_told(tmp_path: Path) -> None:
    draft = made_for(tmp_path / "draft", "LlamaForCausalLMEagle3", max_position_embeddings=2048)
    flags = {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": str(draft), "context-length": 8192}
    (message,) = told(check_draft, asking(tmp_path, flags), "warn")
    assert "knows 2048 positions, the context has 8192" in message


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"mtp.fc.weight": (8, 8)}, {}),
        ({"model.mtp_layers.0.w": (8, 8)}, {}),
        ({"model.layers.3.eh_proj.weight": (8, 8)}, {"num_hidden_layers": 3}),
        ({"model.layers.3.eh_proj.weight": (8, 8)}, {"text_config": {"num_hidden_layers": 3}}),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["in the index", "in a file beside the index"])
def test_the_models_own_head_is_found(
    tmp_path: Path, tensors: models.Tensors, config: dict[str, Any], inside: bool
) -> None:
    shards = {"model-00001-of-00001.safetensors": {"model.layers.2.w": (8, 8)}}
    folder = models.folder(tmp_path / "model", {**shards, **({"mtp.safetensors": tensors} if inside else {})}, **config)
    if not inside:
        models.safetensors(folder / "mtp.safetensors", tensors)
    assert levels(check_draft, asking(tmp_path, REFERENCE)) == ["ok"]


@pytest.mark.parametrize(
    ("kind", "args", "level"),
    [
        ("sglang", REFERENCE, "warn"),  # it serves, right and slowly
        ("vllm", {"speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}, "fail"),  # it ends
        ("sglang", {"speculative-algorithm": "NGRAM"}, "ok"),
        ("sglang", {"speculative-algorithm": "EAGLE3"}, "fail"),
    ],
)
def test_a_model_without_the_head_that_the_flags_ask_for(
    tmp_path: Path, kind: str, args: dict[str, Any], level: str
) -> None:
    models.usual(tmp_path / "model", num_hidden_layers=9)
    assert levels(check_draft, asking(tmp_path, args, kind)) == ([level] if level != "ok" else [])


def test_an_unfinished_drafter_is_named_with_its_file(tmp_path: Path) -> None:
    draft = made_for(tmp_path / "draft", "DFlashDraftModel")
    (draft / "model.safetensors").write_bytes(b"")
    flags = {"speculative-algorithm": "DFLASH", "speculative-draft-model-path": str(draft)}
    (message,) = told(check_draft, asking(tmp_path, flags), "fail")
    assert f"{draft / 'model.safetensors'} is cut off" in message

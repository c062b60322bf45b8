"""C16: a drafter of another kind than the flags say, or none at all, is told before the servers load for minutes.

Met nevertheless: that a running server accepts 1.00 tokens is told within its first 200 decode reports.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.conftest import write_prompts
from tests.contract import recorded
from tests.doctoring import context, levels, told
from tests.harness import Case
from tests.reference import ARGS as REFERENCE
from tokenmill.auditing import expected
from tokenmill.checks.base import Context
from tokenmill.checks.draft import check_draft
from tokenmill.core import speculation
from tokenmill.core.audit import Audit


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


# -- while it runs -----------------------------------------------------------------------------------------------------
def test_a_real_servers_log_of_useless_drafts_is_read() -> None:
    """SGLang 0.5.11 on an H200, with the reference's flags and a head that was never trained."""
    made = Audit(expected(REFERENCE))
    made.begin(0, "0", tells=True)
    lines = recorded.text("sglang-0.5.11-h200/hybrid-mtp-reference-flags.log").splitlines()
    lengths = [length for line in lines if (length := speculation.told(line)) is not None]
    assert lengths
    assert set(lengths) == {1.0}
    while len(made.windows[0].reports) < 200:
        assert made.findings() == ()
        made.report(0, lengths)
    (found,) = made.findings()
    assert found.kind == "speculation_useless"
    assert "accept length 1.00" in found.text
    assert "the flags say EAGLE with the model's own head" in found.text


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_running_server_that_accepts_no_draft_is_named_in_status_events_and_report(case: Case) -> None:
    """Two scripted servers, whose decode reports say it; the answers are right."""
    write_prompts(case.folder / "prompts.jsonl", 160, start=40)
    draft = made_for(case.folder / "draft", "LlamaForCausalLMEagle3")
    args = {
        "slots": 4,
        "latency-ms": 150,
        "accept-length": 1.0,
        "speculative-algorithm": "EAGLE",
        "speculative-draft-model-path": str(draft),
        "speculative-num-steps": 3,
    }
    case.write(engine={"args": args})
    assert case.run("--skip", "draft") == 0, case.output()
    status = json.loads((case.run_path / "status.json").read_text())
    assert sorted((found["kind"], found["server"]) for found in status["findings"]) == [
        ("speculation_useless", "0"),
        ("speculation_useless", "1"),
    ]
    words = "speculation does not help, it costs; the drafter is a LlamaForCausalLMEagle3, the flags say EAGLE"
    assert all(words in found["text"] for found in status["findings"])
    assert case.output().count(words) == 2, "told once for each server"
    report = json.loads((case.run_path / "report.json").read_text())
    assert [row["kind"] for row in report["findings"]] == ["speculation_useless"] * 2
    assert words in (case.run_path / "report.html").read_text()
    assert case.wait(case.command("status", str(case.run_path))) == 0
    assert case.output().count(words) == 4


@pytest.mark.timeout(120)
def test_a_running_server_that_does_not_speculate_at_all_is_named(case: Case) -> None:
    write_prompts(case.folder / "prompts.jsonl", 160, start=40)
    case.write(engine={"args": {"slots": 4, "latency-ms": 150, "speculative-algorithm": "NGRAM"}})
    assert case.run() == 0, case.output()
    assert case.output().count("the flags ask for NGRAM, and ") == 2

"""What `tune` tries for whose arguments."""

from typing import Any

import pytest

from tokenmill.core import variants
from tokenmill.core.variants import Setup

EAGLE: dict[str, Any] = {
    "context-length": 8192,
    "speculative-algorithm": "EAGLE",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
MTP: dict[str, Any] = {"max-model-len": 8192, "speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}
DRAFT: dict[str, Any] = {"parallel": 4, "ctx-size": 8192, "spec-type": "draft-simple", "spec-draft-model": "d.gguf"}


def tried(kind: str, args: dict[str, Any], *, own_head: bool = False) -> dict[str, dict[str, Any]]:
    found = variants.speculative(kind, args, own_head=own_head)
    assert len({setup.name for setup in found}) == len(found)
    assert args not in [setup.args for setup in found]
    return {setup.name: setup.args for setup in found}


@pytest.mark.parametrize(("kind", "args"), [("sglang", EAGLE), ("vllm", MTP), ("llamacpp", DRAFT), ("fake", EAGLE)])
def test_off_is_the_config_without_what_asks_for_speculation(kind: str, args: dict[str, Any]) -> None:
    off = next(iter(tried(kind, args).values()))
    assert off == {name: value for name, value in args.items() if "spec" not in name}
    assert variants.own(kind, off).name == "no speculation"


def test_sglangs_steps_and_draft_tokens_go_together() -> None:
    found = tried("sglang", EAGLE)
    assert list(found)[1:] == [
        "EAGLE, 2 draft tokens",
        "NGRAM, 4 draft tokens",
        "EAGLE, 1 draft token",
        "NGRAM, 12 draft tokens",
        "EAGLE, 5 draft tokens",
    ]
    assert found["EAGLE, 5 draft tokens"] == EAGLE | {"speculative-num-steps": 5, "speculative-num-draft-tokens": 6}
    ngram = found["NGRAM, 4 draft tokens"]
    assert ngram == {"context-length": 8192, "speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 4}
    assert not any("EAGLE" in name for name in tried("sglang", EAGLE | {"speculative-eagle-topk": 4}) if "," in name)


def test_a_head_in_the_models_own_files_is_tried() -> None:
    assert list(tried("sglang", {})) == ["NGRAM, 4 draft tokens", "NGRAM, 12 draft tokens"]
    assert "EAGLE, 3 draft tokens" in tried("sglang", {}, own_head=True)
    found = tried("vllm", {}, own_head=True)
    assert found["MTP, 3 draft tokens"] == {"speculative-config": {"method": "mtp", "num_speculative_tokens": 3}}


def test_vllms_table_is_kept_but_for_its_number() -> None:
    config = {"method": "eagle3", "model": "/drafter", "num_speculative_tokens": 2}
    found = tried("vllm", {"speculative-config": config})
    assert found["EAGLE3, 3 draft tokens"] == {"speculative-config": config | {"num_speculative_tokens": 3}}
    assert found["NGRAM, 4 draft tokens"]["speculative-config"]["method"] == "ngram"
    dotted = {"speculative-config.method": "mtp", "speculative-config.num_speculative_tokens": 1}
    assert tried("vllm", dotted)["MTP, 2 draft tokens"] == {
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 2}
    }


def test_llamacpp_drafts_with_the_models_drafter_and_without() -> None:
    found = tried("llamacpp", DRAFT)
    assert found["draft-simple, 3 draft tokens"] == DRAFT | {"spec-draft-n-max": 3}
    ngram = found["ngram-simple, 4 draft tokens"]
    assert ngram["spec-type"] == "ngram-simple"
    assert "spec-draft-model" not in ngram
    # n-gram is the config's own: the drafter's file is known, and is tried with it
    own = DRAFT | {"spec-type": "ngram-simple", "spec-ngram-simple-size-m": 12}
    assert variants.own("llamacpp", own).name == "ngram-simple, 12 draft tokens"
    assert "draft-simple, 3 draft tokens" in tried("llamacpp", own)


def test_an_engine_that_nobody_knows_is_tried_as_it_is() -> None:
    assert variants.speculative("another", {"speed": 3}, own_head=False) == []
    assert variants.without_speculation("another", {"speed": 3}) == {"speed": 3}
    assert variants.own("another", {"speed": 3}).name == "the config as it is"


def test_more_at_once_and_fewer() -> None:
    best = Setup("no speculation", "as is", {"parallel": 4, "ctx-size": 8192}, as_is=True)
    (more,) = variants.wider("llamacpp", best, [])
    assert more.args == {"parallel": 8, "ctx-size": 16384}  # as much context for each
    assert not more.as_is
    levers: list[dict[str, Any]] = [{"max-num-seqs": 64}, {"gpu-memory-utilization": 0.95}]
    assert [each.aspect for each in variants.wider("vllm", best, levers)] == ["concurrency", "memory"]
    assert [each.name.partition("; ")[2] for each in variants.narrower(best, 4)] == ["2 at once", "1 at once"]
    assert [each.share for each in variants.narrower(best, 6)] == [0.5]
    assert variants.narrower(best, 1) == []

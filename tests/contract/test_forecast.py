"""What each engine's rule foretells, held to what the real engine then said of itself (tests/data)."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.contract import recorded
from tests.contract.samples import engine, spec
from tests.reference import ARGS as REFERENCE
from tokenmill.core.capacity import GIB, HELD, Forecast, Given, surprise
from tokenmill.core.shape import Shape, shape_of

SGLANG, VLLM = "sglang-0.5.11-h200", "vllm-0.32-cpu"

H200 = 143_771 << 20
"""nvidia-smi's memory.total of the card of the recordings."""

SMOL = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
"""SmolLM2-135M's config.json, as far as it is read."""


def small() -> Shape:
    shape = shape_of(SMOL)
    assert shape is not None
    return shape


def hybrid() -> Shape:
    """The recorded hybrid: six Gated DeltaNet layers, two attention layers."""
    shape = shape_of(json.loads(recorded.text(f"{SGLANG}/hybrid.config.json")))
    assert shape is not None
    return shape


def reported(name: str) -> dict[str, Any]:
    """SGLang's summary line."""
    line = next(line for line in recorded.lines(name) if "max_total_num_tokens=" in line and "context_len=" in line)
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)(?![.\d])", line)}


def weights(name: str) -> int:
    line = next(line for line in recorded.lines(name) if "Load weight end" in line)
    found = re.search(r"mem usage=([\d.]+) GB", line)
    assert found is not None
    return int(float(found[1]) * GIB)


def free(name: str) -> int:
    """The memory that SGLang found before it loaded anything, as a card of that size."""
    line = next(line for line in recorded.lines(name) if "Load weight begin" in line)
    found = re.search(r"avail mem=([\d.]+) GB", line)
    assert found is not None
    return int(float(found[1]) * GIB) + HELD


def about(foretold: Forecast, tokens: int) -> bool:
    return foretold.limits.kv_tokens is not None and abs(foretold.limits.kv_tokens / tokens - 1) < 0.01


def test_sglang_with_the_reference_runs_flags_on_a_hybrid_model() -> None:
    log = f"{SGLANG}/hybrid-mtp-reference-flags.log"
    given = Given(
        {**REFERENCE, "mem-fraction-static": 0.5},
        version="0.5.11",
        memory=H200,
        weights=weights(log),
        shape=hybrid(),
        max_tokens=8192,
    )
    foretold, said = engine("sglang").forecast(given), reported(log)
    assert (foretold.limits.running, foretold.limits.why) == (said["max_running_requests"], "max-mamba-cache-size")
    assert about(foretold, said["max_total_num_tokens"])
    info = engine("sglang").info(spec("sglang"), recorded.page(f"{SGLANG}/hybrid-mtp.server_info.json"))
    assert (foretold.context, foretold.reserve, foretold.limits.good) == (info.context, info.reserve, info.limits.good)
    assert surprise(foretold.limits, info.limits) == ""


def test_sglang_without_speculation_on_a_plain_model() -> None:
    log = f"{SGLANG}/plain.log"
    args = {"mem-fraction-static": 0.35, "context-length": 4096, "cuda-graph-max-bs": 128}
    foretold = engine("sglang").forecast(Given(args, memory=H200, weights=weights(log), shape=small(), max_tokens=256))
    assert foretold.limits.running == reported(log)["max_running_requests"] == 4096
    assert about(foretold, reported(log)["max_total_num_tokens"])
    assert foretold.limits.good == 128


def test_sglang_with_ngram_speculation_beside_another_server_on_the_card() -> None:
    log = f"{SGLANG}/ngram.log"
    args = {"mem-fraction-static": 0.35, "context-length": 4096, "speculative-algorithm": "NGRAM"}
    args["speculative-num-draft-tokens"] = 8
    given = Given(args, memory=free(log), weights=weights(log), shape=small(), max_tokens=256)
    foretold, said = engine("sglang").forecast(given), reported(log)
    assert (foretold.limits.running, foretold.limits.why) == (48, "speculation's own default of 48")
    assert foretold.limits.running == said["max_running_requests"]
    assert about(foretold, said["max_total_num_tokens"])
    info = engine("sglang").info(spec("sglang"), recorded.page(f"{SGLANG}/ngram.server_info.json"))
    assert (foretold.limits.why, foretold.reserve) == (info.limits.why, info.reserve)


def test_vllm_on_a_cpu() -> None:
    log = recorded.text(f"{VLLM}/eager.log")
    args = {"max-num-seqs": 16, "max-model-len": 2048}
    given = Given(args, {"VLLM_CPU_KVCACHE_SPACE": "1"}, weights=1, shape=small(), max_tokens=256)
    foretold = engine("vllm").forecast(given)
    info = engine("vllm").info(replace(spec("vllm"), args=args), engine_page(), log)
    assert foretold.limits == replace(info.limits, good_why=foretold.limits.good_why)
    assert foretold.limits.kv_tokens == 46_592
    assert foretold.context == 2048


def engine_page() -> bytes:
    return json.dumps({"data": [{"id": "smollm2", "max_model_len": 2048}]}).encode()


@pytest.mark.parametrize(("memory", "card", "most"), [(192, "B200", 1024), (80, "A100", 256), (48, "L40", 256)])
def test_vllm_has_a_default_of_its_own_for_each_card(memory: int, card: str, most: int) -> None:
    given = Given(memory=memory * GIB, card_name=f"NVIDIA {card}", weights=GIB, shape=small(), max_tokens=256)
    assert engine("vllm").forecast(given).limits.running == most


def test_llamacpps_slots_share_the_context_as_it_says_itself() -> None:
    props = recorded.reply("llamacpp-cpu/replies.json", "props")
    info = engine("llamacpp").info(spec("llamacpp"), props)
    said = re.search(r"n_slots = (\d+), n_ctx_slot = (\d+)", recorded.text("llamacpp-cpu/serving.log"))
    assert said is not None
    slots, each = int(said[1]), int(said[2])
    foretold = engine("llamacpp").forecast(Given({"parallel": slots, "ctx-size": slots * each}))
    assert (foretold.limits, foretold.context) == (info.limits, info.context)
    assert (foretold.limits.running, foretold.context) == (slots, each)

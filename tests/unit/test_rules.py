"""The engines' own rules by example, and laws that hold for any config. Real engines are in tests/contract."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tokenmill.core.capacity import GIB, Forecast, Given, llamacpp, vllm
from tokenmill.core.sglang_rule import sglang
from tokenmill.core.shape import Shape, shape_of

many = settings(derandomize=True, deadline=None)

_found = shape_of(reference.QWEN)
assert _found is not None
QWEN: Shape = _found
LLAMA = Shape(layers=32, hidden=4096, attention=32, token_values=2 * 8 * 128, kv_heads=8, context=131_072)
B200 = Given(
    memory=reference.B200S[0].memory_total, card_name="NVIDIA B200", weights=reference.WEIGHTS, max_tokens=8192
)


def hybrid(args: dict[str, Any], version: str = "0.5.11", **fields: Any) -> Forecast:
    return sglang(replace(B200, args=args, version=version, shape=QWEN, **fields))


# -- shapes ------------------------------------------------------------------------------------------------------------
def test_the_reference_model_has_16_layers_with_a_cache_and_48_with_a_state() -> None:
    assert (QWEN.attention, QWEN.recurrent) == (16, 48)
    assert QWEN.token_bytes() == 65_536
    assert QWEN.state_bytes() == 48 * (48 * 128 * 128 * 4 + (48 * 128 + 2 * 16 * 128) * 3 * 2)
    assert QWEN.state_bytes(ssm_type="bfloat16") < 0.52 * QWEN.state_bytes()


def test_heads_are_split_over_cards_until_each_has_one() -> None:
    assert [LLAMA.token_bytes(cards) for cards in (1, 2, 8, 16)] == [131_072, 65_536, 16_384, 16_384]
    compressed = Shape(61, 7168, 61, 576, compressed=True)
    assert compressed.token_bytes(8) == compressed.token_bytes() == 61 * 576 * 2


def test_layer_types_and_an_interval_say_the_same() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text = {**reference.QWEN["text_config"], "layer_types": kinds * 16}  # type: ignore[dict-item]
    assert shape_of({**reference.QWEN, "text_config": text}) == QWEN


@pytest.mark.parametrize("config", [{}, {"hidden_size": "many"}, {"num_hidden_layers": 2, "hidden_size": True}])
def test_a_config_that_tells_nothing_has_no_shape(config: dict[str, Any]) -> None:
    assert shape_of(config) is None


# -- SGLang ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "version", "slots"),
    [
        ({}, "0.5.11", 5),
        ({"disable-overlap-schedule": True}, "0.5.11", 4),
        ({"speculative-eagle-topk": 2}, "0.5.11", 4),
        ({"mamba-scheduler-strategy": "no_buffer"}, "0.5.11", 3),
        ({"mamba-scheduler-strategy": "auto"}, "0.5.11", 3),
        ({"disable-radix-cache": True}, "0.5.11", 1),
        ({"mamba-radix-cache-strategy": "extra_buffer"}, "0.5.23", 5),
        ({"mamba-radix-cache-strategy": "extra_buffer_lazy"}, "0.5.23", 4),
        ({"mamba-radix-cache-strategy": "auto"}, "0.5.23", 5),
        ({"mamba-radix-cache-strategy": "no_buffer"}, "0.5.23", 3),
    ],
)
def test_states_that_a_request_takes(args: dict[str, Any], version: str, slots: int) -> None:
    found = hybrid({**reference.ARGS, "max-mamba-cache-size": 40, **args}, version)
    assert (found.limits.running, found.limits.why) == (40 // slots, "max-mamba-cache-size")


def test_the_first_form_of_speculation_does_without_the_overlapped_scheduler() -> None:
    found = hybrid(reference.ARGS, env={"SGLANG_ENABLE_SPEC_V2": "0"})
    assert found.limits.running == 20
    assert hybrid(reference.ARGS, "0.5.23", env={"SGLANG_ENABLE_SPEC_V2": "0"}).limits.running == 16, "no longer read"


def test_the_pool_means_nothing_to_a_model_without_states() -> None:
    found = sglang(replace(B200, args=reference.ARGS, shape=LLAMA))
    assert (found.limits.running, found.limits.why) == (48, "speculation's own default of 48")


def test_a_pool_that_is_left_to_sglang_takes_its_share_of_the_memory() -> None:
    args = {**reference.without("max-mamba-cache-size"), "max-running-requests": 1000}
    for version in ("0.5.11", "0.5.23"):
        found = hybrid({**args, "speculative-algorithm": None}, version)
        assert found.limits.why == "the states that the memory holds"
        assert found.limits.running is not None
        states = found.limits.running * 5 * QWEN.state_bytes()
        assert found.limits.kv_tokens is not None
        assert states / (found.limits.kv_tokens * QWEN.token_bytes()) == pytest.approx(0.9, rel=0.05)


def test_more_memory_for_weights_than_there_is_leaves_a_doubt() -> None:
    found = hybrid(reference.ARGS, memory=48 * GIB)
    assert found.doubt
    assert not found.trouble
    assert found.limits.kv_tokens is None


sglang_args = st.fixed_dictionaries(
    {},
    optional={
        "speculative-algorithm": st.sampled_from(["EAGLE", "EAGLE3", "NGRAM", "DFLASH", "STANDALONE"]),
        "speculative-num-steps": st.integers(1, 8),
        "speculative-eagle-topk": st.integers(1, 4),
        "speculative-num-draft-tokens": st.integers(1, 16),
        "mamba-scheduler-strategy": st.sampled_from(["auto", "no_buffer", "extra_buffer"]),
        "max-mamba-cache-size": st.integers(0, 2000),
        "max-running-requests": st.integers(1, 5000),
        "mem-fraction-static": st.floats(0.1, 0.98),
        "context-length": st.integers(512, 262_144),
        "disable-radix-cache": st.booleans(),
        "tp-size": st.sampled_from([1, 2, 4, 8]),
        "kv-cache-dtype": st.sampled_from(["auto", "fp8_e4m3"]),
    },
)
situations = st.builds(
    Given,
    args=sglang_args,
    version=st.sampled_from(["", "0.5.11", "0.5.23"]),
    memory=st.one_of(st.none(), st.integers(8 * GIB, 300 * GIB)),
    weights=st.one_of(st.none(), st.integers(GIB, 200 * GIB)),
    shape=st.sampled_from([None, QWEN, LLAMA]),
    max_tokens=st.integers(1, 32_768),
)


@many
@given(situations)
def test_a_larger_card_never_runs_fewer(known: Given) -> None:
    if known.memory is None or "mem-fraction-static" not in known.args:
        return  # the share left to SGLang falls at the bounds of its own table
    smaller, larger = sglang(known).limits, sglang(replace(known, memory=known.memory + 10 * GIB)).limits
    assert (smaller.running or 0) <= (larger.running or 0)
    assert (smaller.kv_tokens or 0) <= (larger.kv_tokens or 0)


@many
@given(situations)
def test_no_rule_raises_and_none_promises_a_negative(known: Given) -> None:
    for rule in (sglang, vllm, llamacpp):
        limits = rule(known).limits
        assert min(limits.running or 0, limits.kv_tokens or 0, limits.good or 0) >= 0


@many
@given(situations)
def test_what_the_user_says_is_never_passed_over(known: Given) -> None:
    named, running = known.args.get("max-running-requests"), sglang(known).limits.running
    assert named is None or running is None or running <= named


# -- vLLM and llama.cpp ------------------------------------------------------------------------------------------------
def test_vllm_refuses_more_requests_than_states() -> None:
    found = vllm(replace(B200, args={"max-num-seqs": 4096, "max-model-len": 8192}, shape=QWEN))
    assert "it will refuse" in found.doubt
    assert found.limits.why == "the states that the memory holds"


def test_a_plain_models_cache_in_vllm_is_what_weights_leave() -> None:
    found = vllm(replace(B200, args={"max-model-len": 8192, "gpu-memory-utilization": 0.5}, shape=LLAMA))
    assert found.limits.kv_tokens == pytest.approx((B200.memory / 2 - reference.WEIGHTS) / 131_072, rel=0.001)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("args", "asked", "running", "context"),
    [
        ({"parallel": 4, "ctx-size": 8192}, None, 4, 2048),
        ({"parallel": 4, "ctx-size": 8192, "kv-unified": True}, None, 4, 8192),
        ({"ctx-size": 8192}, 2, 2, 4096),
        ({"np": 3}, 8, 3, None),
        ({}, None, 1, None),
    ],
)
def test_llamacpps_slots(args: dict[str, Any], asked: int | None, running: int, context: int | None) -> None:
    found = llamacpp(Given(args, asked=asked))
    assert (found.limits.running, found.context) == (running, context)


@pytest.mark.parametrize(
    ("args", "asked", "lever"),
    [
        ({"ctx-size": 8192}, None, {"parallel": 4}),
        ({"ctx-size": 2048}, None, None),
        ({}, None, {"parallel": 4, "ctx-size": 4 * 2024}),
        ({"parallel": 1, "ctx-size": 8192}, None, None),
        ({"ctx-size": 8192}, 2, None),
    ],
)
def test_llamacpps_one_slot_is_not_made_more_in_silence_but_more_are_proposed(
    args: dict[str, Any], asked: int | None, lever: dict[str, int] | None
) -> None:
    found = llamacpp(Given(args, asked=asked, max_tokens=1000))
    assert list(found.levers) == ([] if lever is None else [lever])

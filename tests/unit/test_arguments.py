"""Arguments that cannot be meant together; the reference run's can."""

from typing import Any

import pytest

from tests.reference import ARGS as REFERENCE
from tokenmill.core.arguments import Setting, contradictions, is_hybrid

OLD = Setting(known=frozenset({"mamba-scheduler-strategy"}), hybrid=True)
SPEC = {"speculative-algorithm": "EAGLE"}


def flags(kind: str, args: dict[str, Any], setting: Setting = OLD) -> dict[str, bool]:
    """The flags that are complained of, and whether the engine would end."""
    return {found.flag: found.ends for found in contradictions(kind, args, setting)}


def test_the_reference_runs_flags_agree() -> None:
    assert flags("sglang", dict(REFERENCE)) == {}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({**SPEC, "speculative-eagle-topk": 1, "mamba-scheduler-strategy": "extra_buffer"}, "speculative-eagle-topk"),
        ({**REFERENCE, "mamba-scheduler-strategy": "no_buffer"}, "mamba-scheduler-strategy"),
        ({**SPEC}, "mamba-scheduler-strategy"),
        ({"mem-fraction-static": 90}, "mem-fraction-static"),
        ({"tp-size": 2}, "tp-size"),
        ({"tensor-parallel-size": 2, "pp-size": 2}, "tensor-parallel-size"),
    ],
)
def test_what_sglang_ends_over(args: dict[str, Any], complaint: str) -> None:
    assert flags("sglang", args) == {complaint: True}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({**REFERENCE, "speculative-num-draft-tokens": 8}, "speculative-num-draft-tokens"),
        ({"speculative-num-steps": 3}, "speculative-num-steps"),
        ({**REFERENCE, "disable-radix-cache": True}, "mamba-scheduler-strategy"),
        ({"allow-auto-truncate": True}, "allow-auto-truncate"),
        ({"enable-x": True, "no-enable-x": True}, "no-enable-x"),
    ],
)
def test_what_sglang_serves_with_and_nobody_means(args: dict[str, Any], complaint: str) -> None:
    assert flags("sglang", args) == {complaint: False}


@pytest.mark.parametrize(
    ("args", "setting", "expected"),
    [
        ({"tensor-parallel-size": 2}, Setting(gpus_per_server=2), {}),
        ({}, Setting(gpus_per_server=2), {"tensor-parallel-size": False}),
        (
            {"tensor-parallel-size": 2, "data-parallel-size": 2},
            Setting(gpus_per_server=2),
            {"tensor-parallel-size": True},
        ),
        ({"tensor-parallel-size": 2}, Setting(has_gpus=False), {}),
        ({"gpu-memory-utilization": 0}, Setting(), {"gpu-memory-utilization": True}),
        ({"max-num-batched-tokens": 64, "max-num-seqs": 128}, Setting(), {"max-num-batched-tokens": False}),
        ({"max-num-batched-tokens": 8192, "max-num-seqs": 128}, Setting(), {}),
    ],
)
def test_vllm(args: dict[str, Any], setting: Setting, expected: dict[str, bool]) -> None:
    assert flags("vllm", args, setting) == expected


def test_a_model_without_states_and_a_version_without_the_flag_need_no_strategy() -> None:
    assert flags("sglang", SPEC, Setting(known=OLD.known)) == {}
    assert flags("sglang", SPEC, Setting(hybrid=True)) == {}


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"full_attention_interval": 4}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({}, False),
    ],
)
def test_hybrid_models_are_told_by_their_layers(config: dict[str, Any], hybrid: bool) -> None:
    assert is_hybrid(config) is hybrid

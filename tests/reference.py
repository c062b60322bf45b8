"""The reference run: its config, its model as far as a plan reads it, its seven cards."""

import json
from pathlib import Path
from typing import Any

from tokenmill import configfile
from tokenmill.config import Config
from tokenmill.machine.gpus import Gpu

ARGS: dict[str, Any] = {
    "speculative-algorithm": "EAGLE",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
    "mamba-scheduler-strategy": "extra_buffer",
    "max-mamba-cache-size": 80,
    "mem-fraction-static": 0.90,
    "context-length": 8192,
}

QWEN = {
    "model_type": "qwen3_5",
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
        "mamba_ssm_dtype": "float32",
    },
}
"""Qwen3.6-27B's config.json, as far as it is read."""

WEIGHTS = 54_000_000_000

B200S = [Gpu(index, f"GPU-{index}", "NVIDIA B200", 183_359 << 20, 0) for index in range(7)]


def model(folder: Path) -> Path:
    """A folder that looks like the model: its config, and weights of its size that take no room."""
    path = folder / "Qwen3.6-27B"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN))
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(WEIGHTS)
    return path


def config(folder: Path, **sections: Any) -> Config:
    """The reference config (design, section 2); `sections` change keys, `args` replaces the engine's flags."""
    args = sections.pop("args", ARGS)
    data: dict[str, Any] = {
        "name": "qwen36-regen",
        "model": {"path": "/nowhere/models/Qwen3.6-27B", "name": "Qwen3.6-27B"},
        "engine": {"kind": "sglang", "args": args, "env": {"SGLANG_ENABLE_SPEC_V2": "1"}},
        "fleet": {"servers": 7},
        "prompts": {"path": str(folder / "prompts.jsonl")},
        "output": {"dir": str(folder / "runs")},
    }
    for name, keys in sections.items():
        data[name] = {**data.get(name, {}), **keys}
    return configfile.validate(data, "test")


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in ARGS.items() if name not in names}

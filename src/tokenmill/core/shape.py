"""What a model's config.json tells of the memory that a request takes on a GPU. Values in, values out.

Full attention (MHA, GQA, MLA) and Gated DeltaNet layers (Qwen3-Next, Qwen3.5 and 3.6) are known exactly. Layers with a
sliding window are counted as full ones, so that their cache holds rather more than is said here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CACHE_BYTES = 2
"""Of one value of the KV cache and of a convolution's state: bfloat16, unless flags say otherwise."""

SSM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of one value of a recurrent state, by --mamba-ssm-dtype or the config's mamba_ssm_dtype; default float32
(SGLang 0.5.11, configs/mamba_utils.py)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`attention` layers keep keys and values of every token, `recurrent` ones a state of fixed size a request.

    `token_values` are the values a token leaves in one attention layer over all `kv_heads`; `conv_values` and
    `ssm_values` those of one request in one recurrent layer. `compressed`: MLA, which is not split over GPUs.
    """

    layers: int
    hidden: int
    attention: int
    token_values: int
    kv_heads: int = 1
    compressed: bool = False
    recurrent: int = 0
    conv_values: int = 0
    ssm_values: int = 0
    ssm_type: str = "float32"
    context: int | None = None
    vision: bool = False

    def token_bytes(self, cards: int = 1, value_bytes: int = CACHE_BYTES) -> int:
        """What a token takes on each of `cards` GPUs that share the model; heads fewer than GPUs are doubled."""
        if self.compressed:
            return self.attention * self.token_values * value_bytes
        return self.attention * self.token_values * max(1, self.kv_heads // cards) // self.kv_heads * value_bytes

    def state_bytes(self, cards: int = 1, ssm_type: str = "") -> int:
        """What one state of all recurrent layers takes on each GPU."""
        ssm = self.ssm_values * SSM_BYTES.get(ssm_type or self.ssm_type, SSM_BYTES["float32"])
        return self.recurrent * (self.conv_values * CACHE_BYTES + ssm) // cards


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """The shape in a config.json; None where it lacks what a transformer's config has."""
    text = config.get("text_config") or config
    layers, hidden, heads = (_int(text, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if not layers or not hidden or not heads:
        return None
    recurrent = sum(kind == "linear_attention" for kind in _kinds(text, layers))
    kv_heads = _int(text, "num_key_value_heads") or heads
    head = _int(text, "head_dim") or hidden // heads
    rank = _int(text, "kv_lora_rank")
    keys, values = (_int(text, f"linear_{name}_head_dim") for name in ("key", "value"))
    groups, states = (_int(text, f"linear_num_{name}_heads") for name in ("key", "value"))
    return Shape(
        layers=layers,
        hidden=hidden,
        attention=layers - recurrent,
        token_values=rank + _int(text, "qk_rope_head_dim") if rank else kv_heads * (head + head),
        kv_heads=kv_heads,
        compressed=bool(rank),
        recurrent=recurrent,
        # SGLang 0.5.11, configs/mamba_utils.py (Mamba2StateShape.create) and configs/qwen3_next.py
        conv_values=(states * values + 2 * groups * keys) * max(0, _int(text, "linear_conv_kernel_dim") - 1),
        ssm_values=states * values * keys,
        ssm_type=str(text.get("mamba_ssm_dtype") or "float32"),
        context=_int(text, "max_position_embeddings") or None,
        vision="vision_config" in config,
    )


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return [str(kind) for kind in kinds]
    every = _int(text, "full_attention_interval")
    if not every:
        return ["full_attention"] * layers
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _int(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0

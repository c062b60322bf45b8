"""Tiny models on a disk, whole: what tests damage, one fault at a time."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Tensors = Mapping[str, Sequence[int]]
"""Names and shapes; of one byte a value."""


def safetensors(path: Path, tensors: Tensors) -> Path:
    """A safetensors file with bytes that are not zero, so that no file system makes holes of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 1
        for length in shape:
            size *= length
        header[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\x01" * end)
    return path


def write(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "what": 1, "is": 2}, "unk_token": "[UNK]"},
}
"""Counts words; a real one, for transformers to load."""


def as_bytes(path: Path, end: int = 256) -> Path:
    """A tokenizer whose ids are the bytes of a text, as the scripted server's are; `end` is its end token."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}  # as GPT-2 writes bytes: the others from 256 on
    shown |= {byte: chr(256 + place) for place, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    write(
        path / "tokenizer.json",
        **{
            **TOKENIZER,
            "added_tokens": [
                {"id": end, "content": "<|end|>", "special": True, "normalized": False}
                | {"single_word": False, "lstrip": False, "rstrip": False}
            ],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {text: byte for byte, text in shown.items()}, "merges": []},
        },
    )
    write(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>")
    write(path / "generation_config.json", eos_token_id=end)
    return path


def folder(path: Path, shards: Mapping[str, Tensors], *, index: bool = True, **config: Any) -> Path:
    """A model folder with every part that a chat model has; `config` is added to its config.json."""
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        safetensors(path / name, tensors)
    if index:
        names = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        write(path / "model.safetensors.index.json", metadata={}, weight_map=names)
    write(path / "config.json", **{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 8, **config})
    write(path / "generation_config.json", temperature=0.6, eos_token_id=1)
    write(path / "tokenizer.json", **TOKENIZER)
    write(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return path


BIG = {"model.layers.0.w": (64, 1024)}
"""Some blocks of a disk long, so that a hole or a cut of 4 KiB fits in."""


def usual(path: Path, count: int = 2, **config: Any) -> Path:
    """A model in shards named as the hub's library names them."""
    shards = {
        f"model-{number:05}-of-{count:05}.safetensors": {f"model.layers.{number}.w": (64, 1024)}
        for number in range(1, count + 1)
    }
    return folder(path, shards, **config)

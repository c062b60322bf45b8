"""Small model folders with real safetensors headers, and configs that stage them."""

import json
import random
import struct
from pathlib import Path
from typing import Any

from tokenmill import configfile
from tokenmill.config import Config


def write_model(folder: Path, *, shards: int = 3, size: int = 3_000_000, seed: int = 0) -> Path:
    """A whole model of random bytes: config, tokenizer, shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["Tiny"]}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "tokenizer.json").write_text("{}")
    draw = random.Random(seed)
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        write_shard(folder / name, f"w{number}", draw.randbytes(size))
    index = {
        "metadata": {"total_size": shards * size},
        "weight_map": {f"w{number}": name for number, name in enumerate(names)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_shard(path: Path, tensor: str, data: bytes) -> None:
    """A safetensors file of one tensor."""
    header = json.dumps({tensor: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder that is no manifest of ours, by its name."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "tokenmill-manifest.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def staging_config(model: Path | str, root: Path | str, **stage: Any) -> Config:
    """A config whose model is to be staged to a folder."""
    data = {"model": {"path": str(model)}, "stage": {"to": str(root), **stage}, "prompts": {"path": "p.jsonl"}}
    return configfile.validate(data, "test")

"""A model's files, read offline: is it whole, what does it say of itself, and which model is it.

A Hugging Face folder (or a snapshot of its cache) or one .gguf file.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tokenmill.errors import PreflightError

_HEAD = 1 << 20
"""Bytes of a weights file that go into the fingerprint: its header, with names, shapes and offsets of all tensors."""

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} where there is no such file. Raises PreflightError where it is broken."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PreflightError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise PreflightError(f"{path} holds no JSON object")
    return data


def sampling_defaults(model: Path) -> dict[str, float]:
    """The model's own sampling, from its generation_config.json; {} where it says nothing."""
    config = read_json(model / "generation_config.json") if model.is_dir() else {}
    found = {name: config[name] for name in _SAMPLED if isinstance(config.get(name), int | float)}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    return found


def end_tokens(model: Path) -> frozenset[int]:
    """The ids that end an output: eos_token_id of generation_config.json and config.json."""
    if not model.is_dir():
        return frozenset()
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = read_json(model / name)
        for owner in (config, config.get("text_config") or {}):
            value = owner.get("eos_token_id")
            ids |= {value} if isinstance(value, int) else set(value or [])
    return frozenset(ids)


def template(model: Path) -> str:
    """The chat template's text; empty where the folder has none, or for a .gguf file (the server tells)."""
    if not model.is_dir():
        return ""
    file = model / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = read_json(model / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, list):
        found = next((entry.get("template", "") for entry in found if entry.get("name") == "default"), "")
    return str(found)


def weight_files(model: Path) -> list[Path]:
    """The files that hold the weights, in order."""
    if model.is_file():
        return [model]
    index = read_json(model / "model.safetensors.index.json")
    named = set(index.get("weight_map", {}).values())
    return sorted({*(model / name for name in named), *model.glob("*.safetensors")})


def problems(model: Path) -> list[str]:
    """What is missing or broken in a model's files; empty where it is whole as far as names and sizes can tell."""
    if not model.exists():
        return [f"{model} does not exist"]
    if model.is_file():
        with model.open("rb") as file:
            head = file.read(4)
        return [] if head == b"GGUF" else [f"{model} is not a GGUF file: it begins with {head!r}"]
    found = [] if (model / "config.json").is_file() else [f"{model}/config.json is missing"]
    blobs = model.parent.parent / "blobs" if model.parent.name == "snapshots" else None
    found += [f"{part} is an unfinished download" for part in (blobs.glob("*.incomplete") if blobs else ())]
    files = weight_files(model)
    if not files and not list(model.glob("*.bin")) + list(model.glob("*.gguf")):
        found.append(f"{model} holds no weights (*.safetensors)")
    return found + [text for file in files if (text := _shard_problem(file))]


def _shard_problem(file: Path) -> str:
    """A shard is whole when 8 + header + data offsets = its size (the safetensors format)."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                return f"{file} is a git-lfs pointer, not the weights"
            if size < 8 or length > size:
                return f"{file} is cut off: {size} bytes"
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except FileNotFoundError:
        return f"{file} is missing" + (" (a dangling link)" if os.path.islink(file) else "")  # noqa: PTH114
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{file} has no readable header: {error}"
    return "" if size == expected else f"{file} has {size} bytes, its header says {expected}"


def fingerprint(model: Path) -> str:
    """Which model this is, wherever its files lie: config, tokenizer and template whole, sizes and heads of weights."""
    digest = hashlib.sha256()
    if model.is_dir():
        names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model")
        for name in names:
            file = model / name
            if file.is_file():
                digest.update(name.encode() + b"\0" + file.read_bytes())
    for file in weight_files(model):
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(
                    f"{'' if model.is_file() else file.name}\0{file.stat().st_size}\0".encode() + stream.read(_HEAD)
                )
    return digest.hexdigest()[:16]


def added_tokens(model: Path, *texts: str) -> dict[str, int]:
    """The ids of texts that are single tokens of their own, such as think tags; others are left out."""
    decoder = read_json(model / "tokenizer_config.json").get("added_tokens_decoder") or {}
    ids = {str(entry.get("content")): int(number) for number, entry in decoder.items()}
    if not ids:
        entries = read_json(model / "tokenizer.json").get("added_tokens") or []
        ids = {str(entry.get("content")): int(entry["id"]) for entry in entries}
    return {text: ids[text] for text in texts if text in ids}

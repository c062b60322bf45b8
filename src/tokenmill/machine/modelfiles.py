"""A model's files, read offline: what does it say of itself, and which model is it. (Is it whole: wholeness.py.)

A Hugging Face folder (or a snapshot of its cache) or one .gguf file.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill.errors import PreflightError
from tokenmill.machine import ggufvocab

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
    """The ids that end an output: eos_token_id of generation_config.json and config.json, and the tokenizer's own."""
    if not model.is_dir():
        return frozenset()
    ids = set(special_tokens(model, "eos_token").values())
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


_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def tokenizer_sha256(model: Path) -> str:
    """sha256 of what decides which ids a text becomes, the chat template left out; empty where nothing tells."""
    if model.is_file():
        return ggufvocab.fingerprint(model)
    digest, found = hashlib.sha256(), False
    for name in _TOKENIZER:
        file = model / name
        if file.is_file():
            found = True
            digest.update(name.encode() + b"\0" + file.read_bytes())
    for name in _TOKENIZER_SETTINGS:
        data = read_json(model / name)
        data.pop("chat_template", None)
        if data:
            digest.update(name.encode() + b"\0" + json.dumps(data, sort_keys=True).encode())
    return digest.hexdigest() if found else ""


def weight_map(index: dict[str, Any]) -> dict[str, str]:
    """Tensor → file of an index; {} where it is no such map."""
    found = index.get("weight_map")
    if not isinstance(found, dict):
        return {}
    return {name: file for name, file in found.items() if isinstance(file, str)}


def weight_files(model: Path) -> list[Path]:
    """The files that hold the weights, in order."""
    if model.is_file():
        return [model]
    index = read_json(model / "model.safetensors.index.json")
    named = set(weight_map(index).values())
    return sorted({*(model / name for name in named), *model.glob("*.safetensors")})


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


def special_tokens(model: Path, *names: str) -> dict[str, int]:
    """The ids of what tokenizer_config.json calls eos_token, pad_token and so on; what it does not name is left out."""
    config = read_json(model / "tokenizer_config.json") if model.is_dir() else {}
    texts = {name: _text(config.get(name)) for name in names}
    ids = added_tokens(model, *filter(None, texts.values())) if any(texts.values()) else {}
    return {name: ids[text] for name, text in texts.items() if text in ids}


def _text(token: Any) -> str:
    """A token's text, given as such or in an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def vocabulary(model: Path) -> dict[int, str]:
    """The tokens of tokenizer.json by id, added ones too; {} where a model has no such file."""
    data = read_json(model / "tokenizer.json")
    own = (data.get("model") or {}).get("vocab") or {}
    tokens = {number: text for text, number in own.items()} if isinstance(own, dict) else {}
    if isinstance(own, list):  # Unigram: pairs of text and score, in the ids' order
        tokens = {number: str(entry[0]) for number, entry in enumerate(own)}
    return tokens | {int(entry["id"]): str(entry["content"]) for entry in data.get("added_tokens") or []}


def vocabulary_fingerprint(tokens: Mapping[int, str]) -> str:
    """The same for two models whose ids mean the same tokens."""
    text = "\0".join(f"{number} {tokens[number]}" for number in sorted(tokens))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def vocabulary_size(model: Path) -> int | None:
    """The ids that the model's head can give: its config's, padding included; None where it says nothing."""
    config = read_json(model / "config.json") if model.is_dir() else {}
    for owner in (config.get("text_config") or {}, config):
        if isinstance(owner.get("vocab_size"), int):
            return int(owner["vocab_size"])
    return None

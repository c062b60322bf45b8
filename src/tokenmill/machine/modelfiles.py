"""A model's files, read offline: what does it say of itself, and which model is it. (Is it whole: wholeness.py.)

A Hugging Face folder (or a snapshot of its cache) or one .gguf file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
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
        for owner in (config, _table(config.get("text_config"))):
            value = owner.get("eos_token_id")
            ids |= {number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)}
    return frozenset(ids)


def template(model: Path) -> str:
    """The chat template's text; empty where the folder has none, or for a .gguf file (the server tells)."""
    if not model.is_dir():
        return ""
    file = model / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PreflightError(f"{file} cannot be read: {error}") from error
    found = read_json(model / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, list):
        found = next((one.get("template", "") for one in map(_table, found) if one.get("name") == "default"), "")
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
    decoder = _table(read_json(model / "tokenizer_config.json").get("added_tokens_decoder"))
    ids = {str(_table(entry).get("content")): int(number) for number, entry in decoder.items() if number.isdecimal()}
    if not ids:
        ids = {text: number for number, text in _added(read_json(model / "tokenizer.json"))}
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
    own = _table(data.get("model")).get("vocab")
    tokens = {number: text for text, number in _table(own).items() if isinstance(number, int)}
    if isinstance(own, list):  # Unigram: pairs of text and score, in the ids' order
        tokens = {number: str(entry[0]) for number, entry in enumerate(own) if isinstance(entry, list) and entry}
    return tokens | dict(_added(data))


def _added(tokenizer: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """The added tokens of a tokenizer.json."""
    found = tokenizer.get("added_tokens")
    for entry in map(_table, found if isinstance(found, list) else ()):
        if isinstance(entry.get("id"), int):
            yield entry["id"], str(entry.get("content"))


def _table(value: Any) -> dict[str, Any]:
    """What must be a JSON object; anything else tells nothing."""
    return value if isinstance(value, dict) else {}


def vocabulary_fingerprint(tokens: Mapping[int, str]) -> str:
    """The same for two models whose ids mean the same tokens."""
    text = "\0".join(f"{number} {tokens[number]}" for number in sorted(tokens))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def vocabulary_size(model: Path) -> int | None:
    """The ids that the model's head can give: its config's, padding included; None where it says nothing."""
    config = read_json(model / "config.json") if model.is_dir() else {}
    for owner in (_table(config.get("text_config")), config):
        if isinstance(owner.get("vocab_size"), int):
            return int(owner["vocab_size"])
    return None

"""A model's files: what the model says of itself."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import PreflightError
from tokenmill.machine import modelfiles


def shard(path: Path, size: int = 16) -> Path:
    """A safetensors file of one tensor."""
    header = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(size))
    return path


SHARDS = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in SHARDS:
        shard(folder / name)
    index = {"weight_map": {f"w{n}": name for n, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write(folder / "config.json", hidden_size=8)
    return folder


def write(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content))


def test_broken_json_is_an_error_with_the_files_name(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(PreflightError, match=r"index\.json cannot be read"):
        modelfiles.weight_files(model)
    (model / "config.json").write_text("[]")
    with pytest.raises(PreflightError, match=r"config\.json holds no JSON object"):
        modelfiles.end_tokens(model)


# -- what it says of itself --------------------------------------------------------------------------------------------
def test_the_models_own_sampling(model: Path) -> None:
    assert modelfiles.sampling_defaults(model) == {}
    write(model / "generation_config.json", temperature=0.6, top_k=20, eos_token_id=[1, 2], repetition_penalty=1.1)
    assert modelfiles.sampling_defaults(model) == {"temperature": 0.6, "top_k": 20}
    write(model / "generation_config.json", temperature=0.6, do_sample=False)
    assert modelfiles.sampling_defaults(model) == {"temperature": 0.0}


def test_end_tokens_of_all_its_configs(model: Path) -> None:
    assert modelfiles.end_tokens(model) == frozenset()
    write(model / "generation_config.json", eos_token_id=[1, 2])
    write(model / "config.json", eos_token_id=3, text_config={"eos_token_id": 4})
    assert modelfiles.end_tokens(model) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("in_config", "expected"),
    [
        (None, ""),
        ("{{ a }}", "{{ a }}"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
    ],
)
def test_the_chat_template_is_found_in_either_place(model: Path, in_config: Any, expected: str) -> None:
    write(model / "tokenizer_config.json", chat_template=in_config)
    assert modelfiles.template(model) == expected
    (model / "chat_template.jinja").write_text("{{ own }}")
    assert modelfiles.template(model) == "{{ own }}"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "</think>"}, "8": {"content": "x"}}}),
        ("tokenizer.json", {"added_tokens": [{"id": 7, "content": "</think>"}]}),
    ],
)
def test_think_tags_that_are_single_tokens(model: Path, file: str, content: dict[str, Any]) -> None:
    write(model / file, **content)
    assert modelfiles.added_tokens(model, "<think>", "</think>") == {"</think>": 7}


def test_the_fingerprint_is_the_models_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    before = modelfiles.fingerprint(model)
    moved = model.rename(tmp_path / "elsewhere")
    assert modelfiles.fingerprint(moved) == before
    (moved / "README.md").write_text("other words")
    assert modelfiles.fingerprint(moved) == before
    for change in (lambda: shard(moved / SHARDS[0], 17), lambda: write(moved / "config.json", hidden_size=9)):
        change()
        assert modelfiles.fingerprint(moved) != before
        before = modelfiles.fingerprint(moved)


def test_a_file_has_the_same_fingerprint_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF1")
    (tmp_path / "b.gguf").write_bytes(b"GGUF1")
    (tmp_path / "c.gguf").write_bytes(b"GGUF2")
    a, b, c = (modelfiles.fingerprint(tmp_path / f"{name}.gguf") for name in "abc")
    assert (a == b, a == c) == (True, False)


ODD: tuple[Any, ...] = (5, "x", [], {}, None, [1], [None], ["x"], {"x": 5}, {"7": None}, [{"id": "x"}], True)
"""What may stand where a table or a list is meant."""


def test_odd_files_tell_nothing_and_end_nothing(model: Path) -> None:
    """A key with a value of another type, in each place that is read."""
    keys = {
        "tokenizer_config.json": ("chat_template", "added_tokens_decoder", "eos_token", "pad_token"),
        "tokenizer.json": ("model", "added_tokens"),
        "generation_config.json": ("eos_token_id", "temperature", "do_sample"),
        "config.json": ("text_config", "eos_token_id", "vocab_size"),
    }
    for name, value in ((name, value) for name in keys for value in ODD):
        for key in keys[name]:
            write(model / name, **{key: value}, **({"pad_token": "<p>"} if key == "added_tokens_decoder" else {}))
            assert isinstance(modelfiles.template(model), str)
            assert all(isinstance(number, int) for number in modelfiles.end_tokens(model))
            assert modelfiles.special_tokens(model, "pad_token", "eos_token") == {}
            assert all(isinstance(number, int) for number in modelfiles.vocabulary(model))
            assert all(isinstance(found, int | float) for found in modelfiles.sampling_defaults(model).values())
            assert len(modelfiles.tokenizer_sha256(model)) in (0, 64)
            modelfiles.vocabulary_size(model)
        (model / name).unlink()


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_is_no_text_is_an_error_with_its_name(model: Path, name: str) -> None:
    (model / name).write_bytes(b"\xff\xfe{}")
    with pytest.raises(PreflightError, match=name):
        modelfiles.template(model)

"""Is a model whole: every fault that a download, a copy or a disk leaves behind is told with the file's name."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tokenmill.machine import wholeness

FIRST, SECOND = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.usual(tmp_path / "model")


def grave(model: Path) -> list[str]:
    return [str(fault) for fault in wholeness.faults(model) if fault.grave]


def minor(model: Path) -> list[str]:
    return [str(fault) for fault in wholeness.faults(model) if not fault.grave]


# -- what is whole -----------------------------------------------------------------------------------------------------
def numbered(first: int) -> dict[str, models.Tensors]:
    return {f"model-{first + n:05}-of-00003.safetensors": {f"w{n}": (8,)} for n in range(3)}


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    "shards",
    [
        {"model.safetensors": models.BIG},
        numbered(1),
        numbered(0),
        {f"model.safetensors-{n:05}-of-00002.safetensors": {f"w{n}": (8,)} for n in (1, 2)},
    ],
)
def test_a_whole_model_has_no_faults(tmp_path: Path, shards: dict[str, models.Tensors], index: bool) -> None:
    folder = models.folder(tmp_path / "model", shards, index=index)
    assert wholeness.faults(folder) == []
    assert list(wholeness.lacks(folder, {"architectures": ["A"]})) == []


def test_draft_weights_outside_the_index_are_no_fault_unless_they_are_broken(model: Path) -> None:
    extra = models.safetensors(model / "model-mtp.safetensors", {"mtp.w": (8, 8)})
    assert wholeness.faults(model) == []
    assert {"mtp.w"} <= wholeness.read(model).shapes.keys()
    cut(1)(extra)
    assert [line.split()[0] for line in grave(model)] == [str(extra)]


def test_a_broken_file_that_nothing_loads_is_told_and_stops_nothing(model: Path) -> None:
    cut(1)(models.safetensors(model / "consolidated.safetensors", {"w": (8, 8)}))
    assert grave(model) == []
    assert [line.split()[0] for line in minor(model)] == [str(model / "consolidated.safetensors")]


def test_a_snapshot_of_links_into_the_cache_is_whole(tmp_path: Path, model: Path) -> None:
    snapshot = as_snapshot(tmp_path, model)
    assert wholeness.faults(snapshot) == []
    other = tmp_path / "by-another-name"
    other.symlink_to(snapshot)
    assert wholeness.faults(other) == []


def as_snapshot(root: Path, model: Path) -> Path:
    """The folder as the hub's cache holds it: links to blobs."""
    snapshot, blobs = (root / "models--a--b" / name for name in ("snapshots/0123", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / f"{number:064}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064}")
    return snapshot


# -- one fault at a time -----------------------------------------------------------------------------------------------
def cut(count: int) -> Callable[[Path], Any]:
    return lambda file: os.truncate(file, file.stat().st_size - count)


def hole(file: Path) -> None:
    """As a copy in ranges leaves it when it dies: the right size, and a range that was never written."""
    data = file.read_bytes()
    with file.open("wb") as out:
        out.write(data[:8192])
        out.seek(40960)
        out.write(data[40960:])


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")


def dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("gone")


def header(text: bytes) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(len(text).to_bytes(8, "little") + text)


def other_tensor(file: Path) -> None:
    models.safetensors(file, {"model.layers.9.w": (64, 1024)})


DAMAGES = {
    "cut by 1 byte": (cut(1), "bytes, its header says"),
    "cut by 4 KiB": (cut(4096), "bytes, its header says"),
    "cut to its beginning": (lambda file: os.truncate(file, 20), "is cut off: 20 bytes"),
    "empty": (lambda file: os.truncate(file, 0), "is cut off: 0 bytes"),
    "grown": (lambda file: os.truncate(file, file.stat().st_size + 1), "bytes, its header says"),
    "a hole": (hole, "has a hole from byte 8192 on"),
    "a pointer": (pointer, "is a git-lfs pointer, not the weights"),
    "a dangling link": (dangling, "is missing (a dangling link)"),
    "missing": (Path.unlink, "is missing"),
    "a length that cannot be": (lambda file: file.write_bytes(b"\xff" * 7 + b"\0{}"), "is cut off: 10 bytes"),
    "no JSON": (header(b"no json"), "has no readable header"),
    "a list": (header(b"[1,2]"), "has no readable header"),
    "an empty entry": (header(b'{"w":{}}'), "has no readable header"),
    "another's tensors": (other_tensor, "lacks 1 tensors that the index puts there, such as model.layers.2.w"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_shard_is_named_with_what_it_lacks(model: Path, damage: str) -> None:
    act, told = DAMAGES[damage]
    act(model / SECOND)
    (line,) = grave(model)
    assert line.startswith(f"{model / SECOND} "), line
    assert told in line


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "another's tensors"])
@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors", "0-based"]
)
def test_without_an_index_the_numbers_tell_what_is_missing(tmp_path: Path, damage: str, name: str) -> None:
    stem = name.partition("-0")[0] if name != "0-based" else "model"
    numbers = (0, 1) if name == "0-based" else (1, 2)
    shards = {f"{stem}-{n:05}-of-00002.safetensors": {f"w{n}": (64, 1024)} for n in numbers}
    folder = models.folder(tmp_path / "model", shards, index=False)
    broken = folder / (name if name != "0-based" else "model-00001-of-00002.safetensors")
    DAMAGES[damage][0](broken)
    (line,) = grave(folder)
    assert line.startswith(f"{broken} ")


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    folder = models.usual(tmp_path / "model", 4)
    gone = [folder / f"model-{n:05}-of-00004.safetensors" for n in (2, 4)]
    for file in gone:
        file.unlink()
    assert grave(folder) == [f"{file} is missing" for file in gone]


@pytest.mark.parametrize("age_s", [0, 7200])
@pytest.mark.parametrize(
    "place", ["model/x.incomplete", "model/.cache/huggingface/download/ab.12.incomplete", "model/y.safetensors.aria2"]
)
def test_an_unfinished_download_is_grave_while_it_may_still_run(
    tmp_path: Path, model: Path, place: str, age_s: int
) -> None:
    part = tmp_path / place
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(b"")
    os.utime(part, (time.time() - age_s,) * 2)
    told, other = (grave(model), minor(model)) if not age_s else (minor(model), grave(model))
    assert [line.partition(" is an unfinished download")[0] for line in told] == [str(part)]
    assert other == []


def test_an_unfinished_blob_of_a_snapshot_is_named(tmp_path: Path, model: Path) -> None:
    snapshot = as_snapshot(tmp_path, model)
    part = tmp_path / "models--a--b" / "blobs" / "ab.incomplete"
    part.write_bytes(b"")
    assert grave(snapshot) == [f"{part} is an unfinished download"]


@pytest.mark.parametrize(("name", "is_grave"), [("tokenizer.json", True), ("merges.txt", False)])
@pytest.mark.parametrize("damage", [pointer, dangling])
def test_a_broken_part_is_named(model: Path, name: str, is_grave: bool, damage: Callable[[Path], Any]) -> None:
    (model / name).touch()
    damage(model / name)
    (line,) = grave(model) if is_grave else minor(model)
    assert line.startswith(f"{model / name} is a ")


def test_a_folder_without_its_parts_is_told(tmp_path: Path) -> None:
    assert grave(tmp_path / "none") == [f"{tmp_path / 'none'} does not exist"]
    assert grave(tmp_path) == [f"{tmp_path}/config.json is missing", f"{tmp_path} holds no weights (*.safetensors)"]
    (tmp_path / "config.json").write_text("{}")
    models.write(tmp_path / "pytorch_model.bin.index.json", weight_map={"a": "a.bin", "b": "b.bin"})
    (tmp_path / "a.bin").write_bytes(b"x")
    assert grave(tmp_path) == [f"{tmp_path}/b.bin is missing"]


def test_a_broken_index_is_a_fault_of_the_model(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": ')
    (line,) = grave(model)
    assert "index.json cannot be read" in line


# -- one file ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"GGUF\x03" + bytes(19), ""),
        (b"GGUF\x03\0\0\0", "is cut off in its header"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"", "is not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    ],
)
def test_a_gguf_file_is_told_by_its_first_bytes(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert [told in line for line in grave(tmp_path / "m.gguf")] == ([True] if told else [])


def test_the_other_parts_of_a_gguf_set_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"GGUF\x03" + bytes(19))
    assert grave(tmp_path / "m-00001-of-00002.gguf") == [f"{tmp_path}/m-00002-of-00002.gguf is missing"]


# -- the parts beside the weights --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "removed", "part"),
    [
        ({}, "tokenizer.json", "tokenizer"),
        ({}, "tokenizer_config.json", "tokenizer_config"),
        ({}, "generation_config.json", "generation_config"),
        ({"architectures": []}, "", "architectures"),
        ({"vision_config": {"depth": 2}}, "", "processor"),
        ({"video_token_id": 5}, "", "video_processor"),
        ({"auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": "org/repo--conf.C"}}, "", "code"),
        ({"auto_map": {"AutoTokenizer": ["tokens.T", None]}}, "", "code"),
    ],
)
def test_parts_that_are_not_there_are_told(model: Path, config: dict[str, Any], removed: str, part: str) -> None:
    if removed:
        (model / removed).unlink()
    whole = {"architectures": ["Qwen3ForCausalLM"], **config}
    assert [name for name, _ in wholeness.lacks(model, whole)] == [part]

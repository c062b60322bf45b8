"""What is copied of a model: real files behind links, with the hashes that a download left beside them."""

import hashlib
import os
from pathlib import Path

import pytest

from tests.staging import write_model
from tokenmill.machine import sources


def hub_cache(folder: Path, data: bytes = b"weights") -> Path:
    """A snapshot as the hub's cache lays it out: links to blobs named by their hashes."""
    sha256, git = hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob 2\0{}").hexdigest()
    snapshot = folder / "models--org--tiny" / "snapshots" / ("c" * 40)
    blobs = folder / "models--org--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, blob, content in (("model.safetensors", sha256, data), ("config.json", git, b"{}")):
        (blobs / blob).write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob)
    return snapshot


def test_links_are_followed_to_real_bytes_and_their_names_are_hashes(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    found = {file.name: file for file in sources.listing(snapshot)}
    assert {name: file.known.partition(":")[0] for name, file in found.items()} == {
        "model.safetensors": "sha256",
        "config.json": "git",
    }
    assert all("blobs" in file.path.parts for file in found.values())
    assert all(sources.digest(file.path, file.known) == file.known for file in found.values())
    assert sources.copy_name(snapshot, sources.listing(snapshot)).startswith("org--tiny-")


def test_hashes_are_read_beside_a_download_to_a_folder(tmp_path: Path) -> None:
    write_model(tmp_path, shards=1)
    notes = tmp_path / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "config.json.metadata").write_text(f"{'c' * 40}\n{'a' * 40}\n1796014889.1\n")
    found = {file.name: file.known for file in sources.listing(tmp_path)}
    assert found.pop("config.json") == "git:" + "a" * 40
    assert set(found.values()) == {""}
    assert not any(name.startswith(".cache") for name in found)


def test_a_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        sources.listing(tmp_path)


def test_a_link_that_leads_back_up_ends(tmp_path: Path) -> None:
    write_model(tmp_path / "model", shards=1)
    (tmp_path / "model" / "again").symlink_to(tmp_path / "model")
    assert len(sources.listing(tmp_path / "model")) == 5


def test_a_gguf_file_brings_its_other_parts_along(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "a-00001-of-00003.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert [file.name for file in sources.listing(tmp_path / "a-00001-of-00002.gguf")] == [
        "a-00001-of-00002.gguf",
        "a-00002-of-00002.gguf",
    ]
    assert [file.name for file in sources.listing(tmp_path / "b.gguf")] == ["b.gguf"]


def name_of(model: Path) -> str:
    return sources.copy_name(model, sources.listing(model))


def test_other_content_has_another_name_even_of_the_same_size_and_time(tmp_path: Path) -> None:
    names = []
    for seed in range(2):
        write_model(tmp_path / "model", seed=seed)
        for path in (tmp_path / "model").iterdir():
            os.utime(path, ns=(0, 0))  # a mount that keeps no times
        names.append(name_of(tmp_path / "model"))
    (tmp_path / "model" / "config.json").touch()
    names.append(name_of(tmp_path / "model"))
    assert len(set(names)) == 3
    assert name_of(tmp_path / "model") == names[2]

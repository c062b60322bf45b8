"""The step: what is staged, what is refused and why, who waits, and that it comes back when it vanishes."""

import hashlib
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.conftest import Slow
from tests.staging import contents, staging_config, write_model
from tests.unit.machine.test_sources import hub_cache
from tokenmill import stage
from tokenmill.errors import PreflightError, StoppedError
from tokenmill.machine import copies
from tokenmill.staging import placement
from tokenmill.staging.staged import Staged


def names(root: Path) -> list[str]:
    """The copies in a root, and what is left beside them but for locks."""
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.exists() else []


def test_a_folder_is_staged_once_and_used_again(tmp_path: Path) -> None:
    model, said = write_model(tmp_path / "model"), list[str]()
    config = staging_config(model, tmp_path / "root")
    first, second = stage.stage(config, said.append), stage.stage(config, said.append)
    assert first.path is not None
    assert first.path == second.path
    assert first.path.name.startswith("model-")
    assert contents(first.path) == contents(model)
    assert sum("GB/s, verified (fast)" in text for text in said) == 1
    assert said[-1] == f"{model} is staged already: {first.path}"
    assert config.served_name == "model"
    assert names(tmp_path / "root") == [first.path.name]
    assert all(not path.stat().st_mode & 0o222 for path in first.path.glob("*.safetensors"))
    first.close()
    second.close()


def test_one_file_is_staged_in_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + bytes(100))
    staged = stage.stage(staging_config(tmp_path / "tiny.gguf", tmp_path / "root"))
    assert staged.path is not None
    assert (staged.path.name, staged.path.read_bytes()) == ("tiny.gguf", b"GGUF" + bytes(100))
    staged.close()


@pytest.mark.parametrize("verify", ["size", "fast", "sha256"])
def test_a_snapshot_of_the_hubs_cache_becomes_real_files(tmp_path: Path, verify: str) -> None:
    snapshot = hub_cache(tmp_path, data=(write_model(tmp_path / "m", shards=1) / _SHARD).read_bytes())
    staged = stage.stage(staging_config(snapshot, tmp_path / "root", verify=verify))
    assert staged.path is not None
    assert not any(path.is_symlink() for path in staged.path.iterdir())
    staged.close()


_SHARD = "model-00001-of-00001.safetensors"


def test_bytes_that_are_not_what_the_hub_had_are_found_by_sha256_alone(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, data=(write_model(tmp_path / "m", shards=1) / _SHARD).read_bytes())
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    stage.stage(staging_config(snapshot, tmp_path / "fast")).close()
    with pytest.raises(PreflightError, match=rf"{blob} is damaged: its hash is sha256:\w+, the hub says sha256:"):
        stage.stage(staging_config(snapshot, tmp_path / "root", verify="sha256"))
    assert names(tmp_path / "root") == []


@pytest.mark.parametrize("cut", [1, 4096])
def test_an_unfinished_model_is_not_staged_and_the_way_out_is_named(tmp_path: Path, cut: int) -> None:
    model = write_model(tmp_path / "model")
    shard = model / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - cut)
    with pytest.raises(PreflightError, match=r"model is not whole: .*model-00002-of-00003.safetensors") as caught:
        stage.stage(staging_config(model, tmp_path / "root"))
    assert "--wait" in caught.value.fix
    assert names(tmp_path / "root") == []


def test_a_file_that_is_added_meanwhile_fails(tmp_path: Path, slow: Slow) -> None:
    model = write_model(tmp_path / "model")

    def tell(text: str) -> None:
        if text.startswith("staging "):
            (model / "late.json").write_text("{}")

    with pytest.raises(PreflightError, match="mount-model changed while it was copied"):
        stage.stage(staging_config(slow(model), tmp_path / "root"), tell)
    assert names(tmp_path / "root") == []


def test_no_room_is_said_with_values_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = staging_config(write_model(tmp_path / "model"), tmp_path / "root")
    monkeypatch.setattr(placement, "free", lambda root: 1_005_000_000)
    with pytest.raises(PreflightError, match=r"9.0 MB are needed; the folder .* has 1.0 GB, of which 1.0 GB stay free"):
        stage.stage(config)
    readings = iter([2 * 10**9] * 3)  # up to the first look during the copy
    monkeypatch.setattr(placement, "free", lambda root: next(readings, 1000))
    with pytest.raises(PreflightError, match=r"only 0.0 MB are left in .*: something else fills it"):
        stage.stage(config)
    assert names(tmp_path / "root") == []


def test_room_is_made_by_the_copy_that_nobody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, said = tmp_path / "root", list[str]()
    for name in ("used", "unused"):
        staged = stage.stage(staging_config(write_model(tmp_path / name), root))
        if name == "unused":
            staged.close()
    disk = 1_020_000_000
    monkeypatch.setattr(placement, "free", lambda root: disk - sum(copy.size for copy in copies.listing(root)))
    stage.stage(staging_config(write_model(tmp_path / "new"), root), said.append).close()
    assert [name.partition("-")[0] for name in names(root)] == ["new", "used"]
    assert any("which nobody uses, to make room" in text for text in said)


def test_two_at_once_copy_once(tmp_path: Path, slow: Slow) -> None:
    model, said = write_model(tmp_path / "model"), list[str]()
    config = staging_config(slow(model), tmp_path / "root")
    found: list[Staged] = []
    threads = [threading.Thread(target=lambda: found.append(stage.stage(config, said.append))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {staged.path for staged in found} == {found[0].path}
    assert len(found) == 4
    assert sum("GB/s, verified" in text for text in said) == 1
    for staged in found:
        staged.close()


def test_a_stop_ends_it_soon_and_leaves_nothing(tmp_path: Path, slow: Slow) -> None:
    model = write_model(tmp_path / "model")
    config = staging_config(slow(model, "--latency-ms", "50"), tmp_path / "root")
    began = threading.Event()
    with pytest.raises(StoppedError):
        stage.stage(config, lambda text: began.set(), began.is_set)
    assert names(tmp_path / "root") == []


# -- what vanishes -----------------------------------------------------------------------------------------------------
def test_a_copy_that_vanishes_comes_back_to_the_same_place(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    staged = stage.stage(staging_config(model, tmp_path / "root"))
    assert staged.path is not None
    assert staged.missing() == ""
    shutil.rmtree(tmp_path / "root")
    assert staged.missing() == f"{staged.path} is gone"
    staged.renew(lambda text: None, lambda: False)
    assert staged.missing() == ""
    assert contents(staged.path) == contents(model)
    assert copies.make_room(tmp_path / "root", lambda: 0, 1, "") == [], "the copy is in use again"
    staged.close()


def test_a_model_that_has_changed_since_is_no_replacement(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    staged = stage.stage(staging_config(model, tmp_path / "root"))
    shutil.rmtree(tmp_path / "root")
    write_model(model, seed=1)
    with pytest.raises(PreflightError, match="the model has changed since this run began"):
        staged.renew(lambda text: None, lambda: False)
    staged.close()


def test_where_staging_is_off_or_the_source_is_local_the_model_stays(tmp_path: Path) -> None:
    model, said = write_model(tmp_path / "model"), list[str]()
    for to in ("off", "auto"):
        staged = stage.stage(staging_config(model, to), said.append)
        assert (staged.path, staged.descriptors, staged.missing()) == (model, (), "")
    assert len(said) == 1
    assert said[0].startswith(f"{model} is used where it lies: ")


def test_the_manifest_holds_what_is_there(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    staged = stage.stage(staging_config(model, tmp_path / "root", verify="sha256"))
    assert staged.copy is not None
    copy = copies.find(tmp_path / "root", staged.copy.name)
    assert copy is not None
    assert {file.name: file.hash for file in copy.manifest.files} == {
        name: f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in contents(model).items()
    }
    assert copy.manifest.source == str(model)
    staged.close()


def test_a_copy_made_with_a_weaker_check_is_proved_when_a_stronger_one_is_asked_for(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shards=1, size=2000)
    (shard,) = model.glob("*.safetensors")
    told = model / ".cache" / "huggingface" / "download" / f"{shard.name}.metadata"
    told.parent.mkdir(parents=True)
    told.write_text(f"commit\n{'0' * 64}\n0\n")
    root = tmp_path / "root"
    stage.stage(staging_config(model, root, verify="fast"), lambda text: None)
    with pytest.raises(PreflightError, match=r"is not to be trusted: .* is damaged: its hash is"):
        stage.stage(staging_config(model, root, verify="sha256"), lambda text: None)

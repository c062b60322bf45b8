"""Where things lie: by real path, type, and measured speed."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.doctoring import FAST, MOUNTS, context, told
from tokenmill.checks.base import Context
from tokenmill.checks.output import check_output
from tokenmill.checks.places import check_places
from tokenmill.machine import fusecache, statfs
from tokenmill.machine.probe import Probe, probe


def with_mount(tmp_path: Path, point: Path, kind: str, **sections: Any) -> Context:
    model = {"path": str(models.usual(tmp_path / "net" / "model"))}
    found = context(tmp_path, **{"model": model, **sections})
    found.read_mounts = lambda: f"{MOUNTS}40 22 0:99 / {point} rw - {kind} remote:/x rw\n"
    return found


@pytest.mark.parametrize("kind", ["nfs", "lustre", "9p", "virtiofs", "fuse.juicefs", "fuse.mount-s3"])
def test_a_model_behind_a_network_is_told_through_links(tmp_path: Path, kind: str) -> None:
    found = with_mount(tmp_path, tmp_path / "net", kind)
    (tmp_path / "local").symlink_to(tmp_path / "net" / "model")
    linked = context(tmp_path, model={"path": str(tmp_path / "local")})
    linked.read_mounts = found.read_mounts
    for context_, name in ((found, "net/model"), (linked, "local")):
        (message,) = told(check_places, context_)
        assert message.startswith(f"the model {tmp_path / name} ")
        assert f"lies on {kind}" in message


@pytest.mark.parametrize("kind", ["ext4", "xfs", "zfs", "tmpfs", "overlay", "fuse.fuse-overlayfs", "fuseblk"])
def test_a_local_model_leaves_no_complaint(tmp_path: Path, kind: str) -> None:
    assert told(check_places, with_mount(tmp_path, tmp_path / "net", kind)) == []


@pytest.mark.parametrize("kind", ["overlay", "ext4"])
def test_a_type_that_looks_local_and_answers_slowly_is_told(tmp_path: Path, kind: str) -> None:
    found = with_mount(tmp_path, tmp_path / "net", kind)
    found.read_speed = lambda _: replace(FAST, stat_ms=4.0, read_mb_s=60.0)
    (message,) = told(check_places, found)
    assert "4 ms a look-up, 60 MB/s in one stream" in message


def test_a_mount_that_does_not_answer_is_unknown(tmp_path: Path) -> None:
    found = with_mount(tmp_path, tmp_path / "net", "ext4")
    found.read_speed = lambda _: Probe()
    assert len(told(check_places, found, "unknown")) == 1


def test_prompts_on_a_network_are_told(tmp_path: Path) -> None:
    found = with_mount(tmp_path, tmp_path / "prompts.jsonl", "nfs4")
    (message,) = told(check_places, found)
    assert message.startswith("the prompt set ")


@pytest.mark.parametrize(("kind", "fails"), [("fuse.s3fs", True), ("nfs4", True), ("ext4", False)])
def test_a_run_folder_on_a_network_stops_the_run(tmp_path: Path, kind: str, fails: bool) -> None:
    found = with_mount(tmp_path, tmp_path / "runs", kind)
    (tmp_path / "runs").mkdir()
    said = [message for message in told(check_output, found, "fail") if "lies on" in message]
    assert bool(said) is fails


def test_hf_home_is_looked_at_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "hub"
    home.mkdir()
    monkeypatch.setenv("HF_HOME", str(home))
    (message,) = told(check_places, with_mount(tmp_path, home, "nfs4"))
    assert message.startswith(f"HF_HOME {home} lies on nfs4")


# -- readings ----------------------------------------------------------------------------------------------------------
def test_a_real_file_systems_type_and_speed_are_read(tmp_path: Path) -> None:
    assert statfs.kind_of(tmp_path) in {*statfs.MAGIC.values(), ""}
    assert statfs.kind_of(Path("/dev/shm")) == "tmpfs"
    assert statfs.kind_of(tmp_path / "none") == ""
    found = probe(models.usual(tmp_path / "model"))
    assert 0 < found.stat_ms < 1000
    assert found.read_mb_s > 0


@pytest.mark.parametrize(
    ("command", "cache"),
    [
        ("rclone mount remote:b /net --vfs-cache-mode full --cache-dir /var/c", "/var/c"),
        ("gcsfuse --cache-dir=/ssd/c bucket /net", "/ssd/c"),
        ("s3fs bucket /net -o use_cache=/tmp/s3,url=x", "/tmp/s3"),
        ("mount-s3 bucket /net --cache /tmp/m", "/tmp/m"),
        ("mount-s3 bucket /other --cache /tmp/m", None),
        ("sshfs host: /net", None),
        ("rclone mount remote:b /net --vfs-cache-mode full", None),
    ],
)
def test_a_mounts_hidden_cache_is_told_by_its_command(command: str, cache: str | None) -> None:
    assert fusecache.cache_of("/net", [["init"], command.split()]) == (Path(cache) if cache else None)


def test_this_machines_processes_can_be_asked() -> None:
    assert fusecache.cache_of(f"/none-{os.getpid()}") is None

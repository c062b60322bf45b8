"""C07: servers started together race for no compile cache: each has its own, on a local disk, and is told otherwise."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.doctoring import MOUNTS, context, told
from tokenmill import caches, launch
from tokenmill.checks.places import check_places
from tokenmill.engines.base import COMPILE_CACHES, Launch
from tokenmill.launch import Place

COMPILER = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
folder.mkdir(parents=True, exist_ok=True)
os.close(os.open(folder / "kernel.lock", os.O_CREAT | os.O_EXCL))
"""
"""As a compiler that cannot share its folder."""


def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What eight servers of one run would get."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = context(tmp_path, model={"path": "/models/m"})
    envs = []
    for index in range(8):
        cache = caches.folder_for("sglang", "0.5.11", "B200", index, {})
        place = Place(index, (index,), "B200")
        envs.append(launch.environment(found.config, place, found.engine, Launch(()), tmp_path / "tmp", cache))
    return envs


def test_eight_servers_have_eight_of_every_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = environments(tmp_path, monkeypatch)
    for name in COMPILE_CACHES:
        assert len({env[name] for env in envs}) == 8
        assert all(Path(env[name]).is_relative_to(tmp_path / "cache") for env in envs)


def test_eight_compilers_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [subprocess.Popen([sys.executable, "-c", COMPILER], env=env) for env in environments(tmp_path, monkeypatch)]
    assert [process.wait(30) for process in begun] == [0] * 8


@pytest.mark.parametrize(("kind", "count"), [("nfs4", 1), ("fuse.sshfs", 1), ("ext4", 0)])
def test_a_cache_in_a_home_on_the_network_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    found = context(tmp_path, model={"path": "/models/m"})
    found.read_mounts = lambda: f"{MOUNTS}40 22 0:99 / {tmp_path / 'home'} rw - {kind} server:/home rw\n"
    said = told(check_places, found)
    assert len(said) == count
    assert all(message.startswith("the compile cache ") and kind in message for message in said)

"""C05: an environment on a network or bridged file system is named, with its path, before N servers import from it."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doctoring import MOUNTS, context, told
from tokenmill.checks.base import Context
from tokenmill.checks.places import check_places
from tokenmill.machine.packages import Package

PACKAGE = Package("0.5.11", prefix="/nonexistent/venv", seconds=0.1)


def mounted(point: Path, kind: str, options: str = "rw") -> str:
    return f"{MOUNTS}40 22 0:99 / {point} {options} - {kind} remote:/x rw\n"


def with_environment(tmp_path: Path, python: Path, package: Package, kind: str, point: Path) -> Context:
    found = context(tmp_path, model={"path": "/models/none"}, engine={"python": str(python)})
    found.read_package = lambda *_: package
    found.read_mounts = lambda: mounted(point, kind)
    return found


@pytest.mark.parametrize(
    ("kind", "is_told"),
    [
        ("nfs4", True),
        ("9p", True),
        ("fuse.gcsfuse", True),
        ("fuse", True),
        ("ext4", False),
        ("fuse.fuse-overlayfs", False),
    ],
)
@pytest.mark.parametrize("through_link", [False, True])
def test_the_engines_environment_is_named_by_its_real_path(
    tmp_path: Path, kind: str, is_told: bool, through_link: bool
) -> None:
    venv = tmp_path / "net" / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    if through_link:
        (tmp_path / "venv").symlink_to(venv)
    prefix = tmp_path / "venv" if through_link else venv
    package = replace(PACKAGE, prefix=str(prefix))
    found = with_environment(tmp_path, prefix / "bin" / "python", package, kind, tmp_path / "net")
    said = [message for message in told(check_places, found) if "environment" in message]
    assert len(said) == is_told
    for message in said:
        assert str(prefix) in message
        assert f"lies on {kind}, mounted at {tmp_path / 'net'}: 7 servers look up thousands of files" in message


def test_tokenmills_own_environment_is_looked_at_too(tmp_path: Path) -> None:
    found = with_environment(tmp_path, Path(sys.executable), PACKAGE, "nfs4", Path(os.path.realpath(sys.prefix)))
    assert any(message.startswith("tokenmill's environment ") for message in told(check_places, found))


@pytest.mark.parametrize(("seconds", "count"), [(70.0, 1), (0.2, 0)])
def test_an_environment_that_is_slow_whatever_it_lies_on_is_told_with_its_time(
    tmp_path: Path, seconds: float, count: int
) -> None:
    package = replace(PACKAGE, prefix="/opt/venv", seconds=seconds)
    found = with_environment(tmp_path, Path(sys.executable), package, "ext4", Path("/opt"))
    said = told(check_places, found)
    assert len(said) == count
    assert all("/opt/venv took 70 s" in message for message in said)


def test_a_local_environment_leaves_no_complaint(tmp_path: Path) -> None:
    assert told(check_places, context(tmp_path, model={"path": "/models/none"})) == []


@pytest.mark.parametrize(("options", "count"), [("rw,noexec,relatime", 1), ("rw,relatime", 0)])
def test_a_folder_for_temporary_files_that_nothing_runs_from_is_told(tmp_path: Path, options: str, count: int) -> None:
    """Cases C01: the wrapper in /tmp cannot run, and the launcher waits for ever."""
    found = context(tmp_path, model={"path": "/models/none"})
    found.read_mounts = lambda: mounted(Path("/tmp"), "ext4", options)
    assert len([message for message in told(check_places, found) if "noexec" in message]) == count

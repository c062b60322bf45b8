"""A folder that is there whole or not at all, whoever else makes it, whatever happens meanwhile."""

import os
import socket
from pathlib import Path

import pytest

from tokenmill.errors import StoreError, UsageError
from tokenmill.outfolder import made


def test_it_is_there_at_the_end_and_not_before(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with made(out) as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "a").write_text("whole")
        assert not out.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "out", "sub", "a"]


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "link to nothing"])
def test_what_is_there_already_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link to nothing":
        out.symlink_to(tmp_path / "none")
    else:
        out.mkdir()
        if kind == "folder":
            (out / "a").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="out exists already"), made(out):
        raise AssertionError("it has begun")
    assert sorted(tmp_path.rglob("*")) == before


def test_of_two_who_make_one_folder_the_first_to_be_done_has_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="out exists already"), made(out) as aside:  # noqa: PT012
        (aside / "a").write_text("second")
        out.mkdir()  # by another process, which has written aside under its own number
        (out / "a").write_text("first")
    assert (out / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["模" * 80, "x" * 255, "a\nb", " ", "-rf", "..."])
def test_any_name_that_a_disk_takes(tmp_path: Path, name: str) -> None:
    with made(tmp_path / name) as aside:
        assert len(os.fsencode(aside.name)) <= 255
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_that_no_disk_takes_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="File name too long"), made(tmp_path / ("x" * 256)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_after_an_error_nothing_is_left_of_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), made(tmp_path / "out") as aside:  # noqa: PT012
        (aside / "a").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_dead_of_this_machine_left_is_cleared(tmp_path: Path) -> None:
    host = socket.gethostname()
    names = [f".out.{host}-{1 << 30}", f".out.{host}-{os.getppid()}", f".out.elsewhere-{1 << 30}", ".out.d"]
    for name in names:
        (tmp_path / name).mkdir()
    with made(tmp_path / "out"):
        pass
    assert [(tmp_path / name).exists() for name in names] == [False, True, True, True]

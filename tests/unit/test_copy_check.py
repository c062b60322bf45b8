"""Doctor's word on output.copy_to: whether a copy can be made there, and whether it would outlive anything."""

import os
from pathlib import Path

import pytest

from tokenmill.checks.base import Context, Finding
from tokenmill.checks.output import check_output
from tokenmill.config import Config, Output
from tokenmill.folder import RunFolder


def findings(tmp_path: Path, copy_to: Path) -> list[Finding]:
    """What is found of the copy."""
    config = Config(output=Output(dir=str(tmp_path / "runs"), copy_to=str(copy_to)))
    found = check_output(Context(config, RunFolder(config.folder), []))
    return [finding for finding in found if finding.subject == str(copy_to)]


def test_a_missing_folder_fails_since_its_mount_may_hold_the_run(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, tmp_path / "bucket")
    assert (found.level, found.fix) == ("fail", f"mount it, or: mkdir -p {tmp_path}/bucket")
    assert "is its mount there?" in found.message


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path("/dev/shm"))
    assert [found.level for found in findings(tmp_path, Path("/dev/shm"))] == ["fail"]


def test_the_disk_of_the_run_folder_is_worth_a_warning(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, tmp_path)
    assert found.level == "warn"
    assert "both are lost with it" in found.message


def test_another_disk_with_room_is_fine_and_so_is_a_bucket_without_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(tmp_path, Path("/dev/shm")) == []
    sizes = list(os.statvfs("/dev/shm"))
    for blocks, levels in ((0, []), (1000, ["warn"])):
        sizes[2:5] = [blocks, 0, 0]
        status = os.statvfs_result(sizes)
        monkeypatch.setattr(os, "statvfs", lambda path, status=status: status)
        assert [found.level for found in findings(tmp_path, Path("/dev/shm"))] == levels


def test_without_a_copy_nothing_is_found(tmp_path: Path) -> None:
    config = Config(output=Output(dir=str(tmp_path)))
    assert [found.subject for found in check_output(Context(config, RunFolder(config.folder), []))] == [
        str(config.folder)
    ]

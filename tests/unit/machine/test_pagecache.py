"""What is in the page cache is told from what is not; a mount that forgets a file at each open holds nothing."""

import os
from pathlib import Path

import pytest

from tests.conftest import Slow
from tokenmill.machine import filesystems, pagecache


def test_a_file_just_written_is_in_memory_and_a_forgotten_one_is_not(tmp_path: Path) -> None:
    if filesystems.mount_of(tmp_path).is_ram:
        pytest.skip("a RAM disk forgets nothing")
    file = tmp_path / "weights"
    file.write_bytes(bytes(3_000_001))
    assert pagecache.holds(file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not pagecache.holds(file)


def test_a_mount_that_forgets_a_file_when_it_is_opened_again_holds_nothing(tmp_path: Path, slow: Slow) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(bytes(3_000_001))
    file = slow(tmp_path / "source", "--latency-ms", "0") / "weights"
    assert len(file.read_bytes()) == 3_000_001
    assert not pagecache.holds(file)


def test_an_empty_file_and_none_are_not_in_memory(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert not pagecache.holds(tmp_path / "empty")
    assert not pagecache.holds(tmp_path / "none")

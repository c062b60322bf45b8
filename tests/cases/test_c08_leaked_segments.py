"""C08: shared memory that dead processes left behind is named before it fills up; nobody else's is ever meant.

Nothing is removed: the fix is a command, with exactly the files that are nobody's.
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doctoring import ROOM, context, told
from tokenmill.checks.room import check_room
from tokenmill.core.server import FailureKind
from tokenmill.engines.logs import COMMON_ROOTS, explain
from tokenmill.machine import shm
from tokenmill.machine.shm import Segment


@pytest.fixture
def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def alive() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def segment(path: Path) -> Path:
    path.write_bytes(bytes(4096) + b"x" * 4096)
    return path


def test_only_segments_of_the_dead_are_leaked(tmp_path: Path, dead: int, alive: int) -> None:
    mine = segment(tmp_path / f"torch_{dead}_77_0")
    nameless = segment(tmp_path / "psm_4fa83b21")
    segment(tmp_path / f"torch_{alive}_78_0")
    segment(tmp_path / "my-notes.txt")
    segment(tmp_path / "dataset-2024.bin")
    staged = tmp_path / "tokenmill" / "model-0123"
    staged.mkdir(parents=True)
    segment(staged / f"shard_{dead}")
    assert {found.path for found in shm.leaked(tmp_path)} == {mine, nameless}


def test_a_segment_that_somebody_has_open_or_mapped_is_not_leaked(tmp_path: Path) -> None:
    opened, mapped = segment(tmp_path / "psm_opened"), segment(tmp_path / "psm_mapped")
    with opened.open("rb"):
        handle = os.open(mapped, os.O_RDONLY)
        room = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
        os.close(handle)  # mmap keeps a handle of its own, as torch does not
        assert shm.leaked(tmp_path) == []
        room.close()
    assert {found.path for found in shm.leaked(tmp_path)} == {opened, mapped}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_segment_is_never_meant(tmp_path: Path, dead: int) -> None:
    os.chown(segment(tmp_path / f"torch_{dead}_1"), 12345, 12345)
    assert shm.leaked(tmp_path) == []


def test_the_finding_names_size_files_and_the_command(tmp_path: Path) -> None:
    found = context(tmp_path, model={"path": "/models/m"})
    leaks = [Segment(Path(f"/dev/shm/psm_{n}"), 9 * 10**9, 0, 4242 if n == 0 else None) for n in range(2)]
    found.read_room = lambda: replace(ROOM, leaked=leaks)
    (finding,) = [finding for finding in check_room(found) if finding.level == "warn"]
    assert "18.0 GB of /dev/shm are held by segments that no process here has open: psm_0" in finding.message
    assert finding.fix.startswith("rm /dev/shm/psm_0 /dev/shm/psm_1 ")


def test_a_few_forgotten_semaphores_are_not_worth_a_word(tmp_path: Path) -> None:
    found = context(tmp_path, model={"path": "/models/m"})
    found.read_room = lambda: replace(ROOM, leaked=[Segment(Path("/dev/shm/sem.x"), 4096, 0)])
    assert told(check_room, found) == []


def test_a_server_that_dies_of_full_shared_memory_says_so() -> None:
    tail = ["OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"]
    failure = explain((COMMON_ROOTS,), tail, 1)
    assert (failure.kind, failure.cause) == (FailureKind.SHM, "shared memory (/dev/shm) is full")

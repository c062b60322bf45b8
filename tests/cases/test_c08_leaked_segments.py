"""C08: shared memory that dead processes left behind is named before it fills up; nobody else's is ever meant.

What our own dead servers left is removed at their end, so before their restart. For all else the fix is a command, with
exactly the files that are nobody's.
"""

import asyncio
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from tests import living
from tests.doctoring import ROOM, context, told
from tests.harness import Case
from tokenmill.checks.room import check_room
from tokenmill.core.server import FailureKind
from tokenmill.engines.logs import COMMON_ROOTS, explain
from tokenmill.machine import processes, shm
from tokenmill.machine.shm import Claim, Claims, Segment


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


# -- what our own servers leave ----------------------------------------------------------------------------------------
HOLDER = """
import mmap, os, sys, time
root, how = sys.argv[1:]
path = os.path.join(root, {"mapped": "psm_mapped", "opened": "anything", "named": f"torch_{os.getpid()}_1_0"}[how])
file = open(path, "wb+")
file.write(bytes(1 << 20))
file.flush()
if how == "mapped":
    room = mmap.mmap(file.fileno(), 0)
if how != "opened":
    file.close()
print("on", flush=True)
time.sleep(600)
"""


def seen(root: Path, pid: int, before: frozenset[Claim] = frozenset()) -> Claims:
    return shm.claim(Claims(before=before), [pid], root)


@pytest.mark.parametrize("how", ["mapped", "opened", "named"])
def test_what_a_server_of_ours_left_is_removed_with_it_and_nothing_else(tmp_path: Path, port: int, how: str) -> None:
    root = tmp_path / "shm"
    job = living.job(tmp_path, [sys.executable, "-c", HOLDER, str(root), how])
    others = {segment(root / name) for name in ("psm_before", f"torch_{os.getpid()}_1", "notes.txt")}
    staged = root / "tokenmill" / "model-0123"
    staged.mkdir(parents=True)

    async def ends() -> None:
        async with living.begun(job, port) as server:
            log = job.folder.log(0)
            await server.until(lambda: b"on" in log.read_bytes() and (how == "named" or server.entry.segments))
            others.add(segment(root / "psm_later"))
            others.add(segment(staged / f"torch_{server.entry.process.pid}_1"))
            (mine,) = {path for path in root.iterdir() if path.is_file()} - others
            os.kill(server.entry.process.pid, signal.SIGKILL)
            await server.until(lambda: server.failures)
            assert mine.exists()
            ending = await server.end()
            assert ending.cleaned == "removed 1 shared memory segment (1.0 MB) that its dead processes left"
            assert not mine.exists()
            assert all(path.exists() for path in others)

    asyncio.run(ends())


def test_a_segment_that_somebody_else_has_open_by_now_is_kept(tmp_path: Path, dead: int) -> None:
    shared = segment(tmp_path / "psm_shared")
    with shared.open("rb"):
        mine = seen(tmp_path, os.getpid()).mine
        assert {claim.name for claim in mine} == {"psm_shared"}
        assert shm.remove(mine, [], tmp_path) == ()
    assert [removed.path for removed in shm.remove(mine, [], tmp_path)] == [shared]


def test_another_file_of_the_same_name_is_another(tmp_path: Path) -> None:
    path = segment(tmp_path / "psm_again")
    with path.open("rb"):
        mine = seen(tmp_path, os.getpid()).mine
        path.unlink()
        segment(path)
        assert shm.remove(mine, [], tmp_path) == ()


def test_a_segment_older_than_the_process_of_its_number_is_not_its(tmp_path: Path, dead: int) -> None:
    old = segment(tmp_path / f"torch_{dead}_1")
    ours = processes.identify(os.getpid())
    assert ours is not None
    ticks = os.sysconf("SC_CLK_TCK")
    assert shm.remove([], [replace_struct(ours, pid=dead, start=ours.start + 3600 * ticks)], tmp_path) == ()
    assert [each.path for each in shm.remove([], [replace_struct(ours, pid=dead)], tmp_path)] == [old]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_claim_of_another_users_segment_is_void(tmp_path: Path) -> None:
    path = segment(tmp_path / "psm_given")
    with path.open("rb"):
        mine = seen(tmp_path, os.getpid()).mine
    os.chown(path, 12345, 12345)
    assert shm.remove(mine, [], tmp_path) == ()


def test_a_segment_of_before_the_start_is_never_claimed(tmp_path: Path) -> None:
    with segment(tmp_path / "psm_before").open("rb"):
        assert seen(tmp_path, os.getpid(), shm.present(tmp_path)).mine == frozenset()


def test_a_segment_of_nobody_we_know_is_asked_after_three_times(tmp_path: Path, alive: int) -> None:
    with segment(tmp_path / "psm_other").open("rb"):
        claims = Claims()
        for _ in range(3):
            claims = shm.claim(claims, [alive], tmp_path)
        assert shm.claim(claims, [os.getpid()], tmp_path).mine == frozenset()


CRASHES = """
import os, sys
with open(f"/dev/shm/torch_{os.getpid()}_{sys.argv[1]}", "wb") as file:
    file.write(bytes(1 << 20))
sys.exit("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'")
"""


def test_before_each_restart_the_dead_ones_segments_are_gone_and_the_reason_is_told(case: Case) -> None:
    """One crash does not become a loop of crashes: nothing is left to fill it up, and restarts have their budget."""
    case.write(
        model={"name": "m"},
        engine={"kind": "openai", "args": {}, "command": [sys.executable, "-c", CRASHES, str(case.port)]},
        fleet={"servers": 1, "restarts_per_hour": 2},
    )
    began = time.monotonic()
    assert case.run() == 4
    assert time.monotonic() - began < 30
    assert case.output().count("removed 1 shared memory segment (1.0 MB) that its dead processes left") == 3
    assert case.output().count("started as pid") == 3
    assert "shared memory (/dev/shm) is full" in case.output()
    assert list(shm.SHM.glob(f"torch_*_{case.port}")) == []


def test_too_little_room_is_said_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm.short(tmp_path) == ""
    monkeypatch.setattr(shm, "LEAST_FREE", 1 << 60)
    assert re.fullmatch(rf"only \d+ MB of {tmp_path} are free: a server may die of that", shm.short(tmp_path))
    assert shm.short(tmp_path / "no") == ""

"""Copies in a root: whole or not there, never removed in use, one maker at a time, whatever dies when."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenmill.errors import PreflightError, UsageError
from tokenmill.machine import copies, processes
from tokenmill.machine.copies import Copy, FileEntry, Lease, Manifest

KEY = "0123456789ab"


def made(root: Path, name: str, *, size: int = 1000, used: float = 0.0) -> Copy:
    """A whole copy, last used at that moment."""
    aside = root / f".{name}.staging"
    aside.mkdir(parents=True)
    (aside / "weights").write_bytes(bytes(size))
    copy = copies.publish(aside, root, name, Manifest("/source", (FileEntry("weights", size),), "fast", 1.0), sync=True)
    lease = Lease(copy.path)
    lease.close()
    os.utime(root / f".{name}.lease", (used, used))
    return copy


@pytest.mark.parametrize("fault", ["gone", "short", "manifest", "torn manifest", "folder"])
def test_a_copy_that_is_not_whole_is_none(tmp_path: Path, fault: str) -> None:
    copy = made(tmp_path, f"m-{KEY}")
    assert copies.find(tmp_path, copy.name) == copy
    assert copies.missing(copy.path) == ""
    match fault:
        case "gone":
            (copy.path / "weights").unlink()
        case "short":
            os.truncate(copy.path / "weights", 999)
        case "manifest":
            (copy.path / copies.MANIFEST).unlink()
        case "torn manifest":
            os.truncate(copy.path / copies.MANIFEST, 20)
        case _:
            copy.path.rename(tmp_path / "elsewhere")
    assert copies.find(tmp_path, copy.name) is None
    assert copies.missing(copy.path) != ""


def test_a_broken_copy_is_replaced_as_a_whole(tmp_path: Path) -> None:
    broken = made(tmp_path, f"m-{KEY}")
    (broken.path / "weights").unlink()
    (broken.path / "old").touch()
    again = made(tmp_path, f"m-{KEY}")
    assert copies.find(tmp_path, again.name) == again
    assert not (again.path / "old").exists()


# -- in use ------------------------------------------------------------------------------------------------------------
def test_room_is_made_by_what_was_unused_longest_and_never_by_what_is_in_use(tmp_path: Path) -> None:
    old, middle, new, kept = (
        made(tmp_path, f"{name}-{KEY}", used=used)
        for name, used in (("old", 10.0), ("middle", 20.0), ("new", 30.0), ("kept", 5.0))
    )
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    lease = Lease(old.path)
    os.utime(tmp_path / f".{old.name}.lease", (1.0, 1.0))
    removed = copies.make_room(
        tmp_path, lambda: 5000 - sum(copy.size for copy in copies.listing(tmp_path)), 2000, kept.name
    )
    assert removed == [middle]
    removed = copies.make_room(tmp_path, lambda: 0, 1, kept.name)
    assert removed == [new]
    assert [copy.name for copy in copies.listing(tmp_path)] == [old.name, kept.name]
    assert (tmp_path / "precious" / "thesis").exists()
    assert copies.evictable(tmp_path, kept.name) == 0
    lease.close()
    assert copies.evictable(tmp_path, kept.name) == 1000
    assert copies.make_room(tmp_path, lambda: 0, 1, kept.name) == [old]


def test_a_server_that_inherits_the_lease_keeps_it_when_its_tokenmill_is_gone(tmp_path: Path) -> None:
    copy = made(tmp_path / "root", f"m-{KEY}")
    code = (
        "import sys; from pathlib import Path; from tokenmill.machine import copies, processes\n"
        "lease = copies.Lease(Path(sys.argv[1]))\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "log = Path(sys.argv[1]).parent.parent / 'log'\n"
        "print(processes.spawn(sleeper, {}, log, 'mark', (lease.descriptor,)).pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(copy.path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = int(done.stdout)
    try:
        assert copy.users == [server]
        assert copies.make_room(copy.path.parent, lambda: 0, 1, "") == []
        with pytest.raises(UsageError, match=f"is in use by pid {server}"):
            copies.remove(copy)
    finally:
        os.kill(server, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (status := processes.stat(server)) is not None and status.state not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    copies.remove(copy)
    assert not copy.path.exists()


def test_a_copy_that_is_being_removed_cannot_be_taken_into_use(tmp_path: Path) -> None:
    copy = made(tmp_path, f"m-{KEY}")
    handle = os.open(tmp_path / f".{copy.name}.lease", os.O_RDWR)
    assert copies._take(handle, fcntl.LOCK_EX)
    with pytest.raises(PreflightError, match="is being removed by another process"):
        Lease(copy.path, patience_s=0.05)
    os.close(handle)


# -- one maker ---------------------------------------------------------------------------------------------------------
def test_a_second_maker_waits_and_hears_how_far_the_first_is(tmp_path: Path) -> None:
    heard: list[copies.Progress] = []

    def waits(progress: copies.Progress | None) -> None:
        if progress is not None:
            heard.append(progress)
            first.__exit__(None, None, None)

    first = copies.lock(tmp_path, "m", lambda progress: None)
    first.__enter__().note(3, 10)
    with copies.lock(tmp_path, "m", waits):
        pass
    assert [(progress.process.pid, progress.done, progress.total) for progress in heard] == [(os.getpid(), 3, 10)]


def test_a_maker_that_gets_no_further_is_named_in_the_end(tmp_path: Path) -> None:
    with copies.lock(tmp_path, "m", lambda progress: None) as lock:
        lock.note(3, 10)
        with (
            pytest.raises(PreflightError, match=rf"pid {os.getpid()} .* has got no further for 0 s"),
            copies.lock(tmp_path, "m", lambda progress: None, patience_s=0.2),
        ):
            pass


def test_what_the_dead_left_is_swept_and_what_is_being_made_is_not(tmp_path: Path) -> None:
    left = [f".a-{KEY}.staging", f".b-{KEY}.removing"]
    others = [f".c-{KEY}.staging", f".d-{KEY}.download", ".cache.staging", "e.staging"]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    with copies.lock(tmp_path, f"c-{KEY}", lambda progress: None):
        copies.sweep(tmp_path, f"z-{KEY}")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(others)


def test_a_root_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(PreflightError, match="belongs to user 12345"):
        copies.own(tmp_path)

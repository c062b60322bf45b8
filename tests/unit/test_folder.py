"""The run folder: one owner, whose death frees it; small files whole or not at all."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tokenmill import events
from tokenmill.errors import PreflightError, UsageError
from tokenmill.events import Event, EventLog
from tokenmill.folder import RunFolder, ServerEntry, State, write_aside
from tokenmill.machine import processes

HOLD = "import sys; from pathlib import Path; from tokenmill.folder import RunFolder\n"
HOLD += "with RunFolder(Path(sys.argv[1])).own('run'):\n print('held', flush=True); sys.stdin.read()"


def entry(index: int = 0) -> ServerEntry:
    process = processes.identify(os.getpid())
    assert process is not None
    return ServerEntry("", index, process, process.pid, 30000, 31000, "0", "tm-a", {})


def test_a_folder_has_one_owner_and_says_who(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.owner() is None
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"is in use by tokenmill run, pid {holder.pid} on .*, since 20") as caught:
            folder.own("up").__enter__()
        assert f"tokenmill down {folder.path}" in caught.value.fix
        owner = folder.owner()
        assert owner is not None
        assert owner.process.pid == holder.pid
        holder.kill()
        holder.wait()
        assert folder.owner() is None
        with folder.own("run"):
            assert folder.owner() is not None
    assert folder.owner() is None


def test_servers_outlive_their_owner_in_the_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.own("run"):
        folder.write_servers((entry(0), entry(1)), keep=True)
        assert folder.owner() is not None
    found = folder.state()
    assert (found.owner, found.servers, found.keep) == (None, (entry(0), entry(1)), True)


def test_a_copy_of_a_folder_has_no_owner_and_no_servers_but_a_renamed_one_has(tmp_path: Path) -> None:
    """Else `down` of the copy would end the original's run, and a run of it would take its servers."""
    folder = RunFolder(tmp_path / "run")
    with folder.own("run"):
        folder.write_servers((entry(0),), keep=False)
        shutil.copytree(folder.path, tmp_path / "copy")
        copy = RunFolder(tmp_path / "copy")
        assert (copy.owner(), copy.state().servers) == (None, ())
        folder.path.rename(tmp_path / "renamed")
        renamed = RunFolder(tmp_path / "renamed")
        assert renamed.owner() is not None
        assert renamed.state().servers == (entry(0),)


@pytest.mark.parametrize("content", [b"", b"{", b'{"servers": 5}', b"\xff"])
def test_a_state_that_cannot_be_read_is_empty(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.state_file.write_bytes(content)
    folder.status_file.write_bytes(content)
    assert (folder.state(), folder.status(), folder.owner()) == (State(), None, None)


def test_an_owner_of_another_machine_or_boot_does_not_live_here(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.own("run"):
        owner = folder.state().owner
        assert owner is not None
        folder.write_state(State(replace(owner, host="elsewhere")))
        assert folder.owner() is None
        folder.write_state(State(replace(owner, process=replace(owner.process, boot="another"))))
        assert folder.owner() is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match=f"{tmp_path}/file/run cannot be written: Not a directory") as caught:
        RunFolder(tmp_path / "file" / "run").create()
    assert caught.value.fix.startswith(f"df -h {tmp_path}/file ")


@contextmanager
def no_room() -> Iterator[None]:
    """No file may grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_at_the_start_and_ends_nothing_at_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    starts: list[Callable[[], object]] = [lambda: folder.write_config("a = 1"), lambda: folder.own("run").__enter__()]
    for start in starts:
        folder.create()
        with no_room(), pytest.raises(PreflightError, match=f"{folder.path} cannot be written: ") as caught:
            start()
        assert caught.value.fix.startswith(f"df -h {folder.path} ")
    with ExitStack() as room:
        with folder.own("run"):
            room.enter_context(no_room())
        with pytest.raises(PreflightError, match="cannot be written: "):
            folder.own("run").__enter__()
    with folder.own("run"):
        folder.write_config("a = 1")
    assert folder.config.read_text() == "a = 1"


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_aside(path, None)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    write_aside(path, b"new")
    assert path.read_bytes() == b"new"


def test_events_are_followed_and_a_half_one_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    shown: list[Event] = []
    log = EventLog(path, shown.append)
    assert list(events.read(path)) == []
    log.say("run", "first")
    log.add(Event(1.5, "server", "it died", "3", "warn", "df -h", ("line",)))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t":1,"ki')
    found = list(events.read(path))
    assert [event for event, _ in found] == shown
    assert found[-1][1] == len(whole)
    path.write_bytes(whole + b'not json\n{"t":2,"kind":"run","text":"next"}\n')
    assert [event.text for event, _ in events.read(path, len(whole))] == ["next"]


def test_a_full_disk_loses_an_event_and_not_the_run(tmp_path: Path) -> None:
    shown: list[Event] = []
    EventLog(tmp_path / "none" / "events.jsonl", shown.append).say("run", "said all the same")
    assert [event.text for event in shown] == ["said all the same"]

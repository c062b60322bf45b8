"""Processes: known by pid, start and boot; a zombie is dead; a group is found and ended whole."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from tests import bynumber
from tokenmill.machine import processes
from tokenmill.machine.processes import MARK, ProcessId

SLEEP = "__import__('time').sleep(60)"


@contextmanager
def running(code: str, log: Path, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    process = processes.spawn([sys.executable, "-c", code], dict(os.environ), log, mark)
    try:
        yield process
    finally:
        bynumber.signal_all(bynumber.members(process.pid, mark), signal.SIGKILL)
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def identified(pid: int) -> ProcessId:
    found = processes.identify(pid)
    assert found is not None
    return found


def test_a_process_is_known_by_more_than_its_pid() -> None:
    me = identified(os.getpid())
    assert processes.alive(me)
    assert not processes.alive(replace(me, start=me.start + 1))
    assert not processes.alive(replace(me, boot="another"))
    assert processes.identify(2**22 + 1) is None


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    with running("pass", tmp_path / "log", "tm-zombie") as process:
        known = identified(process.pid)
        until(lambda: (found := processes.stat(process.pid)) is not None and found.state == "Z")
        assert not processes.alive(known)
        assert bynumber.members(process.pid, "tm-zombie") == []


THREAD_LIVES_ON = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("on its way out", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_zombie_whose_threads_still_run_is_not_dead(tmp_path: Path) -> None:
    """Seen of servers that were killed: their first thread is gone, and the driver still frees their memory."""
    with running(THREAD_LIVES_ON, tmp_path / "log", "tm-threads") as process:
        identity = processes.identify(process.pid)
        assert identity is not None
        until(lambda: (found := processes.stat(process.pid)) is not None and found.state == "Z")
        assert processes.alive(identity)
        assert bynumber.members(process.pid) == [process.pid]


def test_a_name_with_spaces_and_brackets_is_read(tmp_path: Path) -> None:
    code = f"open('/proc/self/comm', 'w').write('a ) S (b'); {SLEEP}"
    with running(code, tmp_path / "log", "tm-name") as process:
        until(lambda: ") S (" in Path(f"/proc/{process.pid}/comm").read_text())
        found = processes.stat(process.pid)
        assert found is not None
        assert (found.parent, found.group) == (os.getpid(), process.pid)


def test_an_end_is_noticed_at_once_and_an_old_one_too(tmp_path: Path) -> None:
    async def watched(process: ProcessId) -> None:
        async with asyncio.timeout(10):
            await processes.ended(process)

    with running(SLEEP, tmp_path / "log", "tm-end") as process:
        known = identified(process.pid)

        async def kill_while_watching() -> None:
            watching = asyncio.create_task(watched(known))
            await asyncio.sleep(0.05)
            assert not watching.done()
            os.kill(process.pid, signal.SIGKILL)
            await watching

        asyncio.run(kill_while_watching())
        asyncio.run(watched(known))
        process.wait()
        asyncio.run(watched(known))
    asyncio.run(watched(replace(identified(os.getpid()), start=1)))


def test_a_server_gets_a_session_its_mark_and_a_log_of_its_own(tmp_path: Path) -> None:
    code = f"import os; print(os.environ[{MARK!r}], os.getsid(0) == os.getpid(), os.read(0, 1)); os.write(2, b'err')"
    log = tmp_path / "log"
    log.write_bytes(b"earlier\n")
    with running(code, log, "tm-log") as process:
        assert process.wait() == 0
    assert sorted(log.read_bytes().split(b"\n")) == sorted([b"earlier", b"tm-log True b''", b"err"])


def test_what_a_process_uses_and_its_name_are_read() -> None:
    began = processes.stat(os.getpid())
    assert began is not None
    until(
        lambda: sum(range(200_000)) > 0 and (now := processes.stat(os.getpid())) is not None and now.cpu_s > began.cpu_s
    )
    assert 10**6 < began.resident < 10**11
    assert f"pid {os.getpid()} (" in processes.describe(os.getpid())
    assert processes.describe(2**22 + 1).endswith("(unknown command)")


def test_a_dead_child_tells_its_exit_code_until_it_is_reaped(tmp_path: Path) -> None:
    with running("raise SystemExit(126)", tmp_path / "log", "tm-code") as process:
        until(lambda: (found := processes.stat(process.pid)) is not None and found.state == "Z")
        found = processes.stat(process.pid)
        assert found is not None
        assert os.waitstatus_to_exitcode(found.status) == 126


def test_a_signal_reaches_this_process_and_never_another_of_its_number(tmp_path: Path) -> None:
    with running(SLEEP, tmp_path / "log", "tm-send") as process:
        known = identified(process.pid)
        assert not processes.send(replace(known, start=known.start - 1), signal.SIGKILL)
        assert processes.alive(known)
        assert processes.send(known, signal.SIGKILL)
        process.wait()
        assert not processes.send(known, signal.SIGKILL)


def test_a_process_dies_with_the_one_that_started_it_however_that_dies() -> None:
    child = f"from tokenmill.machine import processes as p; p.die_with_parent(); print(1, flush=True); {SLEEP}"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == b"1\n"
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.read() == b"", "the pipe ends with the last process that has it"
    finally:
        os.killpg(parent.pid, signal.SIGKILL) if bynumber.members(parent.pid) else None
        parent.communicate()

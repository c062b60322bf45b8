"""A server's processes: all that are provably its own are found and ended, and nobody else's ever is."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests import bynumber
from tests.unit.machine.test_processes import SLEEP, identified, running, until
from tokenmill.machine import group, processes
from tokenmill.machine.group import Group
from tokenmill.machine.processes import NO_GROUP, ProcessId

DOUBLE_FORK = f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {SLEEP}
    os._exit(0)
"""
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); {SLEEP}"

OVERWRITTEN = """
import ctypes, os, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 0, end - start)
print("on", flush=True)
time.sleep(60)
"""
"""What setproctitle does where it is not told to leave the environment alone."""


def known(process: "subprocess.Popen[bytes]", mark: str) -> Group:
    return Group(identified(process.pid), process.pid, mark)


def living(of: Group) -> list[int]:
    return [process.pid for process in group.look(of).living]


def ended(of: Group, grace_s: float = 5.0) -> tuple[ProcessId, ...]:
    return asyncio.run(group.end(of, grace_s=grace_s, verify_s=5))


def said(log: Path, words: bytes = b"on") -> bool:
    return log.exists() and words in log.read_bytes()


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_double_fork_that_ignores_sigterm_is_found_and_ended(tmp_path: Path, is_recorded: bool) -> None:
    with running(DOUBLE_FORK, tmp_path / "log", "tm-fork") as process:
        its = known(process, "tm-fork")
        process.wait()
        until(lambda: len(living(its)) == 1)
        (stray,) = living(its)
        assert os.getsid(stray) != process.pid
        assert living(replace(its, mark="tm-for")) == [], "a mark is no prefix"
        if is_recorded:
            its = replace(its, mark="", seen=(identified(stray),))
        assert ended(its, grace_s=0.2) == ()
        assert processes.identify(stray) is None or not processes.alive(identified(stray))


def test_a_process_that_wrote_over_its_environment_is_found_once_it_was_seen(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = f"[sys.executable, '-c', {OVERWRITTEN!r}]"
    code = f"import subprocess, sys; subprocess.Popen({words}, start_new_session=True).wait()"
    with running(code, log, "tm-title") as process:
        until(lambda: said(log))
        its = known(process, "tm-title")
        (child,) = set(living(its)) - {process.pid}
        assert b"tm-title" not in processes.environment(child)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert living(its) == [], "with its parent gone nothing proves any more whose it is"
        assert living(replace(its, seen=(ProcessId(child, 1, processes.boot_id()),))) == []
        its = replace(its, seen=(identified(child),))
        assert living(its) == [child]
        assert ended(its) == ()
        assert living(its) == []


def test_a_whole_group_is_found_by_any_one_of_it_that_is_known(tmp_path: Path) -> None:
    """The main process is gone, and all wrote over their environments: the group's number is still theirs."""
    log = tmp_path / "log"
    code = f"import os\nfor _ in range(2): os.fork()\n{OVERWRITTEN}"
    with running(code, log, "tm-group") as process:
        until(lambda: len(log.read_bytes().split()) == 4)
        its = known(process, "tm-group")
        others = sorted(set(living(its)) - {process.pid})
        assert len(others) == 3
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert sorted(living(replace(its, seen=(identified(others[1]),)))) == others
        assert ended(replace(its, seen=(identified(others[1]),))) == ()
        assert living(replace(its, seen=tuple(map(identified, others[:0])))) == []


def test_a_number_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path) -> None:
    with running(SLEEP, tmp_path / "log", "tm-stranger") as stranger:
        mine = Group(replace(identified(stranger.pid), start=1), stranger.pid, "tm-mine")
        before = Group(replace(identified(stranger.pid), boot="before"), stranger.pid, "tm-mine")
        announced = Group(ProcessId(0, 0, processes.boot_id()), NO_GROUP, "tm-mine")
        for its in (mine, before, announced):
            assert living(its) == []
            assert ended(its, grace_s=0.1) == ()
        assert stranger.poll() is None


def test_a_group_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(STUBBORN, log, "tm-stub") as process:
        until(lambda: said(log))
        assert ended(known(process, "tm-stub"), grace_s=0.2) == ()
        assert process.wait() == -signal.SIGKILL


def test_a_stopped_process_ends_in_good_order(tmp_path: Path) -> None:
    with running(SLEEP, tmp_path / "log", "tm-stop") as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert ended(known(process, "tm-stop")) == ()
        assert process.wait() == -signal.SIGTERM


def test_a_child_that_is_made_while_its_parent_is_ended_does_not_get_away(tmp_path: Path) -> None:
    """On SIGTERM it starts a child in a session of its own, without the mark, and goes."""
    log = tmp_path / "log"
    child = f"print('child', flush=True); {SLEEP}"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "def last(*_):\n"
        f"    subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "    time.sleep(0.5); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, last); print('on', flush=True); time.sleep(60)"
    )
    with running(code, log, "tm-last") as process:
        until(lambda: said(log))
        assert ended(known(process, "tm-last")) == ()
        assert bynumber.members(process.pid, "tm-last") == []


def test_one_reading_serves_many_looks_and_a_mark_is_read_once(tmp_path: Path) -> None:
    table = group.Table()
    with running(SLEEP, tmp_path / "log", "tm-table") as process:
        its = known(process, "tm-table")
        assert list(group.look(its, table, 60.0).living) == [its.main]
        process.kill()
        process.wait()
        assert list(group.look(its, table, 60.0).living) == [its.main], "that is what it was"
        assert group.look(its, table).all == ()

"""What was done between two readings, and the closer look at threads and at children that died."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.machine.test_processes import SLEEP, identified, running, until
from tokenmill.machine import evidence, group
from tokenmill.machine.cards import CardUse
from tokenmill.machine.evidence import Closer, Reading, Used, between, confirmed
from tokenmill.machine.group import Group, Members
from tokenmill.machine.processes import ProcessId, Stat

MAIN, CHILD, LATER = (ProcessId(number, 100, "boot") for number in (7, 8, 9))
START = Reading(10.0, {MAIN: Used(5.0, 3, 1000, 10**9), CHILD: Used(2.0, 0, 0, 10**9)}, CardUse(10**9, 0))
RESTING = Closer(frozenset(), asleep=True)


def later(seconds: float = 2.0, cards: CardUse | None = None, closer: Closer | None = None, **used: Used) -> Reading:
    """The reading so much later; `main` and `child` where they did something."""
    by_name = {"main": MAIN, "child": CHILD, "later": LATER}
    changed = {by_name[name]: each for name, each in used.items()}
    return Reading(START.at + seconds, {**START.used, **changed}, cards or START.cards, closer)


def used(of: ProcessId, **more: float) -> Used:
    old = START.used[of]
    return Used(
        old.cpu_s + more.get("cpu_s", 0.0),
        old.faults + int(more.get("faults", 0)),
        old.read + int(more.get("read", 0)),
        old.resident + int(more.get("resident", 0)),
    )


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (later(), ""),
        (later(main=used(MAIN, cpu_s=0.04)), ""),  # SGLang with --sleep-on-idle
        (later(main=used(MAIN, cpu_s=2.0)), "quiet but working: 1.0 cores, GPU 0 %"),
        (later(main=used(MAIN, cpu_s=0.5), child=used(CHILD, cpu_s=1.5)), "quiet but working: 1.0 cores, GPU 0 %"),
        (later(main=used(MAIN, cpu_s=2.0, resident=62e6)), "quiet but working: 1.0 cores, GPU 0 %, 31 MB/s"),
        (later(cards=CardUse(10**9, 100)), "quiet but working: 0.0 cores, GPU 100 %"),
        (later(cards=CardUse(3 * 10**9, 0)), "quiet but working: 0.0 cores, GPU 0 %"),
        (later(cards=CardUse(10**8, None)), ""),  # memory given back is no work
        (later(child=used(CHILD, resident=62e6)), "waiting for the mount: 31 MB/s"),
        (later(child=used(CHILD, read=62e6)), "waiting for the mount: 31 MB/s"),
        (later(child=used(CHILD, read=40e6, resident=62e6)), "waiting for the mount: 31 MB/s"),
        (later(child=used(CHILD, read=4000)), ""),  # an idle server's pipes
        (later(child=used(CHILD, faults=4)), "waiting for the mount: 0 MB/s"),
        (later(child=used(CHILD, resident=-62e6)), ""),
    ],
)
def test_what_was_done_is_told_in_words(after: Reading, words: str) -> None:
    work = between(START, after)
    assert work.words("the mount") == words
    assert work.is_idle is not bool(words)


def test_a_thread_that_waits_for_a_file_for_longer_is_at_work_even_if_nothing_comes() -> None:
    first, still = Closer(frozenset({70, 71}), asleep=False), between(START, later())
    assert between(START, later(closer=confirmed(None, first, still))).is_idle, "seen once"
    again = confirmed(first, Closer(frozenset({71, 72}), asleep=False), still)
    work = between(START, later(closer=again))
    assert (work.waiting, work.words(), work.is_idle) == (1, "waiting for the disk: 0 MB/s", False)
    other = confirmed(first, Closer(frozenset({99}), asleep=False), still)
    assert between(START, later(closer=other)).is_idle, "a moment's write to a log"
    grew = between(START, later(main=used(MAIN, resident=4096)))
    assert grew.is_idle
    assert confirmed(RESTING, first, grew).lasting == first.waiting


def test_time_of_children_counts_once() -> None:
    """A child that is reaped hands its time to its parent: that is no work of this moment."""
    reaped = Reading(12.0, {MAIN: Used(5.0 + 2.0, 3, 1000, 10**9)}, START.cards)
    assert between(START, reaped).cores == 0.0
    helper = later(main=used(MAIN, cpu_s=1.5))  # a compiler that came and went between two looks
    assert between(START, helper).cores == pytest.approx(0.75)
    lost = Reading(12.0, {MAIN: START.used[MAIN]}, START.cards)  # somebody else reaped it
    assert between(START, lost).cores == 0.0


def test_a_process_that_is_found_late_is_not_at_work_for_all_that_it_did_before() -> None:
    work = between(START, later(later=Used(500.0, 10**6, 10**12, 10**11)))
    assert (work.cores, work.read_mb_s, work.grown_mb_s, work.faults_s) == (1.0, 0.0, 0.0, 0.0)


def test_without_nvml_a_card_is_unknown() -> None:
    blind = replace(START, cards=None)
    work = between(blind, replace(later(main=used(MAIN, cpu_s=2.0)), cards=None))
    assert work.words() == "quiet but working: 1.0 cores"


# -- real processes ----------------------------------------------------------------------------------------------------
def test_a_process_at_work_and_one_asleep_are_told_apart(tmp_path: Path) -> None:
    with running("while True: pass", tmp_path / "a", "tm-a") as busy, running(SLEEP, tmp_path / "b", "tm-b") as idle:
        work = (identified(busy.pid),)
        first = evidence.read(work)
        until(lambda: evidence.read(work)[work[0]].cpu_s > first[work[0]].cpu_s + 0.1)
        until(lambda: not evidence.look_closer(work).asleep)
        rest = (identified(idle.pid),)
        until(lambda: evidence.look_closer(rest) == Closer(frozenset(), asleep=True))
        os.kill(idle.pid, signal.SIGSTOP)
        until(lambda: evidence.look_closer(rest) == Closer(frozenset(), asleep=False, stopped=True))


LAUNCHER = """
import os, subprocess, sys, time
{before}
child = subprocess.Popen(["/bin/sh", "-c", "exit 126"])
print("on", flush=True)
time.sleep(60)
"""


def members(process_pid: int, mark: str) -> Members:
    return group.look(Group(identified(process_pid), process_pid, mark))


@pytest.mark.parametrize(
    ("before", "is_abandoned"),
    [
        ("", True),
        ("subprocess.Popen(['sleep', '60'])", False),
        ("import multiprocessing.resource_tracker as r; r.ensure_running()", True),
        ("if os.fork(): os.wait()  # a wrapper of the launcher", True),
    ],
)
def test_children_are_all_dead_only_where_nobody_else_is_alive(tmp_path: Path, before: str, is_abandoned: bool) -> None:
    log = tmp_path / "log"
    with running(LAUNCHER.format(before=before), log, "tm-dead") as process:
        until(lambda: b"on" in log.read_bytes() and bool(members(process.pid, "tm-dead").zombies))
        dead = evidence.abandoned(members(process.pid, "tm-dead"))
        assert [evidence.ending_of(found.status) for _, found in dead] == (["exit code 126"] if is_abandoned else [])


def test_nobody_is_abandoned_without_dead_children(tmp_path: Path) -> None:
    with running(SLEEP, tmp_path / "log", "tm-alone") as process:
        assert evidence.abandoned(members(process.pid, "tm-alone")) == ()
    gone = Stat("Z", 1, 7, 100, 0.0, 0.0, 0, 0, 256)
    assert evidence.abandoned(Members({}, {MAIN: gone})) == (), "its exit says more"


def test_a_signal_is_told_as_one() -> None:
    assert evidence.ending_of(9) == "signal 9"
    assert evidence.ending_of(126 << 8) == "exit code 126"


@contextmanager
def _starved() -> Iterator[ProcessId]:
    """A process that wants a processor and gets next to none; in one session, since each has a share of its own."""
    greedy, starved = (subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2))
    try:
        for process in (greedy, starved):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        os.sched_setscheduler(starved.pid, os.SCHED_IDLE, os.sched_param(0))
        yield identified(starved.pid)
    finally:
        for process in (greedy, starved):
            process.kill()
            process.wait()


def test_a_server_that_gets_no_processor_is_not_idle() -> None:
    """Seen: a real server on a full machine was taken for one that hangs in its canary."""
    with _starved() as starved:

        def work() -> evidence.Work:
            mine = (starved,)
            first = Reading(time.monotonic(), evidence.read(mine), closer=evidence.look_closer(mine))
            time.sleep(0.2)
            second = Reading(time.monotonic(), evidence.read(mine))
            closer = confirmed(first.closer, evidence.look_closer(mine), between(first, second))
            return between(first, replace(second, closer=closer))

        until(lambda: work().words().startswith("waiting for a processor: it got 0.0"))
        assert not work().is_idle

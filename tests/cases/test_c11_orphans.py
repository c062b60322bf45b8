"""C11: a server has ended when all of it has: children that ignore SIGTERM, ports, and its cards' memory."""

import asyncio
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests import living
from tests.harness import Case, wait_until
from tokenmill import leftovers, signs
from tokenmill.core import server as core
from tokenmill.core.server import State
from tokenmill.ending import HeldPort, Sensors
from tokenmill.events import Event, EventLog
from tokenmill.folder import ServerEntry
from tokenmill.folder import State as FolderState
from tokenmill.job import Job
from tokenmill.launch import Place, tmp_folder
from tokenmill.machine import ports, processes
from tokenmill.machine.cards import Cards, CardUse, Held
from tokenmill.supervise import Supervisor

GIB = 1 << 30

LAUNCHER = """
import fcntl, os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lock = open(sys.argv[1], "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
time.sleep(600)
"""
"""Its child ignores SIGTERM and holds a lock file, as an engine holds its card."""

WIPE = """
    import ctypes
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
"""
"""What setproctitle does to the environment that /proc shows, unless it is told to leave it alone."""


def is_locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cards(memory: Mapping[int, list[int]], holders: Mapping[int, int | None] | None = None) -> Cards:
    """NVML's seam: each card's bytes in use, reading by reading, the last again and again; who holds how many."""
    left = {card: list(readings) for card, readings in memory.items()}

    def read(card: int | str) -> CardUse | None:
        readings = left.get(int(card), [])
        used = readings.pop(0) if len(readings) > 1 else readings[0] if readings else None
        return None if used is None else CardUse(used, 0, holders or {})

    return Cards(read)


def job(folder: Path, known: Cards | None = None) -> Job:
    sensors = Sensors(cards=known or cards({}), shm=folder / "shm")
    return living.job(folder, [sys.executable, "-c", LAUNCHER, str(folder / "lock")], sensors=sensors)


@pytest.mark.parametrize("killed", [False, True])
def test_the_whole_of_a_server_is_ended_whatever_became_of_its_front(tmp_path: Path, port: int, killed: bool) -> None:
    async def ends() -> None:
        async with living.begun(job(tmp_path), port) as server:
            lock = tmp_path / "lock"
            await server.until(lambda: lock.exists() and is_locked(lock) and len(server.entry.members) == 2)
            if killed:
                os.kill(server.entry.process.pid, signal.SIGKILL)
                await server.until(lambda: server.failures)
            ending = await server.end(grace_s=0.2)
            assert ending.left == ""
            assert not is_locked(lock)
            assert not any(map(processes.alive, server.entry.members))

    asyncio.run(ends())


def test_memory_that_does_not_come_back_is_told_with_its_card(tmp_path: Path, port: int) -> None:
    known = cards({3: [GIB, 62 * GIB], 4: [GIB, GIB, 3 * GIB // 2], 5: []}, {4_000_000: 61 * GIB})

    async def ends() -> None:
        async with living.begun(job(tmp_path, known), port, gpus=(3, 4, 5)) as server:
            assert server.entry.gpu_bases == (GIB, GIB, None)
            ending = await server.end(grace_s=0.0, verify_s=2.0)
            assert ending.memory == (Held(3, 61 * GIB, (4_000_000,)),)
            words = "GPU 3: 62,464 MiB did not come back, held by pid 4000000 (unknown command)"
            assert (ending.left, ending.pids) == (words, ())

    asyncio.run(ends())


@pytest.mark.parametrize("size", [60 * GIB, 20 * GIB, None])
def test_what_living_strangers_hold_is_not_waited_for_once_nothing_else_is_held(
    tmp_path: Path, port: int, size: int | None
) -> None:
    """Seen on an H200 that servers of another run had come to meanwhile: each end took the whole 60 s."""
    known = cards({3: [GIB // 2, 62 * GIB, 60 * GIB + GIB // 2]}, {os.getpid(): size})

    async def ends() -> None:
        async with living.begun(job(tmp_path, known), port, gpus=(3,)) as server:
            ending = await server.end(grace_s=0.0, verify_s=30.0 if size == 60 * GIB else 2.0)
            words = f"held by {processes.describe(os.getpid())}"
            if size == 60 * GIB:
                assert ending.others == f"GPU 3: 61,440 MiB more in use than before, by others, {words}"
                assert (ending.left, ending.memory) == ("", ())
            else:
                assert ending.left == f"GPU 3: 61,440 MiB did not come back, {words}", "the rest may be the server's"

    asyncio.run(ends())


def test_memory_that_comes_back_late_is_waited_for(tmp_path: Path, port: int) -> None:
    known = cards({0: [GIB, 62 * GIB, 40 * GIB, GIB]})

    async def ends() -> None:
        async with living.begun(job(tmp_path, known), port, gpus=(0,)) as server:
            assert (await server.end(grace_s=0.0, verify_s=10.0)).left == ""

    asyncio.run(ends())


def test_a_card_whose_memory_does_not_come_back_is_quarantined_and_nothing_is_started_there(
    tmp_path: Path, port: int
) -> None:
    told: list[Event] = []
    made = replace_fields(job(tmp_path, cards({3: [GIB, 62 * GIB]})), tell=told.append)

    async def ends() -> None:
        where = ports.Ports(port, ports.assign(port, 1)[0].internal)
        supervisor = Supervisor(made, Place(0, (3,)), where, lambda: where, lambda *_: False)
        supervisor.grace_s, supervisor.verify_s = 0.0, 0.3
        running = asyncio.create_task(supervisor.run())
        supervisor.post(core.Launch())
        await _until(lambda: is_locked(tmp_path / "lock"))
        assert supervisor.entry is not None
        os.kill(supervisor.entry.process.pid, signal.SIGKILL)
        await _until(lambda: supervisor.server.state is State.QUARANTINED)
        assert supervisor.server.life == 1
        supervisor.post(core.Stop())
        await running

    asyncio.run(ends())
    texts = [event.text for event in told]
    assert "GPU 3: 62,464 MiB did not come back: nothing is started there for 1 h" in texts
    assert sum("started as pid" in text for text in texts) == 1


async def _until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_card_that_another_server_of_ours_uses_tells_nothing(tmp_path: Path, port: int) -> None:
    known = cards({0: [GIB, 60 * GIB]})
    assert known.take((0,), 0) == (GIB,)
    assert known.take((0,), 1) == (GIB,), "what it held before any of ours"
    assert known.use((0,)) is None
    assert known.unreturned((0,), 0, (GIB,)) == ()
    known.leave((0,), 0)
    assert known.use((0,)) == CardUse(60 * GIB, 0)
    assert known.unreturned((0,), 1, (GIB,)) == (Held(0, 59 * GIB),)


def test_a_stranger_on_a_port_of_the_server_is_named(tmp_path: Path, port: int) -> None:
    async def ends() -> None:
        async with living.begun(job(tmp_path), port) as server:
            internal = server.entry.internal_port
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", internal)):
                ending = await server.end(grace_s=0.0)
            assert [held.port for held in ending.ports] == [port, internal]
            assert ending.ports[0] == HeldPort(port, processes.describe(os.getpid()))
            assert f"port {port} is held by pid {os.getpid()} (" in ending.left

    asyncio.run(ends())


def test_what_a_killed_tokenmill_left_is_ended_by_what_it_had_noted(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its front is dead as well, and the child wrote over its environment: the record in state.json knows it."""
    monkeypatch.setattr(signs, "MEMBERS_S", 0.5)
    wiped = LAUNCHER.replace("    print(", f"{WIPE}    print(")
    made = living.job(tmp_path, [sys.executable, "-c", wiped, str(tmp_path / "lock")])

    async def ends() -> None:
        async with living.begun(made, port) as server:
            lock = tmp_path / "lock"
            await server.until(lambda: lock.exists() and is_locked(lock) and len(server.entry.members) == 2)
            os.kill(server.entry.process.pid, signal.SIGKILL)
            await server.until(lambda: server.failures)
            stranger = whose_number_was_used_again(server.entry)
            made.folder.write_state(FolderState(None, (server.entry, stranger)))
            assert leftovers.survivors(made.folder) == [server.entry]
            assert (await leftovers.end_survivor(made.folder, stranger, grace_s=0.3)).left == ""
            assert is_locked(lock)
            assert (await leftovers.end_survivor(made.folder, server.entry, grace_s=0.3)).left == ""
            assert not is_locked(lock)
            assert not tmp_folder(made.folder.path, 0).exists()

    asyncio.run(ends())


def whose_number_was_used_again(entry: ServerEntry) -> ServerEntry:
    """Another server's entry: its processes are gone, and its group's number is the first one's by now."""
    gone = replace(entry.process, start=entry.process.start - 1)
    return replace(entry, index=1, process=gone, members=(gone,), nonce="tm-other")


def test_down_ends_children_that_ignore_it(case: Case) -> None:
    lock = case.folder / "lock"
    case.write(
        model={"name": "m"},
        engine={"kind": "openai", "args": {}, "command": [sys.executable, "-c", LAUNCHER, str(lock)]},
        fleet={"servers": 1},
    )
    process = case.start()
    try:
        wait_until(lambda: lock.exists() and is_locked(lock), process)
        process.kill()  # nobody is left who could end the server
        process.wait()
        assert is_locked(lock)
        folder = case.run_folder
        with folder.own("down"):
            ended = leftovers.end(folder, leftovers.survivors(folder), EventLog(folder.events, print), grace_s=0.3)
            assert asyncio.run(ended) == 0
        assert not is_locked(lock)
    finally:
        process.kill()
        process.wait()
    assert case.ended()

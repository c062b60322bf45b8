"""Room: what is told of shared memory, memory, open files and logind, and what is fine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctoring import ROOM, context, told
from tokenmill.checks.base import Context
from tokenmill.checks.room import check_room
from tokenmill.machine import room


def with_room(tmp_path: Path, fleet: dict[str, Any] | None = None, **changed: Any) -> Context:
    found = context(tmp_path, model={"path": "/models/m"}, fleet=fleet or {})
    found.read_room = lambda: replace(ROOM, **changed)
    return found


def test_the_reference_machine_has_room(tmp_path: Path) -> None:
    assert told(check_room, with_room(tmp_path)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shm_total": 64 << 20, "shm_free": 64 << 20}, "has 64 MB, as docker makes it"),
        ({"shm_free": 10**9}, "/dev/shm has 1.0 of 923.0 GB free"),
        ({"memory": 5 * 10**9}, "5 GB of memory may be taken under this control group's limit"),
        ({"memory": 5 * 10**9, "machine": 8 * 10**9}, "5 GB of memory may be taken;"),
        ({"files": 1024}, "at most 1024 files may be open"),
    ],
)
def test_what_is_short_is_told(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    (message,) = told(check_room, with_room(tmp_path, **changed))
    assert words in message


def test_servers_that_load_at_once_take_more(tmp_path: Path) -> None:
    assert told(check_room, with_room(tmp_path, memory=40 * 10**9)) == []
    assert len(told(check_room, with_room(tmp_path, {"stagger": "off"}, memory=40 * 10**9))) == 1


@pytest.mark.parametrize(("keep", "count"), [("no", 0), ("stopped", 1), ("always", 1)])
def test_shared_memory_that_goes_at_logout_matters_to_servers_that_stay(tmp_path: Path, keep: str, count: int) -> None:
    assert len(told(check_room, with_room(tmp_path, {"keep_servers": keep}, removes_ipc=True))) == count


def test_servers_that_run_elsewhere_need_no_room_here(tmp_path: Path) -> None:
    engine = {"kind": "openai", "addresses": ["http://127.0.0.1:1"]}
    found = context(tmp_path, engine=engine, model={"name": "m"})
    found.read_room = lambda: replace(ROOM, shm_total=0, shm_free=0, memory=0, files=64)
    assert list(check_room(found)) == []


def test_this_machines_room_is_read() -> None:
    found = room.read()
    assert 0 <= found.shm_free <= found.shm_total
    assert 0 < found.memory <= found.machine
    assert found.files > 0

"""Run folders harmed while nobody looked: named with the file and the way out; never a second, silent truth."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import bynumber
from tests.chaos.conftest import Command
from tests.harness import Case, assert_whole, wait_until
from tokenmill import launch

KEYS = {f"p{n}" for n in range(40)}


def _done(case: Case, tokenmill: Command) -> Path:
    """A run that is done; returns its only part."""
    case.write(fleet={"servers": 1})
    assert tokenmill("run", case.config)[0] == 0
    (part,) = (case.run_path / "data").glob("part-*.parquet")
    return part


@pytest.mark.parametrize(
    "harm", ["scrambled", *(pytest.param(harm, marks=pytest.mark.long) for harm in ("cut", "empty"))]
)
def test_a_damaged_part_is_named_by_whoever_reads_it_and_its_rows_come_anew(
    case: Case, tokenmill: Command, harm: str
) -> None:
    part = _done(case, tokenmill)
    whole = part.read_bytes()
    half = len(whole) // 2
    part.write_bytes(
        {"cut": whole[:half], "empty": b"", "scrambled": whole[:99] + b"!" * half + whole[99 + half :]}[harm]
    )
    for words in (["export", case.run_path, "messages", case.folder / "out"], ["inspect", case.run_path]):
        code, said = tokenmill(*words)
        assert code == 6, said
        assert f"{part} is damaged" in said
        assert f"mv {part} {part}.bad" in said
    assert not (case.folder / "out").exists()
    part.rename(part.with_name(part.name + ".bad"))
    assert tokenmill("run", case.config)[0] == 0
    assert_whole(case, KEYS)


@pytest.mark.parametrize("left", ["", pytest.param("not json\n", marks=pytest.mark.long)])
def test_records_whose_settings_are_lost_are_not_mixed_with_others(case: Case, tokenmill: Command, left: str) -> None:
    _done(case, tokenmill)
    file = case.run_path / "data" / "settings.jsonl"
    kept = file.read_text()
    file.write_text(left)
    code, said = tokenmill("run", case.config, "--set", "generation.temperature=0.1")
    assert code == 2
    assert f"{file} is lost or damaged" in said
    file.write_text(kept)
    assert tokenmill("run", case.config)[0] == 0


def test_a_copy_of_a_live_folder_leaves_the_original_alone(case: Case, tokenmill: Command) -> None:
    case.write(engine={"args": {"slots": 4, "latency-ms": 300}})
    process = case.start()
    case.until_done(8, process)
    copy = case.run_path.with_name("copy")
    shutil.copytree(case.run_path, copy)
    assert tokenmill("down", copy) == (0, "no server is left\n")
    code, said = tokenmill("run", case.config, "--set", "name=copy", "--set", f"fleet.port={case.port + 10}")
    assert code == 0, said
    assert "adopts pid" not in said
    assert case.wait(process) == 0, case.output()
    assert_whole(case, KEYS)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_down_does_not_wait_for_an_owner_that_is_stopped(case: Case, tokenmill: Command) -> None:
    case.write(engine={"args": {"slots": 4, "latency-ms": 300}})
    process = case.start()
    case.until_done(8, process)
    with _stopped(process.pid):
        code, said = tokenmill("down", case.run_path, "--now")
    assert code == 2
    assert f"pid {process.pid}, is stopped and cannot end" in said
    assert f"kill -CONT {process.pid}" in said
    assert case.wait(process) == 130
    assert case.leftovers() == []


def test_a_sealer_that_hangs_is_named_and_not_waited_for_for_ever(
    case: Case, tokenmill: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "site" / "sitecustomize.py"
    slow.parent.mkdir()
    slow.write_text("import sys, time\nif sys.orig_argv[1:3] == ['-m', 'tokenmill.seal']:\n    time.sleep(60)\n")
    case.write(fleet={"servers": 1})
    process = case.start(env={"PYTHONPATH": str(slow.parent)})
    deadline = time.monotonic() + 30
    while not (sealers := _sealers(case)):
        assert time.monotonic() < deadline, case.output()
        time.sleep(0.02)
    process.kill()
    process.wait()
    monkeypatch.setattr("tokenmill.store.SEALER_PATIENCE_S", 0.5)
    code, said = tokenmill("run", case.config)
    assert code == 6
    assert "is being sealed by a process that has not ended for 0 s" in said
    assert "fuser -k" in said
    bynumber.signal_all(sealers, signal.SIGKILL)
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert_whole(case, KEYS)


def _sealers(case: Case) -> list[int]:
    return [pid for pid in case.leftovers() if b"tokenmill.seal" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_folder_of_jsonl_and_parquet_is_inspected_whole(case: Case, tokenmill: Command) -> None:
    part = _done(case, tokenmill)
    mixed = case.folder / "mixed"
    mixed.mkdir()
    shutil.copy(part, mixed / "own.parquet")
    code, said = tokenmill("inspect", mixed, "--json")
    assert (code, json.loads(said)["rows"]) == (0, 40)
    (mixed / "rows.jsonl").write_text(
        '{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}\n'
    )
    assert tokenmill("inspect", mixed)[0] in (0, 5)
    (mixed / "torn.parquet").write_bytes(part.read_bytes()[:500])
    code, said = tokenmill("inspect", mixed)
    assert code == 2
    assert "torn.parquet is damaged: Parquet magic bytes not found" in said


@pytest.mark.parametrize(
    ("harm", "command"),
    [
        ("deleted", "run"),
        ("of nobody", "down"),
        *(pytest.param(*words, marks=pytest.mark.long) for words in (("cut", "run"), ("cut", "down"))),
        *(pytest.param(*words, marks=pytest.mark.long) for words in (("of nobody", "run"), ("deleted", "down"))),
    ],
)
def test_servers_are_found_and_ended_whatever_became_of_state_json(
    case: Case, tokenmill: Command, monkeypatch: pytest.MonkeyPatch, harm: str, command: str
) -> None:
    monkeypatch.chdir(case.folder)
    case.write()
    assert case.wait(case.command("up", str(case.config))) == 0
    old, state = set(case.server_pids().values()), case.run_folder.state_file
    if harm == "deleted":
        state.unlink()
    else:
        state.write_bytes(state.read_bytes()[:20] if harm == "cut" else b"{}")
    assert all(f"pid {pid}" in tokenmill("status")[1] for pid in old)
    code, said = tokenmill("down") if command == "down" else tokenmill("run", case.config)
    assert code == 0
    assert all(f"pid {pid}" in said for pid in old)
    assert case.leftovers() == []
    assert not launch.tmp_folder(case.run_path, 0).parent.exists()


def test_an_owner_stays_known_though_state_json_is_lost(case: Case, tokenmill: Command) -> None:
    case.write(engine={"args": {"slots": 4, "latency-ms": 300}})
    process = case.start()
    case.until_done(8, process)
    killed = case.server_pids()[0]
    case.run_folder.state_file.write_text("not JSON")
    os.kill(killed, signal.SIGKILL)  # whatever changes a server's state makes its owner write
    wait_until(lambda: case.run_folder.owner() is not None, process)
    code, said = tokenmill("down", case.run_path, "--now")
    assert code == 0
    assert f"asks tokenmill run, pid {process.pid}" in said
    assert case.wait(process) == 130
    assert case.leftovers() == []


def test_down_leaves_no_tmpdir_by_whatever_name_it_knows_the_run(
    case: Case, tokenmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(case.folder)
    case.write(engine={"args": {"slots": 4, "latency-ms": 300}})
    for run in ([], ["runs/case"], [case.config]):
        process = case.start()
        wait_until(lambda: case.run_folder.owner() is not None and len(case.server_pids()) == 2, process)
        process.kill()
        process.wait()
        assert tokenmill("down", "--now", *run)[0] == 0
        assert not launch.tmp_folder(case.run_path, 0).parent.exists()

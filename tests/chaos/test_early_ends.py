"""Runs that end before or beside generation: what lives is found again, ended or named; nothing is forgotten."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from tests.chaos.conftest import Command
from tests.conftest import write_prompts
from tests.harness import Case, assert_whole, wait_until
from tokenmill import configfile
from tokenmill.errors import PreflightError
from tokenmill.leftovers import survivors
from tokenmill.node import LocalNode

KEYS = {f"p{n}" for n in range(40)}


def _killed(case: Case, gate: dict[str, float] | None = None, **flags: object) -> set[int]:
    """A run that was killed (-9) in its middle; returns its servers, which live."""
    case.settings = {"engine": {"args": {"slots": 4, "latency-ms": 100, **flags}}}
    case.write(gate=gate or {})
    process = case.start()
    case.until_done(8, process)
    wait_until(lambda: (known := case.run_folder.status()) and known.prompts.total == len(KEYS), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    pids = set(case.server_pids().values())
    assert set(case.leftovers()) == pids
    assert len(pids) == 2
    return pids


def test_servers_are_found_again_after_a_start_that_failed_half_way(
    case: Case, tokenmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = _killed(case)

    def fails(*_: object) -> None:
        raise PreflightError("the model could not be brought here")

    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.node.stage", fails)
        code, said = tokenmill("run", case.config)
    assert code == 3
    assert "the model could not be brought here" in said
    assert "2 servers go on" in said
    assert f"tokenmill down {case.run_path}" in said
    assert set(case.server_pids().values()) == pids
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert ": started as pid" not in said
    assert_whole(case, KEYS)
    assert case.leftovers() == []


def test_a_guard_names_the_servers_that_it_leaves(case: Case, tokenmill: Command) -> None:
    _killed(case)
    code, said = tokenmill("run", case.config, "--set", "generation.thinking=false")
    assert code == 2
    assert "2 servers go on" in said
    assert "2 servers ended" in tokenmill("down", case.run_path)[1]
    assert case.leftovers() == []


def test_a_stop_that_comes_before_the_adoption_ends_what_would_have_been_adopted(case: Case) -> None:
    _killed(case)

    async def stopped_at_once() -> None:
        node = LocalNode(configfile.load(case.config), case.run_folder, "s", survivors(case.run_folder))
        await node.stop(0.0, keep=False)
        await node.run()

    asyncio.run(stopped_at_once())
    assert case.leftovers() == []


def test_a_gate_that_stops_at_the_start_ends_servers_and_stops_every_start_alike(
    case: Case, tokenmill: Command
) -> None:
    _killed(case, {"max_rejected": 1.0}, **{"empty-reasoning": 0.9})
    for _ in range(2):
        code, said = tokenmill("run", case.config, "--set", "gate.max_rejected=0.2", "--set", "gate.cohort=10")
        assert code == 5, said
        assert "the gate stopped the run" in said
        assert "begins" not in said
        assert case.leftovers() == []
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert_whole(case, KEYS)


def test_prompts_that_are_cut_off_in_mid_run_are_missed_and_asked_for_once_they_are_back(
    case: Case, tokenmill: Command
) -> None:
    path = case.folder / "prompts.jsonl"
    write_prompts(path, 2960, start=40)
    case.write(engine={"args": {"slots": 16, "latency-ms": 10}}, fleet={"servers": 1})
    whole = path.read_bytes()
    process = case.start()
    case.until_done(8, process)
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2000]))
    assert case.wait(process) == 2, case.output()
    assert "prompts were not found again in" in case.output()
    assert "it changed while it was read" in case.output()
    assert case.leftovers() == []
    path.write_bytes(whole)
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert_whole(case, {f"p{n}" for n in range(3000)})


def test_addresses_where_nobody_is_are_told_within_seconds(
    case: Case, tokenmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.life.ADDRESS_PATIENCE_S", 0.3)
    case.write(
        engine={"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{case.port}"]},
        model={"name": "m"},
        fleet={"give_up": "3s"},
    )
    code, said = tokenmill("run", case.config)
    assert code == 4
    assert f"set aside: http://127.0.0.1:{case.port} cannot be reached" in said
    assert "see engine.addresses" in said


def test_a_failed_start_leaves_the_counts_of_the_run_as_they_were(case: Case, tokenmill: Command) -> None:
    _killed(case)
    before = json.loads(tokenmill("status", case.run_path, "--json")[1])
    assert tokenmill("run", case.config, "--set", "prompts.path=gone.jsonl")[0] == 3
    shown = json.loads(tokenmill("status", case.run_path, "--json")[1])
    assert (before["state"], shown["state"]) == ("killed", "failed")
    assert shown["prompts"] == before["prompts"]
    assert shown["prompts"]["total"] == 40
    tokenmill("down", case.run_path)


def test_a_sealer_keeps_its_lock_when_tokenmill_is_killed(case: Case, tokenmill: Command, tmp_path: Path) -> None:
    """Else the next start would write on into the journal that is being sealed, and lose what it wrote."""
    slow = tmp_path / "site" / "sitecustomize.py"
    slow.parent.mkdir()
    slow.write_text(
        "import sys, time\nif sys.orig_argv[1:3] == ['-m', 'tokenmill.seal']:\n    time.sleep(3)\n"  # before it locks
    )
    case.write(prompts={"limit": 20})
    process = case.start(env={"PYTHONPATH": str(slow.parent)})
    case.until_done(20, process)
    while not [pid for pid in case.leftovers() if b"tokenmill.seal" in Path(f"/proc/{pid}/cmdline").read_bytes()]:
        assert process.poll() is None, case.output()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    code, said = tokenmill("run", case.config, "--set", "prompts.limit=40")
    assert code == 0, said
    assert_whole(case, KEYS)

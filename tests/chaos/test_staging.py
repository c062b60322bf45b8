"""Staging from a real slow mount while things die: tokenmill, its servers, the copy itself."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests import bynumber
from tests.chaos.conftest import Command, write_short_prompts
from tests.conftest import Slow, write_prompts
from tests.harness import Case, assert_whole
from tests.staging import contents, write_model
from tokenmill.machine import copies

DEADLINE_S = 50.0


def write_config(folder: Path, model: Path) -> Path:
    path = folder / "stage.toml"
    data = {"model": {"path": str(model)}, "stage": {"to": str(folder / "root")}, "prompts": {"path": "p.jsonl"}}
    path.write_text(tomli_w.dumps(data))
    return path


def start(config: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tokenmill", "stage", str(config), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> str:
    """What a command said; it must have ended well."""
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    return said


def until(condition: Any, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.long)])
def test_killed_at_any_moment_no_wrong_byte_has_the_final_name(tmp_path: Path, slow: Slow, kills: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    model = write_model(tmp_path / "model", shards=4, size=12_000_000)
    right = contents(model)
    root, config = tmp_path / "root", write_config(tmp_path, slow(model, "--latency-ms", "30"))
    whole_s = 0.0
    for kill in range(kills):
        process = start(config)
        until(lambda: list(root.glob(".*.staging")), process)
        began = time.monotonic()
        if kill == 0:
            until(lambda: not list(root.glob(".*.staging")), process)
            whole_s = time.monotonic() - began
            process.wait(DEADLINE_S)
        else:
            time.sleep(draw.uniform(0.0, 1.2 * whole_s))
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for copy in root.glob("[!.]*"):
            assert copies.missing(copy) == ""
            assert contents(copy) == right
            shutil.rmtree(copy)
    said = ended(start(config))
    (copy,) = root.glob("[!.]*")
    assert said.splitlines()[-1] == str(copy)
    assert contents(copy) == right
    assert list(root.glob(".*.staging")) == [], "what the dead left is swept"


def test_two_commands_at_once_copy_once_and_the_second_says_that_it_waits(tmp_path: Path, slow: Slow) -> None:
    model = write_model(tmp_path / "model", shards=4, size=16_000_000)
    config = write_config(tmp_path, slow(model, "--latency-ms", "4", "--cap-mb-s", "20"))
    both = [start(config), start(config)]
    first, second = sorted((ended(process) for process in both), key=lambda said: "verified" not in said)
    assert "verified (fast)" in first
    assert "verified" not in second
    assert "another tokenmill stages it:" in second
    (copy,) = (tmp_path / "root").glob("[!.]*")
    assert contents(copy) == contents(model)


def test_a_download_that_still_grows_is_refused_and_with_wait_followed_to_its_end(tmp_path: Path, slow: Slow) -> None:
    model = write_model(tmp_path / "model")
    late = model / "model-00003-of-00003.safetensors"
    data = late.read_bytes()
    late.write_bytes(data[: 1 << 20])
    config = write_config(tmp_path, slow(model))
    refused = start(config)
    said, _ = refused.communicate(timeout=DEADLINE_S)
    assert refused.returncode == 3
    assert "is not whole" in said
    assert "--wait" in said
    waiting = start(config, "--wait")
    assert waiting.stdout is not None
    first = waiting.stdout.readline()
    assert "model-00003-of-00003.safetensors" in first
    assert " of 9.0 MB" in first
    late.write_bytes(data)
    ended(waiting)
    (copy,) = (tmp_path / "root").glob("[!.]*")
    assert contents(copy) == contents(model)


def _started(case: Case) -> int:
    return case.output().count(": started as pid")


@pytest.mark.timeout(120)
def test_servers_start_from_the_copy_and_stage_again_when_it_has_vanished(case: Case, slow: Slow) -> None:
    write_prompts(case.folder / "prompts.jsonl", 200, start=40)
    model, root = write_model(case.folder / "tiny", shards=2), case.folder / "root"
    case.write(
        model={"path": str(slow(model))},
        stage={"to": str(root)},
        engine={"args": {"slots": 4, "latency-ms": 100}},
        fleet={"servers": 1},
    )
    process = case.start()
    case.until_done(20, process)
    (copy,) = root.glob("[!.]*")
    (server,) = case.server_pids().values()
    assert copies.find(root, copy.name) is not None
    assert server in copies.Copy(copy, copies.find(root, copy.name).manifest).users  # type: ignore[union-attr]
    shutil.rmtree(root)
    bynumber.signal_all([server], signal.SIGKILL)
    assert case.wait(process) == 0, case.output()
    assert f"{copy} is gone: staging the model again" in case.output()
    assert case.output().count("verified (fast)") == 2
    assert contents(copy) == contents(model)
    assert_whole(case, {f"p{n}" for n in range(240)})


@pytest.mark.timeout(120)
def test_a_copy_is_not_removed_under_servers_whose_tokenmill_was_killed(
    case: Case, slow: Slow, tokenmill: Command
) -> None:
    model, root = write_model(case.folder / "tiny", shards=2), case.folder / "root"
    case.write(
        model={"path": str(slow(model))}, stage={"to": str(root)}, engine={"args": {"slots": 4, "latency-ms": 500}}
    )
    process = case.start()
    case.until_done(1, process)
    process.kill()
    process.wait()
    servers = sorted(case.server_pids().values())
    (copy,) = root.glob("[!.]*")
    assert copies.make_room(root, lambda: 0, 1, "") == []
    code, said = tokenmill("stage", case.config, "--remove", copy.name)
    assert code == 2
    assert all(f"pid {server} " in said for server in servers)
    assert tokenmill("stage", case.config, "--list")[1].count(f"in use by {', '.join(map(str, servers))}  ") == 1
    assert tokenmill("run", case.config)[0] == 0
    assert _started(case) == 2, "the servers that lived were adopted"
    assert tokenmill("stage", case.config, "--remove", copy.name) == (0, f"removed {copy}\n")
    assert not copy.exists()


@pytest.mark.timeout(120)
def test_a_run_that_is_told_to_stop_while_it_stages_ends_soon_and_goes_on_later(case: Case, slow: Slow) -> None:
    model, root = write_model(case.folder / "tiny", shards=2, size=20_000_000), case.folder / "root"
    case.write(model={"path": str(slow(model, "--latency-ms", "50"))}, stage={"to": str(root)})
    process = case.start()
    until(lambda: list(root.glob(".*.staging/*.partial")), process)
    process.send_signal(signal.SIGINT)
    assert case.wait(process, 20.0) == 130, case.output()
    assert list(root.glob("[!.]*")) == []
    assert _started(case) == 0
    assert case.run() == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(40)})


@pytest.mark.timeout(120)
def test_a_real_server_loads_a_gguf_file_from_its_copy_under_the_name_of_the_original(
    llama: Case, slow: Slow, gguf: Path, tokenmill: Command
) -> None:
    keys = write_short_prompts(llama.folder / "prompts.jsonl", 4)
    models = llama.folder / "models"
    (models / "blobs").mkdir(parents=True)
    shutil.copy(gguf, models / "blobs" / "c0ffee")
    (models / "smol.gguf").symlink_to("blobs/c0ffee")  # as in the hub's cache
    where, root = slow(models, "--latency-ms", "1") / "smol.gguf", llama.folder / "root"
    llama.write(
        model={"path": str(where), "name": ""},
        stage={"to": str(root)},
        fleet={"servers": 1, "keep_servers": "always"},
    )
    assert llama.run() == 0, llama.output()
    assert_whole(llama, keys)
    (server,) = llama.server_pids().values()
    words = Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
    (copy,) = root.glob("[!.]*")
    assert str(copy / "smol.gguf").encode() in words
    assert str(where).encode() not in words
    settings = json.loads((llama.run_path / "data" / "settings.jsonl").read_bytes().splitlines()[0])
    assert settings["content"]["model"] == "smol.gguf"
    assert tokenmill("down", llama.run_path)[0] == 0

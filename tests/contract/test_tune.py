"""`tokenmill tune` on servers whose speed a flag decides, and on real ones."""

import json
import os
import signal
import time
from typing import Any

import pytest

from tests.chaos.conftest import Command, write_short_prompts
from tests.harness import Case

NGRAM: dict[str, Any] = {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 4}
CURVE: dict[str, Any] = {"slots": 2, "latency-ms": 60, "tokens": 10, "speculation-speed": 0.2}


def test_what_is_slower_is_said_and_left_out_of_the_new_config(case: Case, tokenmill: Command) -> None:
    config = case.write(engine={"kind": "fake", "args": CURVE | NGRAM})
    new = case.folder / "new.toml"
    code, said = tokenmill("tune", config, "--minutes", "0.3", "--only", "speculation", "--write", new)
    assert code == 0, said
    assert "no speculation is faster: " in said
    assert "speculation is slower here: 0." in said
    assert "speculative-algorithm" not in new.read_text()
    assert not case.run_path.exists()
    notes = json.loads((case.run_path.with_name("case-tune") / "tune.json").read_bytes())
    assert notes["winner"] == "no speculation"
    assert tokenmill("doctor", new, "--skip", "places")[0] == 0
    code, said = tokenmill("tune", config, "--write", new)
    assert (code, "is there already" in said) == (2, True)
    code, said = tokenmill("tune", config, "--write", case.folder / "none" / "new.toml")
    assert (code, "none is no folder" in said) == (2, True)
    assert case.ended()


def test_a_server_that_dies_while_it_is_measured_is_told_at_once(case: Case, tokenmill: Command) -> None:
    """Not waited for until the time is over. The config as it is has a second life; others are held against it."""
    config = case.write(engine={"kind": "fake", "args": {"slots": 2, "exit-after": 20, "log": "x"}})
    code, said = tokenmill("tune", config, "--minutes", "10", "--only", "memory")
    assert (code, said.count("no speculation: it was killed")) == (4, 2), said
    assert "minutes" not in said.rpartition("fix:")[2]
    assert case.ended()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_interrupted_one_goes_on_and_leaves_no_server(case: Case) -> None:
    config = case.write(engine={"kind": "fake", "args": CURVE | NGRAM | {"log": "x"}})
    file = case.run_path.with_name("case-tune") / "tune.json"
    first = case.command("tune", str(config), "--minutes", "0.5")
    deadline = time.monotonic() + 40
    while not (file.exists() and json.loads(file.read_bytes())["trials"]):
        assert time.monotonic() < deadline, case.output()
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert case.wait(first) == 130
    assert case.ended()
    before = json.loads(file.read_bytes())["trials"]
    second = case.command("tune", str(config), "--minutes", "0.5", "--json")
    assert case.wait(second, 90) == 0
    assert "goes on where it was" in case.output()
    assert json.loads(file.read_bytes())["trials"][: len(before)] == before
    assert case.ended()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_ones_server_is_ended_by_the_next(case: Case) -> None:
    config = case.write(engine={"kind": "fake", "args": CURVE | NGRAM | {"latency-ms": 500}})
    killed = case.command("tune", str(config), "--minutes", "5")
    state = case.run_path.with_name("case-tune") / "state.json"
    deadline = time.monotonic() + 40
    while not (state.exists() and json.loads(state.read_bytes())["servers"]):
        assert time.monotonic() < deadline, case.output()
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert case.wait(case.command("tune", str(config), "--minutes", "0.2", "--only", "speculation"), 90) == 0
    assert case.ended()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_real_servers_speculate_and_tell_how_long_they_accept(llama: Case) -> None:
    write_short_prompts(llama.folder / llama.prompts, 20)
    model = llama.settings["model"]["path"]
    args = llama.settings["engine"]["args"] | {"spec-type": "draft-simple", "spec-draft-model": model}
    llama.write(
        engine={"kind": "llamacpp", "args": args},
        generation={"max_tokens": 24, "thinking": False},
        fleet={"start_timeout": "3m"},
    )
    words = ("tune", str(llama.config), "--minutes", "3", "--only", "speculation", "--json")
    assert llama.wait(llama.command(*words), 280) == 0, llama.output()
    notes = json.loads((llama.run_path.with_name("case-tune") / "tune.json").read_bytes())
    accepts = {trial["setup"]: trial["accept"] for trial in notes["trials"] if trial["rates"]}
    assert accepts["draft-simple"] > 1.5  # the model is its own drafter
    assert accepts.get("no speculation") is None
    assert any("speculation" in line for line in notes["verdict"])
    assert llama.ended()

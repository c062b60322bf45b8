"""A real vLLM on the CPU (tests/vllm/setup.sh): pytest -m vllm, or `make vllm`. Minutes; not in CI."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import bynumber
from tests.conftest import write_prompts
from tests.harness import Case, assert_whole
from tokenmill import events
from tokenmill.machine import group, modelfiles
from tokenmill.render import load_tokenizer

ENV = Path(__file__).parent / "env"
TIMEOUT_S = 900.0

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture
def vllm(tmp_path: Path, port: int) -> Any:
    assert (ENV / "model" / "config.json").exists(), f"first: tests/vllm/setup.sh {ENV}"
    case = Case(tmp_path, port)
    args = {"dtype": "bfloat16", "max-model-len": 2048, "max-num-seqs": 8, "enforce-eager": True}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "{index}"}
    case.settings = {
        "model": {"path": str(ENV / "model"), "name": "smollm2"},
        "engine": {"kind": "vllm", "python": str(ENV / "v/bin/python"), "args": args, "env": env},
        "fleet": {"servers": 1, "start_timeout": "10m", "backoff": "1s"},
        "generation": {"thinking": False, "max_tokens": 24},
        "gate": {"max_truncated": 1.0},
    }
    write_prompts(tmp_path / "prompts.jsonl", 16)
    yield case
    case.cleanup()


def test_token_ids_are_exact(vllm: Case) -> None:
    vllm.write()
    assert vllm.run(timeout_s=TIMEOUT_S) == 0
    assert_whole(vllm, {f"p{n}" for n in range(16)})
    tokenizer = load_tokenizer(ENV / "model")
    ends = modelfiles.end_tokens(ENV / "model")
    for record in vllm.records():
        messages = json.loads(bytes(record.messages))
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = json.loads(bytes(record.output_ids))
        assert json.loads(bytes(record.prompt_ids)) == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == record.text
        assert len(ids) == record.output_tokens
        assert (ids[-1] in ends) == (record.finish_reason == "stop")
    assert "limited by max-num-seqs" in vllm.output()


def test_a_killed_api_process_leaves_nothing_behind_and_the_run_ends_whole(vllm: Case) -> None:
    """vLLM's engine core outlives its API process and keeps the memory: the group must go before the restart."""
    vllm.write()
    process = vllm.start()
    vllm.until_done(2, process, TIMEOUT_S)
    entry = vllm.run_folder.state().servers[0]
    before = bynumber.members(entry.group)
    os.kill(entry.process.pid, signal.SIGKILL)
    assert vllm.wait(process, TIMEOUT_S) == 0
    assert_whole(vllm, {f"p{n}" for n in range(16)})
    assert len(before) >= 2
    assert bynumber.members(entry.group) == []


def test_a_stopped_engine_core_is_a_hang_though_every_page_says_200(vllm: Case) -> None:
    """/health, /v1/models and /metrics stay 200 then, with running 0: seen on a real one."""
    stall_s = 30.0
    vllm.write(fleet={"stall_timeout": f"{stall_s:.0f}s"}, generation={"thinking": False, "max_tokens": 200})
    process = vllm.start()
    vllm.until_done(2, process, TIMEOUT_S)
    (entry,) = vllm.run_folder.state().servers
    core = next(each.pid for each in group.look(entry.processes).living if b"EngineCor" in _title(each.pid))
    began = time.time()
    os.kill(core, signal.SIGSTOP)
    assert vllm.wait(process, TIMEOUT_S) == 0, vllm.output()
    told = [event for event, _ in events.read(vllm.run_folder.events) if event.level == "warn" and event.t > began]
    hang = next(event for event in told if "hangs: no answer, no token" in event.text)
    print(f"told after {hang.t - began:.1f} s")
    assert hang.t - began < stall_s + 5.0
    assert_whole(vllm, {f"p{n}" for n in range(16)})
    assert vllm.leftovers() == []


def _title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_unknown_flag_is_refused_before_anything_is_loaded(vllm: Case) -> None:
    vllm.write(engine={"args": {"max-model-lenn": 2048}})
    assert vllm.run() == 3
    assert "has no flag --max-model-lenn" in vllm.output()

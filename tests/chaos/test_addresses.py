"""Servers that are not ours, real llama.cpp at addresses: one dies, is set aside and used again; none is ever ended."""

import subprocess
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.chaos.conftest import write_short_prompts
from tests.harness import Case, assert_whole, server, wait_until
from tokenmill import events
from tokenmill.engines import llamacpp_server
from tokenmill.events import Event


def _llama(gguf: Path, port: int) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    """A llama.cpp server that somebody else runs."""
    words = ["--model", str(gguf), "--alias", "smollm2", "--port", str(port), "--ctx-size", "512"]
    return server(port, str(Path(llamacpp_server.__file__)), *words, "--parallel", "2", "--threads", "1")


@pytest.mark.timeout(180)
def test_a_server_at_an_address_may_die_and_come_back(llama: Case, gguf: Path) -> None:
    ports = (llama.port, llama.port + 1)
    keys = write_short_prompts(llama.folder / "prompts.jsonl", 60)
    llama.write(
        engine={"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{port}/v1" for port in ports]},
        model={"path": "", "name": "smollm2"},
        generation={"concurrency": 1},
    )
    with ExitStack() as servers:
        lasting, mortal = (servers.enter_context(_llama(gguf, port)) for port in ports)
        process = llama.start()
        llama.until_done(6, process)
        mortal.kill()
        mortal.wait()
        wait_until(lambda: _told(llama, "set aside"), process)
        alone_from = time.time()
        back = servers.enter_context(_llama(gguf, ports[1]))
        wait_until(lambda: len(_told(llama, "ready for ")) == 2, process)
        alone_to = _told(llama, "ready for ")[1].t
        assert llama.wait(process) == 0, llama.output()
        assert lasting.poll() is None
        assert back.poll() is None
    assert_whole(llama, keys)
    assert {record.attempt for record in llama.records()} == {1}, "a server's death was charged to a prompt"
    used = {record.server for record in llama.records() if alone_from < record.started < alone_to}
    assert used == {"0"}
    assert "1" in {record.server for record in llama.records() if record.started > alone_to}
    assert len(_told(llama, "set aside")) == 1


def _told(case: Case, what: str) -> list[Event]:
    """What happened to the mortal one."""
    mine = (event for event, _ in events.read(case.run_folder.events) if event.server == "1")
    return [event for event in mine if what in event.text]

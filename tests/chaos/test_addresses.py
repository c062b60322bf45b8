"""Servers that are not ours, at addresses: one dies or hangs, is set aside and used again; none is ever ended."""

import signal
import subprocess
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.chaos.conftest import write_short_prompts
from tests.harness import Case, assert_whole, scripted_server, server, wait_until
from tokenmill import events
from tokenmill.engines import llamacpp_server
from tokenmill.events import Event


def _llama(gguf: Path, port: int, *more: str) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    """A llama.cpp server that somebody else runs."""
    words = ["--model", str(gguf), "--alias", "smollm2", "--port", str(port), "--ctx-size", "512"]
    return server(port, str(Path(llamacpp_server.__file__)), *words, "--parallel", "2", "--threads", "1", *more)


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
        wait_until(lambda: len(_told(llama, "canary → ready")) == 2, process)
        alone_to = _told(llama, "canary → ready")[1].t
        assert llama.wait(process) == 0, llama.output()
        assert lasting.poll() is None
        assert back.poll() is None
    assert_whole(llama, keys)
    assert {record.attempt for record in llama.records()} == {1}, "a server's death was charged to a prompt"
    used = {record.server for record in llama.records() if alone_from < record.started < alone_to}
    assert used == {"0"}
    assert "1" in {record.server for record in llama.records() if record.started > alone_to}
    assert len(_told(llama, "set aside")) == 1


@pytest.mark.timeout(180)
@pytest.mark.long
def test_a_server_at_an_address_may_hang_and_go_on(llama: Case, gguf: Path) -> None:
    """A real one, stopped whole. It shows no token counters, so its answers are streamed; the other one shows them."""
    ports = (llama.port, llama.port + 1)
    keys = write_short_prompts(llama.folder / "prompts.jsonl", 200)
    llama.write(
        engine={"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{port}/v1" for port in ports]},
        model={"path": "", "name": "smollm2"},
        generation={"concurrency": 2},
        fleet={"stall_timeout": "4s"},
    )
    with ExitStack() as servers:
        servers.enter_context(_llama(gguf, ports[0], "--metrics"))
        mortal = servers.enter_context(_llama(gguf, ports[1]))
        process = llama.start()
        llama.until_done(6, process)
        mortal.send_signal(signal.SIGSTOP)
        stopped_at = time.time()
        try:
            wait_until(lambda: _told(llama, "set aside"), process)
        finally:
            mortal.send_signal(signal.SIGCONT)  # a stopped process can't be ended
        wait_until(lambda: len(_told(llama, "canary → ready")) == 2, process)
        assert llama.wait(process, 120) == 0, llama.output()
        assert mortal.poll() is None
    streamed = [event.server for event, _ in events.read(llama.run_folder.events) if "streamed" in event.text]
    assert set(streamed) == {"1"}
    print(f"set aside after {_told(llama, 'set aside')[0].t - stopped_at:.2f} s")
    assert_whole(llama, keys)
    assert {record.attempt for record in llama.records()} == {1}, "a hang was charged to a prompt"


@pytest.mark.parametrize(
    "flags",
    [pytest.param({}, id="counters", marks=pytest.mark.long), pytest.param({"no_metrics": True}, id="streamed")],
)
def test_an_engine_that_stops_behind_an_address_is_asked_again_until_it_goes_on(
    case: Case, flags: dict[str, bool]
) -> None:
    """Its pages stay 200 all the while, so only generations can tell."""
    ports = (case.port, case.port + 1)
    case.write(
        model={"name": "m"},
        engine={"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{port}" for port in ports]},
        generation={"concurrency": 2},
        fleet={"stall_timeout": "1500ms"},
    )
    with ExitStack() as servers:
        _, mortal = (
            servers.enter_context(scripted_server(port, model="m", slots=2, latency_ms=700, **flags)) for port in ports
        )
        process = case.start()
        case.until_done(4, process)
        mortal.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(_told(case, "→ canary")) == 2, process)
        assert len(_told(case, "set aside")) == 1
        mortal.send_signal(signal.SIGUSR2)
        wait_until(lambda: len(_told(case, "canary → ready")) == 2, process)
        assert case.wait(process) == 0, case.output()
        assert mortal.poll() is None
    assert_whole(case, {f"p{n}" for n in range(40)})
    assert {record.attempt for record in case.records()} == {1}
    back_at = _told(case, "canary → ready")[1].t
    assert "1" in {record.server for record in case.records() if record.started > back_at}


def _told(case: Case, what: str) -> list[Event]:
    """What happened to the mortal one."""
    mine = (event for event, _ in events.read(case.run_folder.events) if event.server == "1")
    return [event for event in mine if what in event.text]

"""A real llama.cpp maps its weights from a real mount that is slow, or away: it waits, and that is no hang.

The mount is tests/slowfs.py's; what the server does is read by its life, as in a run.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests import living
from tests.chaos.conftest import write_short_prompts
from tests.conftest import Slow
from tests.harness import Case, assert_whole
from tokenmill import events
from tokenmill.engines import llamacpp_server
from tokenmill.machine import processes

MB_S = 12
"""98 MB then take eight seconds."""


@pytest.mark.timeout(120)
def test_a_run_loads_from_a_mount_far_slower_than_its_stall_timeout(llama: Case, gguf: Path, slow: Slow) -> None:
    folder = llama.folder / "model"
    folder.mkdir()
    shutil.copy(gguf, folder / "model.gguf")
    mount = slow(folder, "--cap-mb-s", str(MB_S))
    keys = write_short_prompts(llama.folder / "prompts.jsonl", 4)
    llama.write(
        model={"path": str(mount / "model.gguf")},
        stage={"to": "off"},
        fleet={"servers": 1, "stall_timeout": "2s", "start_timeout": "60s", "restarts_per_hour": 0},
    )
    assert llama.run(timeout_s=90) == 0, llama.output()
    assert_whole(llama, keys)
    told = [event for event, _ in events.read(llama.run_folder.events, 0)]
    began = next(event.t for event in told if "started as pid" in event.text)
    loaded = next(event.t for event in told if "starting → answering" in event.text) - began
    print(f"loaded in {loaded:.1f} s")
    assert loaded > 5


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    weights = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(sum(weights[at] for at in range(0, len(weights), 4096)), flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["llama.cpp", "a reader"])
def test_a_mount_that_is_away_is_waited_for_and_a_server_that_is_stopped_is_not(
    tmp_path: Path, port: int, gguf: Path, slow: Slow, what: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(gguf, folder / "model.gguf")
    weights = slow(folder, "--cap-mb-s", "6") / "model.gguf"
    file_system = server_of(weights.parent)
    words = ["-c", READER, str(weights)]
    if what == "llama.cpp":
        words = [str(Path(llamacpp_server.__file__)), "--model", str(weights), "--port", str(port)]
    job = living.job(tmp_path, [sys.executable, *words], weights)

    async def loads() -> None:
        async with living.begun(job, port) as server:
            await server.until(lambda: re.fullmatch("waiting for the mount: [1-9] MB/s", server.doing))
            os.kill(file_system, signal.SIGSTOP)
            try:
                await server.until(lambda: server.doing == "waiting for the mount: 0 MB/s")
                server.progressed = 0
                await server.until(lambda: server.progressed >= 3)
                assert server.doing == "waiting for the mount: 0 MB/s"
            finally:
                os.kill(file_system, signal.SIGCONT)
            await server.until(lambda: re.fullmatch("waiting for the mount: [1-9] MB/s", server.doing))
            os.kill(server.entry.process.pid, signal.SIGSTOP)
            await server.until(lambda: "stopped by a signal" in server.doing)
            server.progressed = 0
            await server.until(lambda: "silent and idle for 3 s" in server.doing)
            assert server.progressed == 0
            assert server.failures == []

    asyncio.run(loads())


def server_of(mount: Path) -> int:
    """The process that serves a mount of this test."""
    return next(pid for pid in processes.pids() if os.fsencode(mount) in _words(pid) and b"tests.slowfs" in _words(pid))


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []

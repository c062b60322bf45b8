"""A disk that fills up in mid-run: nothing half-written, no new prompts, and with room again nothing is lost."""

import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.conftest import Command
from tests.conftest import write_prompts
from tests.harness import Case, answered_prompts, assert_whole, last_turn, wait_until
from tokenmill import store

SLOTS, PROMPTS = 8, 100
ROOM = 128 << 10
"""Bytes: a record takes 2 KB and is on disk at once, so that it ends in the middle of the run."""

RUN = """
import sys
from pathlib import Path
import uvloop
from tokenmill.configfile import load
from tokenmill.errors import TokenmillError
from tokenmill.run import Order, run
from tokenmill.view import View

config, patience_s = load(Path(sys.argv[1])), float(sys.argv[2])
try:
    sys.exit(uvloop.run(run(Order(config, "tokenmill run", ("output",), patience_s), View(None))))
except TokenmillError as error:
    print(f"tokenmill: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
"""What the command does, with a patience that a test can wait for; doctor would refuse so little room."""


class Disk:
    """Little room for a run folder, and a way to make more."""

    def limit(self) -> None:
        """What the child does before it becomes tokenmill."""

    def grow(self, process: "subprocess.Popen[str]") -> None:
        raise NotImplementedError


class Tmpfs(Disk):
    """A real full disk: ENOSPC for the journal, the events, the state and the servers' logs alike."""

    def __init__(self, at: Path) -> None:
        self.at = at
        at.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tokenmill-test", str(at)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())

    def grow(self, process: "subprocess.Popen[str]") -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", str(self.at)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.at)], check=True)


class FileSize(Disk):
    """Where no disk can be mounted: RLIMIT_FSIZE, so that the journal cannot grow (EFBIG)."""

    def limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))

    def grow(self, process: "subprocess.Popen[str]") -> None:
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture(params=["the best there is", pytest.param("file size limit", marks=pytest.mark.long)])
def disk(request: pytest.FixtureRequest, case: Case, capsys: pytest.CaptureFixture[str]) -> Iterator[Disk]:
    """A tmpfs where root may mount one, else a limit of file sizes; the terminal tells which of them it was."""
    made: Disk = FileSize()
    why = "asked for"
    try:
        if request.param != "file size limit":
            made, why = Tmpfs(case.folder / "runs"), "may be mounted here"
    except OSError as error:
        why = f"no tmpfs can be mounted: {error}"
    form = "a full tmpfs" if isinstance(made, Tmpfs) else "RLIMIT_FSIZE instead of a full disk"
    with capsys.disabled():
        print(f"\nfull disk: {form}: {why}")
    yield made
    case.cleanup()
    if isinstance(made, Tmpfs):
        made.close()


def _start(case: Case, disk: Disk, patience_s: float) -> tuple["subprocess.Popen[str]", Path]:
    """A run that fills its disk half-way; returns it and the servers' own notes, which lie elsewhere."""
    write_prompts(case.folder / "prompts.jsonl", PROMPTS - 40, start=40)
    log = case.folder / "requests.jsonl"
    args = {"slots": SLOTS, "latency-ms": 50, "requests": str(log)}
    case.write(engine={"args": args}, fleet={"servers": 1})
    with (case.folder / "output.txt").open("a") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(case.config), str(patience_s)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=disk.limit,
        )
    return process, log


def _assert_nothing_half_written(case: Case) -> int:
    """Every line of the journal is whole; returns their number."""
    lines = [line for path in store.journals(case.run_path / "data") for line in path.read_bytes().splitlines(True)]
    assert all(store.is_whole(line) and line.endswith(b"\n") for line in lines)
    return len(lines)


def test_a_full_disk_ends_the_run_with_what_was_stored_whole_and_counted(
    case: Case, disk: Disk, tokenmill: Command
) -> None:
    process, log = _start(case, disk, patience_s=1.0)
    wait_until(lambda: "cannot write" in case.output(), process)
    begun = len(answered_prompts(log))
    assert case.wait(process) == 6, case.output()
    told = re.search(r"([\d,]+) records are safe; ([\d,]+) answers could not be stored and are lost", case.output())
    assert told, case.output()
    safe, lost = int(told[1]), int(told[2])
    assert safe == _assert_nothing_half_written(case)
    assert 0 < lost <= 2 * SLOTS, "no new prompts after the first failure"
    assert safe + lost == len(answered_prompts(log)) <= begun + SLOTS, "what was in flight came in"
    assert "Traceback" not in case.output()
    assert case.leftovers() == []
    disk.grow(process)
    code, said = tokenmill("run", case.config, "--skip", "output")
    assert code == 0, said
    assert_whole(case, {f"p{n}" for n in range(PROMPTS)})
    assert answered_prompts(log).total() == PROMPTS + lost


def test_with_room_made_in_time_every_answer_in_flight_is_stored(case: Case, disk: Disk) -> None:
    process, log = _start(case, disk, patience_s=30)
    wait_until(lambda: "cannot write" in case.output(), process)
    time.sleep(0.5)
    assert process.poll() is None
    disk.grow(process)
    assert case.wait(process) == 6, case.output()
    assert "every answer in flight was stored in the end" in case.output()
    begun = answered_prompts(log)
    assert len(begun) < PROMPTS
    assert _assert_nothing_half_written(case) == len(begun)
    assert {last_turn(record) for record in case.records()} == set(begun)
    assert case.leftovers() == []

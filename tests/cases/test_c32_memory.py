"""C32: memory grows neither with the prompts nor with the rows done, not even behind a first row that never ends."""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import write_prompts
from tests.harness import Case
from tests.instant import MODEL, instant_server

MB = 2**20

A_PROMPT = 200
"""Bytes that one more prompt of a set may cost, at most: 300,000 stay well within the 100 MB that the case allows."""

FIRST = "Question number 0:"


class Memory(NamedTuple):
    """Bytes in memory, now and at most so far."""

    now: int
    peak: int


@pytest.mark.timeout(120)
def test_ten_times_the_prompts_take_hardly_more_memory(case: Case) -> None:
    """A part of each set is enough: what is held for every prompt of a set is held before the first is sent, and what
    is held for every row done shows between two counts of rows."""
    answer = 8_000
    with instant_server(case.port, characters=answer, held=FIRST, held_s=3600):
        early, late = _while_running(case, "small", 10_000, (1_000, 4_000))
        [large] = _while_running(case, "large", 100_000, (4_000,))
    assert late.now - early.now < 3_000 * answer / 2, "rows done are held behind the first"
    assert large.peak - late.peak < 90_000 * A_PROMPT
    assert large.peak < 200 * MB


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_row_of_a_set_thirty_times_as_large_done_with_the_same_memory(case: Case) -> None:
    peaks = []
    with instant_server(case.port, characters=300, held=FIRST, held_s=60):
        for name, prompts in (("small", 10_000), ("large", 300_000)):
            process, own = _started(case, name, prompts)
            peaks.append(_until_ended(process, own))
            process, own = _started(case, name, prompts)  # finds everything done
            peaks.append(_until_ended(process, own))
    made_small, found_small, made_large, found_large = peaks
    assert made_large - made_small < 290_000 * A_PROMPT
    assert found_large - found_small < 290_000 * A_PROMPT


Started = tuple["subprocess.Popen[str]", Case]


def _started(case: Case, name: str, prompts: int) -> Started:
    """A run of its own over so many prompts, on the server at the case's port."""
    folder = case.folder / name
    own = Case(folder, case.port)
    if not folder.exists():
        folder.mkdir()
        write_prompts(folder / own.prompts, prompts)
    engine = {"kind": "openai", "args": {}, "addresses": [f"http://127.0.0.1:{case.port}"]}
    own.write(model={"name": MODEL}, engine=engine, generation={"concurrency": 64}, gate={"cohort": 200})
    return own.start(), own


def _while_running(case: Case, name: str, prompts: int, rows: Sequence[int]) -> list[Memory]:
    """A run's memory at each count of rows done; it is ended after the last."""
    process, own = _started(case, name, prompts)
    found = []
    try:
        for count in rows:
            while (status := own.run_folder.status()) is None or status.prompts.accepted < count:
                assert process.poll() is None, own.output()
                time.sleep(0.05)
            found.append(_memory(process.pid))
    finally:
        process.kill()
        process.wait()
    return found


def _until_ended(process: "subprocess.Popen[str]", own: Case) -> int:
    """The most memory that a run had in its life."""
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, _memory(process.pid).peak)
        except (OSError, KeyError):
            continue  # it has just ended
        time.sleep(0.02)
    assert process.returncode == 0, own.output()
    return peak


def _memory(pid: int) -> Memory:
    found = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    return Memory(int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024)

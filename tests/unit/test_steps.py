"""Long steps: lines now and then in a pipe, a bar on a terminal, the step itself for a run's status."""

import os
import pty
import subprocess
import sys

from tokenmill.core.status import Step
from tokenmill.steps import Meter, Told, counted, step_words


def test_a_line_after_two_seconds_then_every_ten_with_rate_and_time_left() -> None:
    clock = [100.0]
    said: list[str] = []
    meter = Meter(said.append, "staged", total=54 * 10**9, clock=lambda: clock[0])
    for tenth in range(1, 151):
        clock[0] = 100.0 + tenth / 10
        meter.at(tenth * 10**8, "32 streams")
    assert said[0] == "staged 2.0 GB of 54.0 GB, 1.00 GB/s, 52 s to go, 32 streams"
    assert len(said) == 2
    clock[0] += 600.0
    meter.at(15 * 10**9)
    meter.at(15 * 10**9)
    assert len(said) == 3
    clock[0] += 600.0
    meter.at(15 * 10**9)
    assert said[-1] == "staged 15.0 GB of 54.0 GB, 0.0 MB/s", "what stands still has no time left"


def test_what_was_there_before_counts_for_no_rate() -> None:
    clock = [0.0]
    said: list[str] = []
    meter = Meter(said.append, "fetched", total=54 * 10**9, start=52 * 10**9, clock=lambda: clock[0])
    clock[0] = 2.0
    meter.at(52 * 10**9 + 2 * 10**8)
    assert said == ["fetched 52.2 GB of 54.0 GB, 0.10 GB/s, 18 s to go"]


def test_what_is_over_soon_says_nothing() -> None:
    said: list[str] = []
    assert list(counted(range(10_000), said.append, "read")) == list(range(10_000))
    assert said == []


def test_a_run_gets_the_step_itself_and_its_end() -> None:
    said: list[str] = []
    told = Told(said.append)
    for number in counted(range(3), told, "reading", total=3, unit="rows"):
        if number:
            assert told.step is not None
            assert (told.step.what, told.step.total, told.step.unit) == ("reading", 3, "rows")
    assert told.step is None
    assert said == []


def test_words_of_a_step() -> None:
    assert step_words(Step("read", 1_234_567, 0, "rows", 3.25)) == "read 1,234,567 rows, 3.2 rows/s"
    assert step_words(Step("read", 5, 10, "rows", 5.0, "\033[1mx")) == "read 5 of 10 rows, 5.0 rows/s, 1 s to go, x"
    assert step_words(Step("read", 5, 10, "rows")) == "read 5 of 10 rows"


PROGRAM = """
import time
from tokenmill.steps import counted, shown
with shown() as tell:
    tell("a sentence \\033[31mwithout colours")
    for number in counted(range(6), tell, "reading", total=6, unit="rows"):
        time.sleep(0.25)
    tell("the end")
"""


def test_a_terminal_shows_a_bar_and_keeps_the_sentences() -> None:
    near, far = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=far, stdout=far, stderr=far) as process:
        os.close(far)
        seen = b""
        try:
            while data := os.read(near, 65536):
                seen += data
        except OSError:
            pass  # the other end is closed
        assert process.wait(20) == 0
    os.close(near)
    text = seen.decode()
    assert "a sentence without colours" in text
    assert "of 6 rows" in text
    assert "━" in text
    assert text.rstrip().endswith("the end") or "the end" in text


def test_a_pipe_gets_the_sentences_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == "a sentence without colours\nthe end\n"
    assert done.stdout == ""

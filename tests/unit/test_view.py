"""What a terminal shows: survives its stream, says the same at 80 and 200 columns, and never loses a state."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from tests.unit.test_screen import STATUS, server
from tokenmill import streams, view
from tokenmill.core.status import PromptCounts, RunStatus, Step
from tokenmill.events import Event
from tokenmill.streams import SafeStream
from tokenmill.view import View


# -- text --------------------------------------------------------------------------------------------------------------
def test_a_run_in_one_line() -> None:
    assert view.line(STATUS) == (
        "generating: 501,290/902,087 done · 1,234 rejected, 56 failed · 14,000 tok/s · 2/3 servers ready · "
        "3 h 20 min to go · 2 starting weights 40%"
    )
    early = replace(STATUS, eta_low_s=9_000.0, eta_high_s=18_000.0)
    assert " · 2 h 30 min to 5 h 00 min to go · " in view.line(early)
    unbounded = replace(STATUS, eta_low_s=9_000.0)
    assert " · at least 2 h 30 min to go · " in view.line(unbounded)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"phase": "canary", "doing": "quiet but working: 1.0 cores"}, "0 canary (quiet but working: 1.0 cores)"),
        ({"phase": "canary", "doing": "quiet but working: 1.0 cores", "eta_s": 42.0}, "0 canary ready in 42 s"),
        ({"phase": "canary", "eta_s": 0.4}, "0 canary"),
        ({"phase": "http", "percent": 97.0, "doing": "silent and idle for 4 s"}, "0 canary http 97%"),
    ],
)
def test_a_line_says_of_a_start_what_is_known(fields: dict[str, Any], told: str) -> None:
    status = RunStatus("r", "starting", PromptCounts(), (server(0, "canary", **fields),), 0.0, None, None)
    assert view.line(status) == f"starting: 0/1 servers ready · {told}"


def test_a_long_step_is_the_line() -> None:
    step = Step("reading prompts:", 300_000, 902_087, "rows", 120_000.0)
    shown = view.line(replace(STATUS, state="preflight", step=step))
    assert shown == "preflight: reading prompts: 300,000 of 902,087 rows, 120,000 rows/s, 5 s to go"


# -- a stream that breaks ----------------------------------------------------------------------------------------------
class Broken(io.StringIO):
    """Takes some writes, then fails for good."""

    def __init__(self, takes: int, error: OSError | ValueError) -> None:
        super().__init__()
        self.takes = takes
        self.error = error

    def write(self, text: str, /) -> int:
        self.takes -= 1
        if self.takes < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "EIO"), ValueError("I/O operation on closed file")])
@pytest.mark.parametrize("takes", [0, 2])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_stream_that_breaks_is_dropped_and_the_log_goes_on(
    tmp_path: Path, error: OSError | ValueError, takes: int, terminal: bool
) -> None:
    safe = SafeStream(Broken(takes, error))
    out = Console(file=safe, force_terminal=terminal, width=80)  # type: ignore[arg-type]
    with View(tmp_path / "run.log", out) as shown:
        for number in range(4):
            shown.say(f"message {number}")
            shown.show(STATUS)
    assert safe.lost
    log = (tmp_path / "run.log").read_text()
    assert all(f"message {number}\n" in log for number in range(4))


def test_a_real_pipe_without_a_reader_is_dropped() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        safe = SafeStream(stream)
        safe.write("x" * 100_000)
        safe.flush()
        assert safe.lost
        safe.write("more")


def test_a_lost_terminal_leaves_the_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    shown = View(tmp_path / "run.log", streams.console(stream))
    shown.say("before")
    shown.detach()
    shown.say("after")
    assert ("before" in stream.getvalue(), "after" in stream.getvalue()) == (True, False)
    assert "after" in (tmp_path / "run.log").read_text()


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    View(tmp_path / "none" / "run.log", streams.console(io.StringIO())).say("text \ud835 🙂")
    View(tmp_path / "run.log", streams.console(io.StringIO())).say("text \ud835 🙂")
    assert "🙂" in (tmp_path / "run.log").read_text()


# -- events and lines --------------------------------------------------------------------------------------------------
def test_an_event_is_shown_with_its_lines_and_its_fix(tmp_path: Path) -> None:
    shown = View(tmp_path / "run.log", streams.console(io.StringIO()))
    shown.event(Event(0.0, "server", "it died", "3", "warn", "df -h", ("last words", "[more]")))
    shown.event(Event(0.0, "state", "starting → ready", "3"))
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert lines == ["server 3: it died", "    last words", "    [more]", "    fix: df -h"]


def test_a_pipe_gets_whole_lines_now_and_then() -> None:
    stream = io.StringIO()
    with View(None, streams.console(stream)) as shown:
        shown.say("word " * 100)
        for _ in range(5):
            shown.show(STATUS)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith(view.line(STATUS))


def test_without_a_terminal_servers_that_start_are_told_by_their_changes() -> None:
    stream = io.StringIO()
    starting = [
        server(0, "starting", phase="weights", percent=40.0, capacity=0),
        server(0, "starting", phase="weights", percent=50.0, capacity=0),
        server(0, "canary", phase="canary", percent=100.0, capacity=0),
        server(0, "backoff", capacity=0),
    ]
    with View(None, streams.console(stream), starting=True) as shown:
        for row in starting:
            shown.show(RunStatus("r", "starting", PromptCounts(), (row,), 0.0, None, None))
    lines = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines == [
        "server 0: starting weights 40%",
        "starting: 0/1 servers ready · 0 starting weights 40%",
        "server 0: canary",
    ]

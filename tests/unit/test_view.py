"""What a terminal shows: survives its stream, says the same at 80 and 200 columns, and never loses a state."""

import io
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from tokenmill import plain, screen, streams, view
from tokenmill.core.server import State
from tokenmill.core.status import Finding, PromptCounts, RunStatus, ServerStatus
from tokenmill.events import Event
from tokenmill.streams import SafeStream
from tokenmill.view import View


def server(index: int = 0, state: str = "ready", **fields: object) -> ServerStatus:
    base: dict[str, object] = {
        "node": "",
        "gpu": str(index),
        "port": 30000 + index,
        "pid": 1,
        "phase": "",
        "percent": 0.0,
        "in_flight": 12,
        "capacity": 16,
        "tokens_per_s": 2345.6,
        "accept_length": 3.14,
        "restarts": 0,
        "last_error": "",
    }
    return ServerStatus(index=index, state=state, **{**base, **fields})  # type: ignore[arg-type]


STATUS = RunStatus(
    run="qwen36-regen",
    state="generating",
    prompts=PromptCounts(902_087, 500_000, 1_234, 56, 400_797),
    servers=(server(0), server(1, "suspect"), server(2, "starting", phase="weights", percent=40.0, capacity=0)),
    tokens_per_s=14_000.4,
    eta_s=12_000.0,
    slots_busy=0.987,
    labels={"empty": 3, "repetition": 1_200, "aborted": 56},
)


def drawn(status: RunStatus, width: int, height: int = 24, events: tuple[Event, ...] = ()) -> str:
    """The screen's text; every line fits."""
    lines = screen.screen(status, events, width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    return "\n".join(line.plain for line in lines)


# -- text --------------------------------------------------------------------------------------------------------------
def test_a_run_in_one_line() -> None:
    assert view.line(STATUS) == (
        "generating: 501,290/902,087 done · 1,234 rejected, 56 failed · 14,000 tok/s · 2/3 servers ready · "
        "3 h 20 min to go · 2 starting weights 40%"
    )


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_says_how_far_and_how_each_server_is(width: int) -> None:
    text = " ".join(drawn(STATUS, width).split())
    for words in ("qwen36-regen", "501,290 / 902,087", "14,000 tok/s", "repetition 1,200"):
        assert words in text
    for words in ("0 (GPU 0) ready", "1 (GPU 1) suspect", "2 (GPU 2) starting weights 40%", "12/16", "2,346 ×3.14"):
        assert words in text


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_of_a_narrow_terminal_shows_every_server(width: int) -> None:
    lines = drawn(STATUS, width).splitlines()[-3:]
    assert [line.split()[:4] for line in lines] == [
        ["0", "(GPU", "0)", "ready"],
        ["1", "(GPU", "1)", "suspect"],
        ["2", "(GPU", "2)", "starting"],
    ]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_state_is_whole_however_long_the_last_problem(width: int) -> None:
    trouble = server(11, "quarantined", phase="prefill graphs", percent=84.0, last_error="out of GPU memory " * 9)
    text = drawn(RunStatus("r", "starting", PromptCounts(), (trouble,), 0.0, None, None), width)
    assert " quarantined " in text
    assert " prefill graphs 84% " in text
    assert ("out of GPU memory" in text) == (width > 100)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_state_is_whole_however_many_cards_a_server_has(width: int) -> None:
    wide = server(
        11, "quarantined", node="gpu-node-17", gpu="0,1,2,3,4,5,6,7", capacity=448, last_error="it died " * 30
    )
    text = drawn(RunStatus("r", "generating", PromptCounts(), (wide,), 0.0, None, None), width)
    assert " quarantined " in text


@pytest.mark.parametrize("width", [80, 200])
def test_a_run_that_knows_nothing_yet_is_drawn(width: int) -> None:
    empty = RunStatus("r", "preflight", PromptCounts(), (), 0.0, None, None)
    assert "preflight" in drawn(empty, width)
    assert view.line(empty) == "preflight: 0/0 servers ready"


@pytest.mark.parametrize("width", [80, 200])
def test_findings_stand_below_the_servers_a_line_each(width: int) -> None:
    findings = tuple(Finding("speculation_useless", str(n), "accept length 1.00; " * 9) for n in range(6))
    lines = drawn(replace(STATUS, findings=findings), width).splitlines()[-5:]
    assert all(line.startswith(f"server {n}: accept length 1.00") for n, line in enumerate(lines[:4]))
    assert all(len(line) <= width for line in lines)
    assert lines[4].strip() == "and 2 findings more: tokenmill status"


@pytest.mark.parametrize("state", State)
def test_every_state_is_drawn(state: State) -> None:
    assert state.value in drawn(RunStatus("r", "x", PromptCounts(), (server(0, state.value),), 0.0, None, None), 80)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"),
        (0, "0 s"),
        (42.4, "42 s"),
        (300, "5 min"),
        (12_000, "3 h 20 min"),
        (7_200, "2 h 00 min"),
        (352_800, "4 d 2 h"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float | None, words: str) -> None:
    assert plain.duration(seconds) == words


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

"""The screen: fits at every size, shows trouble first, says all of it in words, and obeys nobody's escapes."""

import random
import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tokenmill.core.efficiency import Efficiency
from tokenmill.core.server import State
from tokenmill.core.status import Finding, GateShare, PromptCounts, RunStatus, ServerStatus, Step
from tokenmill.events import Event
from tokenmill.screen import screen


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


def drawn(status: RunStatus, width: int, height: int = 24, events: Sequence[Event] = ()) -> str:
    """The screen's text; every line fits."""
    lines = screen(status, events, width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    return "\n".join(line.plain for line in lines)


GATE = (
    GateShare("rejected", 0.031, 0.2, 0.04),
    GateShare("failed", 0.001, 0.05, 0.005),
    GateShare("truncated", 0.31, 0.5, 0.38),
)
EVENTS = (
    Event(time.time(), "launch", "started as pid 4711 on port 30003, GPU 3", "3"),
    Event(time.time(), "server", "it was killed by SIGKILL; started again in 5 s", "3", "warn", "dmesg -T"),
)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_screen_says_how_far_how_fast_and_how_good(width: int, height: int) -> None:
    status = replace(STATUS, gate=GATE, tokens=1_250_000, seconds=100.0, eta_low_s=9_000.0, eta_high_s=18_000.0)
    status = replace(status, efficiency=Efficiency(0.942, 0.98, missing={"client": 0.03, "restarts": 0.028}))
    text = drawn(status, width, height, EVENTS)
    for words in (
        "qwen36-regen  generating",
        "55.6%  501,290 of 902,087 prompts done",
        "2 h 30 min to 5 h 00 min to go",
        "14,000 tok/s now, 12,500 mean",
        "slots 99% busy",
        "94.2% of the servers' peak, now 98% · missing: tokenmill itself 3.0%",
        "rejected 3.1% of 20% allowed",
        "failed 0.1% of 5%",
        "cut off 31.0% of 50% (worst cohort 38.0%)",
        "500,000 accepted, 1,234 rejected, 56 failed · repetition 1,200",
        "server 3: started as pid 4711",
        "server 3: it was killed by SIGKILL; started again in 5 s",
        "fix: dmesg -T",
    ):
        assert words in text
    assert "██████████████" in text, "a bar without colours"


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("count", [1, 8])
def test_every_server_has_a_row_where_there_is_room(width: int, count: int) -> None:
    text = drawn(replace(STATUS, gate=GATE, servers=tuple(map(server, range(count)))), width, 24, EVENTS * 9)
    rows = [line.split()[:4] for line in text.splitlines() if " GPU " in line and "ready" in line]
    assert rows == [[str(n), "GPU", str(n), "ready"] for n in range(count)]
    assert "last events" in text


def test_of_sixteen_servers_trouble_is_shown_first_and_the_rest_is_summed_up() -> None:
    servers = [server(n) for n in range(16)]
    servers[13] = server(13, "backoff", capacity=0, last_error="out of GPU memory", restarts=2)
    servers[9] = server(9, "failed", capacity=0, last_error="no such flag: --mem")
    servers[4] = server(4, "starting", capacity=0, phase="weights", percent=40.0, eta_s=120.0)
    text = drawn(replace(STATUS, gate=GATE, servers=tuple(servers)), 80, 24, EVENTS * 9)
    lines = text.splitlines()
    rows = [line.split()[0] for line in lines if " GPU " in line and not line.startswith(" ") and ":" not in line]
    assert rows[:3] == ["9", "13", "4"]
    assert "    no such flag: --mem" in lines
    assert "    out of GPU memory" in lines
    assert "██░░░░ weights 40%, ready in 2 min" in text
    (rest,) = [line for line in lines if line.startswith("and ")]
    left = 13 - (len(rows) - 3)
    assert rest.startswith(f"and {left} ready; {12 * left}/{16 * left} in flight")
    assert rest.endswith("(13/16 ready)")
    assert len(lines) <= 24
    assert lines[-1].strip() == "fix: dmesg -T", "the last event is there"


def test_a_wide_screen_also_has_what_a_server_got_over() -> None:
    well = server(0, restarts=1, last_problem="no answer and no token for 90 s")
    status = replace(STATUS, servers=(well,))
    assert "no answer and no token for 90 s" in drawn(status, 200)
    assert "no answer" not in drawn(status, 80)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_state_is_whole_however_long_the_last_problem(width: int) -> None:
    trouble = server(
        11, "quarantined", phase="prefill graphs", percent=84.0, capacity=0, last_error="out of memory " * 9
    )
    text = drawn(RunStatus("r", "starting", PromptCounts(), (trouble,), 0.0, None, None), width)
    assert "  quarantined  " in text
    assert "prefill graphs 84%" in text
    assert "out of memory out of memory" in text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_state_is_whole_however_many_cards_a_server_has(width: int) -> None:
    wide = server(
        11, "quarantined", node="gpu-node-17", gpu="0,1,2,3,4,5,6,7", capacity=448, last_error="it died " * 30
    )
    text = drawn(RunStatus("r", "generating", PromptCounts(), (wide,), 0.0, None, None), width)
    assert "gpu-node-17/11 GPU 0-7  quarantined" in text


@pytest.mark.parametrize("width", [80, 200])
def test_a_run_that_knows_nothing_yet_is_drawn(width: int) -> None:
    assert "preflight" in drawn(RunStatus("r", "preflight", PromptCounts(), (), 0.0, None, None), width)


def test_a_long_step_has_a_bar_and_its_rate() -> None:
    step = Step("reading prompts:", 300_000, 902_087, "rows", 120_000.0)
    text = drawn(RunStatus("r", "preflight", PromptCounts(), (), 0.0, None, None, step=step), 80)
    assert "█░" in text
    assert "reading prompts: 300,000 of 902,087 rows, 120,000 rows/s, 5 s to go" in text


@pytest.mark.parametrize("width", [80, 200])
def test_findings_stand_below_the_servers_a_line_each(width: int) -> None:
    findings = tuple(Finding("speculation_useless", str(n), "accept length 1.00; " * 9) for n in range(6))
    lines = drawn(replace(STATUS, findings=findings), width).splitlines()[-4:]
    assert all(line.startswith(f"server {n}: accept length 1.00") for n, line in enumerate(lines[:3]))
    assert lines[3] == "and 3 findings more: tokenmill status"


@pytest.mark.parametrize("state", State)
def test_every_state_is_drawn(state: State) -> None:
    assert state.value in drawn(RunStatus("r", "x", PromptCounts(), (server(0, state.value),), 0.0, None, None), 80)


def test_wide_characters_and_escapes_of_others_break_no_line() -> None:
    evil = "\033[2J\033]0;title\007漢字🙂" * 12
    rows = (server(0, "backoff", capacity=0, last_error=evil), server(1, "starting", capacity=0, doing=evil))
    status = replace(STATUS, run="夜の🚀" * 20, servers=rows, message=evil, findings=(Finding("x", "1", evil),))
    for width, height in ((80, 24), (200, 50), (41, 13)):
        text = drawn(status, width, height, [Event(0.0, "server", evil, "0", "warn", evil)])
        assert "\033" not in text
        assert "\007" not in text
        assert "漢字🙂" in text


def test_whatever_a_run_is_like_it_fits_every_terminal() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    words = ["", "it died", "漢字🙂 " * 20, "out of memory " * 20, "\033[31m\n"]
    for _ in range(400):
        servers = tuple(
            server(
                n,
                rng.choice(list(State)).value,
                gpu=rng.choice(["none", str(n), "0,1,2,3"]),
                capacity=rng.choice([0, 16, 4096]),
                phase=rng.choice(["", "weights", "prefill graphs"]),
                percent=rng.choice([0.0, 33.3, 100.0]),
                last_error=rng.choice(words),
                last_problem=rng.choice(words),
                eta_s=rng.choice([None, 90.0]),
            )
            for n in range(rng.randrange(0, 40))
        )
        status = RunStatus(
            rng.choice(["r", "name" * 30, "夜" * 50]),
            "generating",
            rng.choice([PromptCounts(), STATUS.prompts]),
            servers,
            rng.choice([0.0, 1e7]),
            rng.choice([None, 4e5]),
            rng.choice([None, 0.5]),
            labels={f"label_{n}": n for n in range(rng.randrange(0, 15))},
            message=rng.choice(words),
            gate=rng.choice([(), GATE]),
            findings=tuple(Finding("x", "1", rng.choice(words)) for _ in range(rng.randrange(0, 7))),
        )
        events = [
            Event(1.0, "x", rng.choice(words), "", rng.choice(["info", "warn"]), rng.choice(words)) for _ in range(9)
        ]
        width, height = rng.randrange(20, 220), rng.randrange(5, 60)
        text = drawn(status, width, height, events[: rng.randrange(0, 9)])
        worst = any(state in text for state in ("failed", "quarantined"))
        assert worst or height < 24 or width < 80 or not any(s.state in ("failed", "quarantined") for s in servers)

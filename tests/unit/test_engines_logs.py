"""A log read line by line: phases that never go back, and the one cause among the lines of a death."""

import re

import pytest

from tokenmill.core.server import FailureKind
from tokenmill.engines.logs import (
    COMMON_NOTICED,
    COMMON_ROOTS,
    COMMON_WEAK,
    Cause,
    Phase,
    PhaseRow,
    PhaseTable,
    Rule,
    explain,
    meant,
)

TIERS = (COMMON_ROOTS, COMMON_WEAK, COMMON_NOTICED)
TABLE = PhaseTable(
    (
        PhaseRow("ready", "up", 99),
        PhaseRow(r"shards: +(\d+)%", "draft", 70, 80, since=60),
        PhaseRow(r"shards: +(\d+)%", "weights", 10, 60),
        PhaseRow(r"^(\.+)$", "dots", 0, 50),
        PhaseRow("begin", "start", 1),
    )
)


# -- phases ------------------------------------------------------------------------------------------------------------
def test_phases_are_told_from_the_last_to_the_first() -> None:
    assert TABLE.match("shards:  50%") == Phase("weights", 35)
    assert TABLE.match("begin, and ready") == Phase("up", 99)
    assert TABLE.match("." * 30) == Phase("dots", 15)
    assert TABLE.match("anything else") is None


def test_a_second_pass_is_another_phase_and_percent_never_falls() -> None:
    assert TABLE.match("shards:  50%", 60) == Phase("draft", 75)
    assert TABLE.match("shards:  50%", 40) == Phase("weights", 40)
    assert TABLE.match("begin", 97) == Phase("start", 97)
    assert TABLE.match("shards: 99999999999%", 0) == Phase("weights", 60)


def test_lines_lead_to_a_phase() -> None:
    assert TABLE.last(["begin", "x", "shards: 100%", "shards:   0%"]) == "draft"
    assert TABLE.last(["x"]) == ""


# -- causes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tail", "code", "kind", "cause"),
    [
        (["OSError: [Errno 98] Address already in use"], 1, FailureKind.PORT, "its HTTP port was taken"),
        (["DistNetworkError: The server socket has failed to listen"], 1, FailureKind.PORT, "an internal port"),
        (["OSError: No space left on device: '/dev/shm/x'"], 1, FailureKind.SHM, "shared memory"),
        (["OSError: [Errno 28] No space left on device"], 1, FailureKind.DISK, "a disk is full"),
        (["OSError: [Errno 5] Input/output error"], 1, FailureKind.STORAGE, "cannot be read now"),
        (["TimeoutError: [Errno 110] Connection timed out: '/m/x'"], 1, FailureKind.STORAGE, "cannot be read now"),
        (["TimeoutError: [Errno 110] Connection timed out"], 1, FailureKind.UNKNOWN, "it died"),
        (["ModuleNotFoundError: No module named 'x'"], 1, FailureKind.VERSION, "lacks a package"),
        (["PermissionError: [Errno 13] Permission denied"], 1, FailureKind.CONFIG, "may not be read"),
        (["Fatal Python error: Aborted"], None, FailureKind.CRASH, "crashed in native code"),
        (["some words"], 1, FailureKind.UNKNOWN, "it died, and its log does not say why"),
        (["some words"], 0, FailureKind.UNKNOWN, "it ended by itself"),
        (["", "  "], 1, FailureKind.UNKNOWN, "it died without a word in its log"),
        ([], None, FailureKind.UNKNOWN, "it died without a word in its log"),
    ],
)
def test_a_death_is_explained_by_its_log(tail: list[str], code: int | None, kind: FailureKind, cause: str) -> None:
    failure = explain(TIERS, tail, code)
    assert (failure.kind, failure.exit_code) == (kind, code)
    assert cause in failure.cause


@pytest.mark.parametrize(
    ("code", "kind", "cause", "fix"),
    [
        (-6, FailureKind.CRASH, "it aborted (SIGABRT)", ""),
        (134, FailureKind.CRASH, "it aborted (SIGABRT)", ""),
        (-11, FailureKind.CRASH, "it crashed in native code (segmentation fault)", ""),
        (139, FailureKind.CRASH, "it crashed in native code (segmentation fault)", ""),
        (
            -9,
            FailureKind.CRASH,
            "it was killed (SIGKILL): by the kernel, short of memory, or by somebody's kill -9",
            "dmesg",
        ),
        (
            137,
            FailureKind.CRASH,
            "it was killed (SIGKILL): by the kernel, short of memory, or by somebody's kill -9",
            "dmesg",
        ),
        (
            -7,
            FailureKind.SHM,
            "a mapped page could not be had (SIGBUS): shared memory (/dev/shm) is full",
            "df -h /dev/shm",
        ),
        (-15, FailureKind.CRASH, "it was ended from outside (SIGTERM)", ""),
        (255, FailureKind.UNKNOWN, "it died, and its log does not say why", ""),
    ],
)
def test_a_death_without_a_word_is_told_by_its_signal(code: int, kind: FailureKind, cause: str, fix: str) -> None:
    failure = explain(TIERS, ["its last line"], code)
    assert (failure.kind, failure.cause, failure.lines) == (kind, cause, ("its last line",))
    assert fix in failure.fix


def test_an_exception_that_no_rule_knows_is_quoted_the_first_of_its_chain() -> None:
    tail = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in old',
        "ValueError: of a request, an hour ago",
        "serving on",
        "Traceback (most recent call last):",
        '  File "b.py", line 1, in f',
        "KeyError: 'rope_scaling'",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        '  File "c.py", line 1, in g',
        "RuntimeError: the config is bad",
    ]
    failure = explain(TIERS, tail, 1)
    assert (failure.kind, failure.cause) == (FailureKind.CRASH, "it died of KeyError: 'rope_scaling'")
    assert failure.lines == ("KeyError: 'rope_scaling'",)


def test_the_best_tier_decides_and_within_it_the_first_line() -> None:
    alpha = Rule("alpha", FailureKind.CONFIG, "a")
    beta = Rule("beta", FailureKind.MEMORY, "b", "fix b")
    noticed = Rule("gamma", FailureKind.CHILD, "c")
    tail = ["gamma", "BETA 1", "alpha", "x", " beta 2 ", "beta 3" * 200, "beta 4"]
    failure = explain(((alpha, beta), (noticed,)), tail, 1)
    assert (failure.cause, failure.fix) == ("b", "fix b")
    assert failure.lines == ("BETA 1", "beta 2", ("beta 3" * 200)[:400])


def test_a_line_is_shown_once_whoever_repeats_it() -> None:
    said = "EngineDeadError: gone"
    tail = [f"(APIServer pid=1) ERROR 11-29 17:45:2{n} [a.py:1] {said}" for n in range(4)]
    failure = explain(((Rule("EngineDead", FailureKind.CRASH, "c"),),), tail, 1)
    assert failure.lines == (tail[0],)


def test_one_text_means_another_thing_in_another_phase() -> None:
    rule = Rule("no memory", FailureKind.MEMORY, "late", "", {"draft": Cause(FailureKind.MEMORY_WEIGHTS, "early")})
    assert explain(((rule,),), ["begin", "no memory"], 1, TABLE).cause == "late"
    assert explain(((rule,),), ["shards: 100%", "shards: 1%", "no memory"], 1, TABLE).cause == "early"


def test_a_crash_without_a_rule_shows_its_last_words() -> None:
    failure = explain((), ["1", "2", "", "3" * 1000, "4"], 1)
    assert failure.lines == ("2", "3" * 400, "4")


def test_harmless_lines_take_their_tracebacks_and_dumps_along() -> None:
    tail = [
        "(Worker pid=1) ERROR 11-29 17:45:25 [core.py:1] warning, Traceback (most recent call last):",
        '(Worker pid=1) ERROR 11-29 17:45:25 [core.py:1]   File "a.py"',
        "(Worker pid=1) ERROR 11-29 17:45:25 [core.py:1] ValueError: nothing",
        "kept",
        "[dump begins",
        "ValueError: in the dump",
        "dump ends]",
        "kept, too",
    ]
    assert meant(tail, re.compile("warning"), ("[dump", "ends]")) == ["kept", "kept, too"]

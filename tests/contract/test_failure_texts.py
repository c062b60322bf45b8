"""Texts with which engines die, and what each must be taken for: it decides whether a server is started again, and what
a person is told to do.

failures.tsv and harmless.tsv in tests/data hold one text a line; a new text is a new line there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pytest

from tests.contract import recorded
from tests.contract.samples import engine
from tokenmill.core.server import FailureKind
from tokenmill.engines import llamacpp, openai, sglang_log, vllm_log
from tokenmill.engines.logs import LINES, Cause, Rule


@dataclass(frozen=True)
class Row:
    """`cause` and `fix` are words that they hold; a fix "-" is none."""

    engine: str
    case: str
    kind: FailureKind
    exit: int
    cause: str
    fix: str
    lines: list[str]


def table() -> list[Row]:
    rows = [line.split("\t") for line in recorded.text("failures.tsv").splitlines()[1:]]
    return [Row(a, b, FailureKind(c), int(d), e, f, text.split("\\n")) for a, b, c, d, e, f, text in rows]


every_row = pytest.mark.parametrize("row", [pytest.param(row, id=f"{row.engine}: {row.case}") for row in table()])


@every_row
def test_the_text_of_a_death_tells_its_class_its_cause_and_its_fix(row: Row) -> None:
    failure = engine(row.engine).diagnose(row.lines, row.exit)
    assert failure.kind is row.kind
    assert failure.exit_code == row.exit
    assert row.cause in failure.cause
    assert row.fix in failure.fix if row.fix != "-" else failure.fix == ""
    assert 1 <= len(failure.lines) <= LINES, "a few lines of the log are shown"
    assert set(failure.lines) <= {line.strip() for line in row.lines}


NOTHING_TO_DO = {
    FailureKind.CRASH: "it is started again; a bug of the engine's has no command",
    FailureKind.UNKNOWN: "nothing is known",
}
"""Why a class may come without a fix."""


def rules(kind: str) -> Iterator[Rule | Cause]:
    """All that an engine's log can be taken for."""
    tiers = {"sglang": sglang_log.TIERS, "vllm": vllm_log.TIERS, "llamacpp": llamacpp.TIERS, "openai": openai.TIERS}
    for rule in chain.from_iterable(tiers[kind]):
        yield rule
        yield from (rule.at or {}).values()


@pytest.mark.parametrize("kind", ["sglang", "vllm", "llamacpp", "openai"])
def test_every_class_that_an_engine_can_name_has_a_fix_or_a_reason_for_none(kind: str) -> None:
    assert {rule.cause for rule in rules(kind) if not rule.fix and rule.kind not in NOTHING_TO_DO} == set()
    for rule in rules(kind):
        assert rule.cause[0].islower() or rule.cause.startswith(("SGLang", "CUDA")), "a cause is put into a sentence"
        assert not rule.cause.endswith(".")


UNTOLD = {
    "vllm": {FailureKind.CONFIG},
    "llamacpp": {FailureKind.SHM, FailureKind.VERSION, FailureKind.OCCUPIED, FailureKind.CONFIG},
}
"""Classes of rules that all engines share, and of which this one's sources hold no text."""


@pytest.mark.parametrize("kind", ["sglang", "vllm", "llamacpp"])
def test_every_class_that_an_engine_can_name_has_its_text_in_the_table(kind: str) -> None:
    told = {row.kind for row in table() if row.engine == kind}
    assert {rule.kind for rule in rules(kind)} - told <= UNTOLD.get(kind, set())


NOTICED = {
    "sglang": ["Received sigquit from a child process.", "RuntimeError: Rank 0 scheduler died during initialization"],
    "vllm": ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"],
}


@pytest.mark.parametrize("kind", NOTICED)
def test_the_first_cause_decides_not_the_words_of_those_who_noticed(kind: str) -> None:
    """A child that dies in its start leaves its own traceback first; then its parent says that a child died."""
    for row in table():
        if row.engine == kind and row.case != "sigquit alone":
            assert engine(kind).diagnose([*row.lines, *NOTICED[kind]], row.exit).kind is row.kind, row.case


def test_of_two_causes_the_first_decides() -> None:
    """An allocation fails, and the handler that tidies up meets the next trouble."""
    disk, port = "OSError: [Errno 28] No space left on device: '/x'", "OSError: [Errno 98] Address already in use"
    for first, second, kind in ((disk, port, FailureKind.DISK), (port, disk, FailureKind.PORT)):
        failure = engine("vllm").diagnose([first, "During handling of the above exception", second], 1)
        assert (failure.kind, failure.lines) == (kind, (first,))


# -- look-alikes -------------------------------------------------------------------------------------------------------
HARMLESS = [tuple(line.split("\t")) for line in recorded.text("harmless.tsv").splitlines()[1:]]


@pytest.mark.parametrize(("kind", "line"), HARMLESS)
def test_a_line_that_only_looks_like_a_cause_is_none(kind: str, line: str) -> None:
    failure = engine(kind).diagnose([line], 1)
    assert failure.kind is FailureKind.UNKNOWN
    assert failure.cause.startswith("it died")
    killed = engine(kind).diagnose([line], -9)
    assert killed.kind is FailureKind.CRASH
    assert killed.cause.startswith("it was killed (SIGKILL)")


def test_sglang_a_warnings_traceback_is_no_cause() -> None:
    """0.5.11 logs it whole where the Responses API cannot be set up, and serves on (http_server.py:378)."""
    log = [
        "[2026-11-29 17:00:00] Can not initialize OpenAIServingResponses, error: Traceback (most recent call last):",
        '  File "site-packages/sglang/srt/entrypoints/http_server.py", line 364, in lifespan',
        "    from sglang.srt.entrypoints.openai.serving_responses import (",
        "ModuleNotFoundError: No module named 'openai_harmony'",
        "[2026-11-29 17:00:05] The server is fired up and ready to roll!",
    ]
    assert engine("sglang").diagnose(log, -9).cause.startswith("it was killed (SIGKILL)")


def test_sglang_the_tracebacks_that_a_start_without_ffmpeg_prints_are_no_cause() -> None:
    log = recorded.lines("sglang-0.5.11-h200/hybrid-mtp-reference-flags.log")[:115]
    assert any("OSError: Could not load this library" in line for line in log)
    failure = engine("sglang").diagnose(log, 1)
    assert (failure.kind, failure.cause) == (FailureKind.UNKNOWN, "it died, and its log does not say why")


def test_a_cause_is_found_among_harmless_lines() -> None:
    harmless = [line for kind, line in HARMLESS if kind == "sglang"]
    cause = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    failure = engine("sglang").diagnose([*harmless, cause, *harmless], -9)
    assert (failure.kind, failure.lines) == (FailureKind.MEMORY, (cause,))

"""Texts with which engines die, and what each must be taken for: it decides whether the server is started again.

failures.tsv and harmless.tsv in tests/data hold one text a line; a new text is a new line there.
"""

import pytest

from tests.contract import recorded
from tests.contract.samples import engine
from tokenmill.core.server import FailureKind

Row = tuple[str, str, FailureKind, int, list[str]]


def table() -> list[Row]:
    """Engine, case, kind, exit code, lines."""
    rows = [line.split("\t") for line in recorded.text("failures.tsv").splitlines()[1:]]
    return [(kind, case, FailureKind(wanted), int(code), text.split("\\n")) for kind, case, wanted, code, text in rows]


@pytest.mark.parametrize(
    ("kind", "wanted", "code", "lines"),
    [pytest.param(row[0], *row[2:], id=f"{row[0]}: {row[1]}") for row in table()],
)
def test_the_text_of_a_death_decides_whether_the_server_is_started_again(
    kind: str, wanted: FailureKind, code: int, lines: list[str]
) -> None:
    failure = engine(kind).diagnose(lines, code)
    assert failure.kind is wanted
    assert failure.exit_code == code
    assert failure.lines, "no line of the log is shown"
    assert set(failure.lines) <= {line.strip() for line in lines}


NOTICED = {
    "sglang": ["Received sigquit from a child process.", "RuntimeError: Rank 0 scheduler died during initialization"],
    "vllm": ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"],
}


@pytest.mark.parametrize("kind", NOTICED)
def test_the_first_cause_decides_not_the_words_of_those_who_noticed(kind: str) -> None:
    """A child that dies in its start leaves its own traceback first; then its parent says that a child died."""
    for name, case, wanted, code, lines in table():
        if name == kind:
            assert engine(kind).diagnose([*lines, *NOTICED[kind]], code).kind is wanted, case


# -- look-alikes -------------------------------------------------------------------------------------------------------
HARMLESS = [tuple(line.split("\t")) for line in recorded.text("harmless.tsv").splitlines()[1:]]


@pytest.mark.parametrize(("kind", "line"), HARMLESS)
def test_a_line_that_only_looks_like_a_cause_is_none(kind: str, line: str) -> None:
    failure = engine(kind).diagnose([line], -9)
    assert failure.kind is FailureKind.CRASH
    assert failure.cause.startswith("it died")


def test_sglang_a_warnings_traceback_is_no_cause() -> None:
    """0.5.11 logs it whole where the Responses API cannot be set up, and serves on (http_server.py:378)."""
    log = [
        "[2026-11-29 17:00:00] Can not initialize OpenAIServingResponses, error: Traceback (most recent call last):",
        '  File "site-packages/sglang/srt/entrypoints/http_server.py", line 364, in lifespan',
        "    from sglang.srt.entrypoints.openai.serving_responses import (",
        "ModuleNotFoundError: No module named 'openai_harmony'",
        "[2026-11-29 17:00:05] The server is fired up and ready to roll!",
    ]
    assert engine("sglang").diagnose(log, -9).kind is FailureKind.CRASH


def test_a_cause_is_found_among_harmless_lines() -> None:
    harmless = [line for kind, line in HARMLESS if kind == "sglang"]
    cause = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    failure = engine("sglang").diagnose([*harmless, cause, *harmless], -9)
    assert (failure.kind, failure.lines) == (FailureKind.MEMORY, (cause,))

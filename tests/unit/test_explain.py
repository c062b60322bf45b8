"""Why the gate stopped a run: shares, examples, the likely cause, and a command that really goes on."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests import bytewise
from tests.unit.make import record
from tokenmill import explain
from tokenmill.config import Config, limits_of
from tokenmill.configfile import validate
from tokenmill.core.gate import Alarm, Gate
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.rendering import Rendering
from tokenmill.explain import Examples
from tokenmill.store import line_of

COMMAND = "tokenmill run run.toml"


def config(**over: Any) -> Config:
    return validate({"engine": {"kind": "fake"}, "prompts": {"path": "p"}, **over}, "test")


def stopped(made: Config, good: int, *bad: str) -> Alarm:
    """The first alarm of a gate that sees so many good records, then bad ones with these labels."""
    gate = Gate(limits_of(made))
    for _ in range(good):
        gate.observe(0, Verdict.ACCEPTED, ())
    return next(alarm for label in bad if (alarm := gate.observe(0, Verdict.REJECTED, (label,))))


def test_the_message_says_what_why_and_how_to_go_on() -> None:
    examples = Examples()
    for number in range(9):
        examples.add(record(f"k{number}", number, text="x" * 1000, labels=("empty_reasoning",)), ("empty_reasoning",))
    alarm = stopped(config(gate={"cohort": 10}), 3, *["empty_reasoning"] * 7)
    told = explain.explain(alarm, examples, config(), COMMAND)
    assert "of the 10 completions of cohort 0, 3 are rejected (gate.max_rejected = 0.2)" in told
    assert "labels: empty_reasoning 3 of 6" in told
    assert re.findall(r"^  (k\d): empty_reasoning: stop, 40 tokens: '", told, re.MULTILINE) == ["k0", "k1", "k2"]
    assert "likely cause: thinking is on, but the outputs hold no thought" in told
    assert max(map(len, told.splitlines())) < 500


@pytest.mark.parametrize(("cohort", "good"), [(10, 0), (10, 3), (200, 150), (200, 0)])
def test_the_command_it_ends_with_goes_on(cohort: int, good: int) -> None:
    made = config(gate={"cohort": cohort})
    alarm = stopped(made, good, *["empty"] * cohort)
    told = explain.explain(alarm, Examples(), made, COMMAND)
    (setting,) = re.findall(rf"{COMMAND} --set gate\.max_rejected=([\d.]+)$", told)
    relaxed = Gate(limits_of(config(gate={"cohort": cohort, "max_rejected": float(setting)})))
    seen = [relaxed.observe(0, Verdict.REJECTED, ("empty",)) for _ in range(alarm.bad)]
    assert seen == [None] * alarm.bad


def test_the_models_own_files_tell_the_cause(tmp_path: Path) -> None:
    examples = Examples()
    examples.add(record(text="hi", output_tokens=3), ("empty_reasoning",))
    folder = bytewise.folder(tmp_path / "model")
    made = config(model={"path": str(folder)}, gate={"cohort": 10})
    alarm = stopped(made, 0, *["empty_reasoning"] * 10)
    told = explain.explain(alarm, examples, made, COMMAND, Rendering(bytewise.PLAIN))
    assert "likely cause: thinking is on, but the outputs hold no thought: this is no reasoning model" in told


def test_examples_are_found_in_the_store_after_a_restart(tmp_path: Path) -> None:
    rows = [record("good"), record("bad", 1, labels=("empty_answer",)), record("loop", 2, repetition=60.0)]
    (tmp_path / "journal-000001.jsonl").write_bytes(b"".join(map(line_of, rows)))
    examples = Examples()
    examples.fill(tmp_path, Rules())
    assert [found.key for found in examples.of(["repetition", "empty_answer"])] == ["loop", "bad"]


@pytest.mark.parametrize(
    ("what", "counted", "aside", "key"),
    [
        ((Verdict.FAILED, "aborted"), "requests fail", (Verdict.REJECTED, "empty_reasoning"), "max_failed"),
        (
            (Verdict.REJECTED, "repetition"),
            "the model loops",
            (Verdict.ACCEPTED, "truncated_in_thinking"),
            "max_rejected",
        ),
        ((Verdict.REJECTED, "repetition"), "the model loops", (Verdict.FAILED, "bad_prompt"), "max_rejected"),
        ((Verdict.ACCEPTED, "truncated_in_answer"), "is too small", (Verdict.REJECTED, "repetition"), "max_truncated"),
    ],
)
def test_the_cause_is_of_what_stopped_it_not_of_what_is_commonest(
    what: tuple[Verdict, str], counted: str, aside: tuple[Verdict, str], key: str
) -> None:
    limits = {"cohort": 20, "max_rejected": 1.0, "max_failed": 1.0, "max_truncated": 1.0, key: 0.2}
    made, examples = config(gate=limits), Examples()
    gate = Gate(limits_of(made))
    for number, (verdict, label) in enumerate([aside] * 12 + [what] * 5):
        examples.add(record(f"{label}{number}", number, labels=(label,)), (label,))
        alarm = gate.observe(0, verdict, (label,))
    assert alarm is not None
    told = explain.explain(alarm, examples, made, COMMAND)
    assert f"likely cause: {counted}" in told or counted in told
    assert re.findall(r"^  ([a-z_]+)\d+: ", told, re.MULTILINE) == [what[1]] * 3
    assert f"{aside[1]} 12 of 17" in told, "the shares are told whole"


def test_of_labels_that_go_together_the_one_with_a_cause_is_told() -> None:
    made = config(gate={"cohort": 10})
    gate = Gate(limits_of(made))
    labels = ("orphan_think_tag", "repetition")
    alarm = [gate.observe(0, Verdict.REJECTED, labels) for _ in range(3)][-1]
    assert alarm is not None
    assert "likely cause: the model loops" in explain.explain(alarm, Examples(), made, COMMAND)

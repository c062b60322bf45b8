"""The reference run's first set, 87 % of whose masks summed to 6, and what `inspect` alone tells of C19, C20, C22, C23
and C24 in anybody's data; by the real command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import thinker
from tests.unit.make import jsonl

THOUGHT = "one two three four five six seven eight nine ten eleven twelve"
TEXTS = [THOUGHT, "hi", "OK.", *map(str, range(1000))]
ASK = {"role": "user", "content": "hi"}


def inspect(*words: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code and what --json prints; all else must be on stderr."""
    command = [sys.executable, "-m", "tokenmill", "inspect", "--json", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "300"})
    print(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def answer(content: str, thought: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({} if thought is None else {"reasoning_content": thought})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker.folder(tmp_path_factory.mktemp("model"), TEXTS)


# -- the reference run -------------------------------------------------------------------------------------------------
def pretokenised(number: int) -> dict[str, Any]:
    """A row of the first set: 87 in 100 train an empty block, "OK." and the end token."""
    prompt = [*range(100, 100 + number % 37), 7]
    output = [271, 248069, 271, 3793, 13, 248046] if number % 100 < 87 else [*range(number, number + 300), 248046]
    return {"input_ids": prompt + output, "loss_mask": [0] * len(prompt) + [1] * len(output)}


def test_the_reference_runs_bad_set_fails_with_the_right_sentence(tmp_path: Path) -> None:
    code, found = inspect(jsonl(tmp_path / "regen.jsonl", map(pretokenised, range(3000))))
    assert (code, found["verdict"], found["rows"]) == (5, "fail", 3000)
    assert found["reasons"][0].startswith("87% of the rows train exactly 6 tokens: an empty think block")
    assert "thinking was off" in found["reasons"][0]
    spread = found["supervised_tokens"]
    assert (spread["p1"], spread["p50"], spread["p99"], spread["histogram"]["1-7"]) == (6, 6, 301, 2610)
    assert len(found["examples"]) >= 3
    assert "248069" in found["examples"][0]["text"]


def test_it_says_so_to_people(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "regen.jsonl", map(pretokenised, range(300)))
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "inspect", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 5
    first, second, *_ = done.stdout.splitlines()
    assert first == "FAIL: 300 rows"
    assert second.strip().startswith("87% of the rows train exactly 6 tokens")
    assert done.stderr == ""


# -- C19: the switch was ignored ---------------------------------------------------------------------------------------
def talks(contents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"hi {n}"}, last]} for n, last in enumerate(contents)]


@pytest.mark.parametrize("with_model", [False, True])
def test_c19_empty_thoughts_are_seen_with_and_without_the_model(tmp_path: Path, model: Path, with_model: bool) -> None:
    rows = talks(answer(f"OK. {n}", thought=None if with_model else "") for n in range(200))
    path = jsonl(tmp_path / "set.jsonl", rows)
    code, found = inspect(path, *(("--model", model) if with_model else ()))
    assert code == 5
    assert found["labels"]["empty_reasoning"] == 200
    assert found["thoughts"] == {"empty": 200}
    assert any("have an empty thought" in reason for reason in found["reasons"])


# -- C20: a template without generation marks --------------------------------------------------------------------------
def test_c20_masks_of_zeros_are_named_with_their_cause(tmp_path: Path, model: Path) -> None:
    rows = ({"input_ids": [*range(100 + n)], "loss_mask": [0] * (100 + n)} for n in range(20))
    path = jsonl(tmp_path / "set.jsonl", rows)
    for words, cause in (((), "a mask made by"), (("--model", model), "this model's chat template has no")):
        code, found = inspect(path, *words)
        assert code == 5
        assert found["labels"] == {"empty": 20}
        assert found["reasons"][0].startswith("20 of 20 rows (100.0%) have a mask of zeros: " + cause)


def test_c20_conversations_have_a_mask_without_marks_and_the_trap_is_told(tmp_path: Path, model: Path) -> None:
    rows = talks(answer(f"{n}.", THOUGHT) for n in range(20))
    code, found = inspect(jsonl(tmp_path / "set.jsonl", rows), "--model", model)
    assert (code, found["verdict"]) == (0, "pass")
    assert found["supervised_tokens"]["p1"] == 23 + 6
    assert any("no {% generation %} marks" in note for note in found["notes"])
    marked = thinker.folder(tmp_path / "marked", TEXTS, thinker.MARKED)
    code, again = inspect(tmp_path / "set.jsonl", "--model", marked)
    assert (code, again["supervised_tokens"]) == (0, found["supervised_tokens"])
    assert not any("generation" in note for note in again["notes"])


# -- C22: the thought is dropped from history, or left out of the mask -------------------------------------------------
def test_c22_thoughts_in_earlier_turns_are_told(tmp_path: Path, model: Path) -> None:
    rows = [
        {"messages": [ASK, answer(f"{n}.", f"{THOUGHT} {n}"), ASK, answer(f"OK. {n}", f"{n} {THOUGHT}")]}
        for n in range(20)
    ]
    for words in ((), ("--model", model)):
        code, found = inspect(jsonl(tmp_path / "set.jsonl", rows), *words)
        assert (code, found["verdict"]) == (0, "warn")
        assert found["reasons"] == [
            "20 of 20 rows (100.0%) hold a thought in an earlier turn, which chat templates drop: make each answer a "
            "row of its own, of which the last turn alone is trained"
        ]
    assert found["supervised_tokens"]["p50"] == 25 + 8  # the last answer's alone


def test_c22_a_template_that_does_not_render_the_thought_fails(tmp_path: Path) -> None:
    deaf = thinker.folder(tmp_path / "deaf", TEXTS, thinker.PLAIN.replace("m.reasoning_content or ''", "''"))
    rows = talks(answer(f"{n}.", THOUGHT) for n in range(20))
    code, found = inspect(jsonl(tmp_path / "set.jsonl", rows), "--model", deaf)
    assert code == 5
    assert any("a thought that the chat template leaves out" in reason for reason in found["reasons"])


# -- C23, C24 ----------------------------------------------------------------------------------------------------------
def test_c23_rows_that_a_cut_would_empty_are_counted(tmp_path: Path) -> None:
    def row(number: int, prompt: int) -> dict[str, Any]:
        return {"input_ids": [*range(number, number + prompt + 40)], "loss_mask": [0] * prompt + [1] * 40}

    rows = [row(n, prompt) for n, prompt in enumerate((10, 2030, 2034, 2048, 4090, 9000))]
    _, found = inspect(jsonl(tmp_path / "set.jsonl", rows))
    emptied = {cut: (figures["rows"], figures["rows_emptied"]) for cut, figures in found["clipped"].items()}
    assert emptied == {"2048": (5, 4), "4096": (2, 2), "8192": (1, 1)}


def test_c24_finished_rows_without_their_end_token_fail(tmp_path: Path, model: Path) -> None:
    known = {word: number for number, word in enumerate(thinker.words(TEXTS))}
    thought = [known[word] for word in THOUGHT.split()]

    def row(number: int) -> dict[str, Any]:
        output = [*thought * 2, known["</think>"], known[str(number)], known["<|im_end|>"]]
        mask = [0, 0, *[1] * (len(output) - 1), int(number % 10 > 0)]  # padding by value took one in ten
        return {"input_ids": [known["<think>"], known["\n"], *output], "loss_mask": mask, "finish_reason": "stop"}

    code, found = inspect(jsonl(tmp_path / "set.jsonl", map(row, range(100))), "--model", model)
    assert code == 5
    assert found["reasons"][0] == "10 of 100 finished rows (10.0%) have lost their end token"

"""doctor's capacity check: what is asked for against what will run; prompts and max_tokens against the context."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import reference
from tests.conftest import write_prompts
from tokenmill.checks.base import Context, Finding
from tokenmill.checks.capacity import check_capacity
from tokenmill.config import Config
from tokenmill.doctor import CHECKS
from tokenmill.errors import PreflightError
from tokenmill.folder import RunFolder
from tokenmill.machine.gpus import Gpu


def findings(config: Config, cards: Sequence[Gpu] = reference.B200S) -> list[Finding]:
    return list(check_capacity(Context(config, RunFolder(config.folder), [], read_gpus=lambda: list(cards))))


def levels(found: list[Finding]) -> set[str]:
    return {finding.level for finding in found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "prompts.jsonl", 100)
    return tmp_path


def test_doctor_runs_it() -> None:
    assert CHECKS["capacity"] is check_capacity


def test_sixty_four_asked_for_where_sixteen_run(folder: Path) -> None:
    path = reference.model(folder)
    config = reference.config(folder, model={"path": str(path)}, generation={"concurrency": 64, "max_tokens": 4096})
    [found] = findings(config)
    assert (found.level, found.subject) == ("warn", "generation.concurrency")
    assert "64 requests" in found.message
    assert "16 will run" in found.message
    assert "max-mamba-cache-size" in found.message
    assert "engine.args.max-mamba-cache-size = " in found.fix


def test_without_any_way_to_run_more_the_fix_is_to_ask_for_less(folder: Path) -> None:
    args = {**reference.without("max-mamba-cache-size"), "max-running-requests": 10}
    [found] = findings(reference.config(folder, args=args, generation={"concurrency": 64, "max_tokens": 4096}))
    assert found.fix == "generation.concurrency = 10"


@pytest.mark.parametrize("concurrency", ["auto", 16, 4])
def test_what_runs_is_fine(folder: Path, concurrency: Any) -> None:
    found = findings(reference.config(folder, generation={"concurrency": concurrency, "max_tokens": 4096}))
    assert levels(found) == {"ok"}


def test_the_reference_config_never_fails(folder: Path) -> None:
    config = reference.config(folder, model={"path": str(reference.model(folder))}, generation={"concurrency": 64})
    assert "fail" not in levels(findings(config))


def test_a_pool_without_room_for_a_single_request_fails(folder: Path) -> None:
    [found] = findings(reference.config(folder, args={**reference.ARGS, "max-mamba-cache-size": 4}))
    assert found.level == "fail"
    assert "max-mamba-cache-size = 4" in found.message


def test_a_card_too_small_for_the_weights_is_a_doubt_not_a_failure(folder: Path) -> None:
    config = reference.config(folder, model={"path": str(reference.model(folder))}, generation={"max_tokens": 4096})
    found = findings(config, [Gpu(index, f"GPU-{index}", "L40", 48 << 30, 0) for index in range(7)])
    assert levels(found) <= {"warn", "ok"}
    assert "leave no memory" in found[0].message


# -- lengths -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("max_tokens", "level"), [(8192, "ok"), (20_000, "warn")])
def test_what_the_context_leaves_is_told_and_a_warning_where_it_is_little(
    folder: Path, max_tokens: int, level: str
) -> None:
    """The reference run asks for as many tokens as its context holds: cut by a prompt's length, that is no trouble."""
    asked = reference.config(folder, generation={"max_tokens": max_tokens})
    [found] = [finding for finding in findings(asked) if finding.subject == "generation.max_tokens"]
    assert found.level == level
    assert "100 of 100 sampled prompts" in found.message
    assert "4 of it are kept for drafts" in found.message
    assert "engine.args.context-length = " in found.fix


def test_prompts_that_do_not_fit_the_context_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "word " * (20_000 if number % 4 == 0 else 10)} for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = findings(reference.config(tmp_path, generation={"max_tokens": 1000}))
    [told] = [finding for finding in found if finding.subject == "prompts"]
    assert told.level == "warn"
    assert told.message.startswith("10 of 40 sampled prompts")


def test_the_edge_is_the_engines_own(tmp_path: Path) -> None:
    """SGLang refuses prompt + max_tokens over context − 4 with these flags (tokenizer_manager.py:840-865)."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "word"}) + "\n")
    prompt = 9  # bytes of its messages ÷ 4
    for over in (0, 1):
        config = reference.config(tmp_path, generation={"max_tokens": 8192 - 4 - prompt + over})
        assert bool([told for told in findings(config) if told.subject == "generation.max_tokens"]) == bool(over)


# -- what others say ---------------------------------------------------------------------------------------------------
def test_cards_that_cannot_be_read_are_another_checks_to_tell(folder: Path) -> None:
    def unreadable() -> list[Gpu]:
        raise PreflightError("no NVIDIA GPU can be reached")

    config = reference.config(folder, generation={"max_tokens": 4096})
    assert levels(list(check_capacity(Context(config, RunFolder(config.folder), [], read_gpus=unreadable)))) == {"ok"}


def test_a_set_that_cannot_be_read_is_another_checks_to_tell(tmp_path: Path) -> None:
    assert levels(findings(reference.config(tmp_path, generation={"max_tokens": 4096}))) == {"ok"}

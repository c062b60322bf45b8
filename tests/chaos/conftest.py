"""For the chaos tests: real llama.cpp servers (the wheel xllamacpp, SmolLM2-135M), and the command in this process."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Case
from tokenmill import cli, quickstart

SLOTS = 2
"""Of each server. Two of them fill two cores, and a canary is as wide as a server has slots."""

FAST: dict[str, Any] = {"thinking": False, "max_tokens": 3}
"""Cut off early: the machinery is what is tested, and a prompt costs a tenth of a second of one core."""


def write_short_prompts(path: Path, count: int) -> set[str]:
    """Prompts that differ in their last word only, so that the rest comes from the server's cache; returns the keys."""
    rows = ({"id": f"p{number}", "prompt": f"Say {number}"} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {f"p{number}" for number in range(count)}


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The model that `tokenmill quickstart` uses."""
    return quickstart.find_model(print)


@pytest.fixture
def llama(tmp_path: Path, port: int, gguf: Path) -> Iterator[Case]:
    """Two real servers; a test writes its prompts itself. Whatever is left behind is ended."""
    made = Case(tmp_path, port)
    made.settings = {
        "model": {"path": str(gguf), "name": "smollm2"},
        "engine": {
            "kind": "llamacpp",
            "args": {"parallel": SLOTS, "ctx-size": 256 * SLOTS, "threads": 1, "threads-batch": 1, "threads-http": 2},
        },
        "generation": FAST,
        "gate": {"max_rejected": 1.0, "max_truncated": 1.0},
    }
    yield made
    made.cleanup()


@dataclass
class Command:
    """`tokenmill`, in this process: an interpreter of its own for each call would take most of the time."""

    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def __call__(self, *words: object) -> tuple[int, str]:
        """Runs a command; returns the exit code and all that it said."""
        self.patch.setattr(sys, "argv", ["tokenmill", *map(str, words)])
        before = self.capture.readouterr().out
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = "".join(self.capture.readouterr())
        print(before, end="")
        assert "Traceback" not in said
        assert "this is a bug" not in said
        assert isinstance(left.value.code, int)
        return left.value.code, said


@dataclass
class Here:
    """`tokenmill run` on a scripted fleet, in this process."""

    case: Case
    command: Command

    def __call__(self, **overrides: Any) -> tuple[int, str]:
        """Runs a config to its end; returns the exit code and all that it said."""
        self.case.write(**overrides)
        return self.command("run", self.case.config)


@pytest.fixture
def tokenmill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture
def here(case: Case, tokenmill: Command) -> Here:
    return Here(case, tokenmill)

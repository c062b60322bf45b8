"""The config that `tokenmill init` prints: every line of it can be used, the commented ones too."""

import re
from pathlib import Path

import pytest

from tokenmill import plugins
from tokenmill.configfile import load
from tokenmill.errors import UsageError
from tokenmill.template import template

ENGINES = plugins.names("engines")
COMMENTED = {engine: re.findall(r"^# (\w+ = .*)$", template(engine), re.MULTILINE) for engine in ENGINES}


@pytest.mark.parametrize(("engine", "line"), [(engine, line) for engine in ENGINES for line in COMMENTED[engine]])
def test_every_commented_line_is_legal(tmp_path: Path, engine: str, line: str) -> None:
    name = line.split(" = ")[0]
    instead_of = {"command": "addresses", "args": "args"}.get(name, "-")
    text = re.sub(rf"^{instead_of} = .*\n", "", template(engine), flags=re.MULTILINE)
    (tmp_path / "run.toml").write_text(text.replace(f"# {line}", line), encoding="utf-8")
    load(tmp_path / "run.toml")


@pytest.mark.parametrize("engine", ENGINES)
def test_lines_fit_a_terminal(engine: str) -> None:
    lines = template(engine).splitlines()
    assert len(COMMENTED[engine]) >= 8
    assert [line for line in lines if len(line) > 125 and "speculative" not in line] == []


def test_an_unknown_engine_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no engine named 'tgi'") as caught:
        template("tgi")
    assert caught.value.fix == "one of: sglang, vllm, llamacpp, openai, fake"

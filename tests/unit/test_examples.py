"""The examples are what they claim to be: configs that load, scripts that parse, overrides that are keys."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenmill import configfile

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = sorted(EXAMPLES.glob("*.sbatch"))
SCRIPTS = [*JOBS, *sorted(EXAMPLES.glob("*.sh"))]
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))
FILES = [*SCRIPTS, *MANIFESTS]


def named(path: Path) -> str:
    return path.name


def test_every_file_is_told_in_the_readme() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.iterdir() if path.name not in text] == ["README.md"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=named)
def test_the_configs_load(path: Path) -> None:
    assert configfile.load(path).name == "regen"


@pytest.mark.parametrize("path", SCRIPTS, ids=named)
def test_the_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.read_text().startswith("#!/bin/bash\n#")


@pytest.mark.parametrize("path", MANIFESTS, ids=named)
def test_the_manifests_parse_and_their_commands_too(path: Path) -> None:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    words = [str(text) for text in strings(loaded) if "tokenmill run" in text]
    assert words
    for text in words:
        subprocess.run(["bash", "-n", "-c", text], check=True)


def strings(value: Any) -> list[str]:
    """Every text in plain data."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_config_that_is_run_is_there_and_takes_the_overrides(path: Path) -> None:
    text = path.read_text()
    config = re.search(r"(?:/config/|examples/)(\w+\.toml)", text)
    assert config is not None
    settings = [shlex.split(word)[0] for word in re.findall(r"--set (\"[^\"]*\")", text)]
    settings = [re.sub(r"\$\w+", "7", setting.replace("$of", "16")).replace("7/7", "7/16") for setting in settings]
    configfile.load(EXAMPLES / config[1], settings)


def test_a_job_is_asked_to_end_in_time_to_store_what_is_in_flight() -> None:
    for path in JOBS:
        assert re.search(r"--signal=(B:)?TERM@", path.read_text()), path.name

"""The examples are what they claim to be: configs that load, scripts that parse, overrides that are keys, and shards
that run, are killed or warned, queue again, and make the whole set once merged."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from tests.conftest import free_port
from tests.unit.make import jsonl
from tokenmill import configfile, dataset
from tokenmill.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = sorted(EXAMPLES.glob("*.sbatch"))
SCRIPTS = [*JOBS, *sorted(EXAMPLES.glob("*.sh"))]
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))
FILES = [*SCRIPTS, *MANIFESTS]
KEYS = [f"k{n}" for n in range(24)]


def named(path: Path) -> str:
    return path.name


def strings(value: Any) -> list[str]:
    """Every text in plain data."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


def bodies(path: Path) -> list[str]:
    """The shell text of a script, or of a manifest's commands."""
    if path.suffix != ".yaml":
        return [path.read_text()]
    return [text for text in strings(yaml.safe_load(path.read_text())) if "tokenmill " in text]


def test_every_file_is_told_in_the_readme() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.iterdir() if path.name not in text] == ["README.md"]


def test_the_configs_load() -> None:
    for path in sorted(EXAMPLES.glob("*.toml")):
        assert configfile.load(path).name == "regen"
        assert configfile.load(path).fleet.drain == ("auto" if path.name == "single-node.toml" else 180.0)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_commands_parse_and_what_is_to_be_changed_stands_at_the_top(path: Path) -> None:
    for text in bodies(path):
        subprocess.run(["bash", "-n", "-c", text], check=True)
        assert "set -euo pipefail" in text or text.startswith("tokenmill "), text
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("#!", "#SBATCH"))]
    top = " ".join(line for line in lines[:8] if line.startswith("#"))
    assert "Change: " in top


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_config_that_is_run_is_there_and_takes_the_overrides(path: Path) -> None:
    text = path.read_text()
    config = re.search(r"(?:/config/|examples/)(\w+\.toml)", text)
    assert config is not None
    settings = [shlex.split(word)[0] for word in re.findall(r"--set (\"[^\"]*\"|[\w.]+=\w+)", text)]
    settings = [re.sub(r"\$\w+", "7", setting.replace("$of", "16")).replace("7/7", "7/16") for setting in settings]
    configfile.load(EXAMPLES / config[1], settings)


def test_the_commands_and_flags_exist() -> None:
    """Of tokenmill's command line, as it is now."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for path in FILES:
        for text in bodies(path):
            for line in text.replace("\\\n", " ").splitlines():
                for name, rest in re.findall(r"(?<![/.\w-])tokenmill (\w+)([^;&]*)", line.partition("# ")[0]):
                    known = {flag for option in commands[name].params for flag in option.opts}
                    assert set(re.findall(r"(?<=\s)--[a-z-]+", rest)) <= known, (path.name, line)


def test_a_job_is_asked_to_end_in_time_to_store_what_is_in_flight() -> None:
    for path in JOBS:
        assert "#SBATCH --signal=B:USR1@300\n" in path.read_text(), path.name
    for path in MANIFESTS:
        if "spec:" in path.read_text():
            assert "terminationGracePeriodSeconds: 300" in path.read_text()


@pytest.mark.timeout(120)
def test_a_slurm_job_that_is_warned_ends_in_good_order_and_queues_again(tmp_path: Path) -> None:
    """The shell body as it stands but for paths and sizes."""
    warned(tmp_path, small(tmp_path))


@pytest.mark.long
@pytest.mark.timeout(180)
def test_shards_as_a_pod_and_as_a_slurm_job_are_the_whole_set_once_merged(tmp_path: Path) -> None:
    """The one that was warned is gone on with on another machine."""
    env = small(tmp_path)
    warned(tmp_path, env)
    (tmp_path / "scratch/regen-1").rename(tmp_path / "that machine's")
    assert indexed(tmp_path, env, 0).wait(60) == 0
    merge = ["bash", f"{tmp_path}/examples/merge-shards.sh", "2"]
    assert subprocess.run(merge, cwd=tmp_path, env=env).returncode == 0
    merged = list(dataset.records(tmp_path / "scratch/regen/data"))
    assert [record.key for record in merged] == KEYS
    assert len({record.text for record in merged}) == len(KEYS)


def warned(folder: Path, env: dict[str, str]) -> None:
    task = shard(folder, env, 1)
    wait_for_records(folder / "scratch/regen-1", task)
    task.send_signal(signal.SIGUSR1)
    assert task.wait(60) == 130, told(folder)
    assert (folder / "queued").read_text() == "requeue 77_1\n"


def small(folder: Path) -> dict[str, str]:
    """The examples with scripted servers, small and with paths of their own, and the environment that they run in."""
    jsonl(folder / "prompts.jsonl", [{"id": key, "prompt": f"Question {key}?"} for key in KEYS])
    out = folder / "examples"
    out.mkdir()
    (folder / "copies").mkdir()
    for path in (*SCRIPTS, EXAMPLES / "shard.toml"):
        text = path.read_text().replace("of=16", "of=2").replace("/scratch/runs", f"{folder}/scratch")
        text = text.replace("/data/out", f"{folder}/copies").replace("/data/", f"{folder}/")
        text = text.replace("=/opt/tokenmill", f"={folder}/environment")
        scripted = '[engine]\nkind = "fake"\nargs = { latency-ms = 400, slots = 2 }\n'
        few = f'[fleet]\ngpus = "none"\nservers = 1\nport = {free_port()}\n'
        text = re.sub(r"(?s)\[model\].*\[fleet\]", f"{scripted}\n{few}", text)
        (out / path.name).write_text(text)
    programs = folder / "environment/bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    program(programs / "tokenmill", f'exec {sys.executable} -m tokenmill "$@"')
    program(programs / "scontrol", f'echo "$@" >> {folder}/queued')
    return {**os.environ, "SLURM_ARRAY_JOB_ID": "77", "PATH": f"{programs}:{os.environ['PATH']}"}


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def shard(folder: Path, env: dict[str, str], number: int) -> "subprocess.Popen[bytes]":
    """A task of the Slurm array."""
    command = ["bash", str(folder / "examples/slurm-shards.sbatch")]
    with (folder / f"told-{number}").open("w") as out:
        mine = {**env, "SLURM_ARRAY_TASK_ID": str(number)}
        return subprocess.Popen(command, cwd=folder, env=mine, stdout=out, stderr=subprocess.STDOUT)


def indexed(folder: Path, env: dict[str, str], number: int) -> "subprocess.Popen[bytes]":
    """The same as a pod of the Kubernetes job."""
    job = yaml.safe_load((EXAMPLES / "kubernetes-shards.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert f"/{job['spec']['completions']}'" in container["args"][0]
    text = container["args"][0].replace("/config/", "examples/").replace("/16'", "/2'")
    mine = {**env, "JOB_COMPLETION_INDEX": str(number)}
    return subprocess.Popen([*container["command"], text], cwd=folder, env=mine)


def wait_for_records(run: Path, task: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in run.glob("data/journal-*")):
        assert task.poll() is None, told(run.parents[1])
        assert time.monotonic() < deadline, "nothing is stored"
        time.sleep(0.05)


def told(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("told-*"))

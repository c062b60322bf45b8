"""C33: a model folder that looks ready and is not: the real command names each file and what is wrong with it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.doctoring import context
from tests.harness import Case
from tokenmill.checks.model import check_model

SHARD = "model-00002-of-00002.safetensors"


def truncate(count: int) -> Callable[[Path], Any]:
    return lambda file: os.truncate(file, file.stat().st_size - count)


def make_hole(file: Path) -> None:
    size = file.stat().st_size
    head = file.read_bytes()[:8192]
    file.unlink()
    file.write_bytes(head)
    os.truncate(file, size)


def dangle(file: Path) -> None:
    file.unlink()
    file.symlink_to("../../blobs/0123")


def as_pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n")


FAULTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a shard is missing": (SHARD, Path.unlink, "is missing"),
    "cut by a byte": (SHARD, truncate(1), "its header says"),
    "cut by 4 KiB": (SHARD, truncate(4096), "its header says"),
    "a hole": (SHARD, make_hole, "has a hole"),
    "a dangling link": (SHARD, dangle, "dangling link"),
    "a pointer for weights": (SHARD, as_pointer, "git-lfs pointer"),
    "a pointer for the tokenizer": ("tokenizer.json", as_pointer, "git-lfs pointer"),
    "an unfinished part": ("abc.incomplete", Path.touch, "unfinished download"),
    "no config": ("config.json", Path.unlink, "is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_its_file_and_a_fix(tmp_path: Path, fault: str) -> None:
    folder = models.usual(tmp_path / "model")
    found = context(tmp_path, model={"path": str(folder)})
    assert [finding.level for finding in check_model(found)] == ["ok"]
    name, damage, told = FAULTS[fault]
    damage(folder / name)
    (finding,) = [one for one in check_model(found) if one.level == "fail" and one.subject == str(folder / name)]
    assert str(folder / name) in finding.message
    assert told in finding.message
    assert "download" in finding.fix


def test_the_command_names_every_broken_file_and_ends_with_3(case: Case) -> None:
    folder = models.usual(case.folder / "model", 5)
    case.write(model={"path": str(folder)}, engine={"kind": "sglang", "args": {}})
    broken = {}
    for number, fault in enumerate(("a shard is missing", "cut by a byte", "a hole", "a dangling link"), 1):
        _, damage, told = FAULTS[fault]
        shard = folder / f"model-{number:05}-of-00005.safetensors"
        damage(shard)
        broken[str(shard)] = told
    command = [sys.executable, "-m", "tokenmill", "doctor", str(case.config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer.keys()) == (3, {"findings", "levels"})
    failures = {one["subject"]: one for one in answer["findings"] if (one["check"], one["level"]) == ("model", "fail")}
    assert failures.keys() == broken.keys()
    assert all(told in failures[subject]["message"] for subject, told in broken.items())


@pytest.mark.parametrize(
    ("kind", "missing", "level"),
    [
        ("sglang", "tokenizer.json", "fail"),
        ("sglang", "chat_template.jinja", "fail"),
        ("vllm", "chat_template.jinja", "fail"),
        ("sglang", "generation_config.json", "warn"),
        ("vllm", "tokenizer_config.json", "warn"),
    ],
)
def test_a_part_that_was_not_fetched_is_named(tmp_path: Path, kind: str, missing: str, level: str) -> None:
    folder = models.usual(tmp_path / "model")
    (folder / missing).unlink()
    found = context(tmp_path, model={"path": str(folder)}, engine={"kind": kind})
    levels = [finding.level for finding in check_model(found) if finding.level != "ok"]
    assert levels == [level]


def test_a_vision_model_without_its_processor_ends_sglang_and_is_refused(tmp_path: Path) -> None:
    folder = models.usual(tmp_path / "model", vision_config={"depth": 2}, video_token_id=5)
    found = context(tmp_path, model={"path": str(folder)})
    told = {
        finding.message.split(": ")[1][:30]: finding.level for finding in check_model(found) if finding.level != "ok"
    }
    assert sorted(told.values()) == ["fail", "warn"]
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "video_preprocessor_config.json").write_text("{}")
    assert [finding.level for finding in check_model(found)] == ["ok"]

"""The doctor as a whole: the reference run on good hardware, time limits, what is shown and what stops a run."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.contract.test_flags import SOURCES
from tests.doctoring import context
from tests.reference import ARGS as REFERENCE
from tokenmill import doctor
from tokenmill.checks.base import Context, Finding
from tokenmill.doctor import CHECKS, examine, refuse, shown
from tokenmill.errors import PreflightError, UsageError
from tokenmill.machine.packages import Package

ENGINE = Package(
    "0.5.11",
    {**SOURCES["sglang-0.5.11"], "rest": '"--model-path" "--weight-version"'},
    needs={"sglang": ["torch==2.11.0"]},
    installed={"torch": "2.11.0+cu130"},
    markers={"python_version": "3.12"},
    cuda="13.0",
    prefix="/opt/venv",
    seconds=0.1,
)


@pytest.fixture(autouse=True)
def _plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "LD_PRELOAD", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def reference(tmp_path: Path, port: int, **sections: Any) -> Context:
    """The reference run: seven good cards, SGLang 0.5.11, its flags, a hybrid model with its own draft head."""
    config = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    shards = {
        f"model.safetensors-{n:05}-of-00002.safetensors": {f"model.layers.{n - 1}.w": (8, 8), f"mtp.w{n}": (8, 8)}
        for n in (1, 2)
    }
    model = models.folder(tmp_path / "model", shards, text_config=config)
    env = {"SGLANG_ENABLE_SPEC_V2": "1"}
    base: dict[str, Any] = {
        "model": {"path": str(model), "name": "Qwen3.6-27B"},
        "engine": {"kind": "sglang", "args": dict(REFERENCE), "env": env},
        "fleet": {"gpus": "all", "servers": 7, "port": port},
    }
    found = context(tmp_path, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in base})
    found.read_package = lambda *_: ENGINE
    return found


def above_ok(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.check, finding.level, finding.message) for finding in findings if finding.level != "ok"]


def test_the_reference_run_on_good_hardware_leaves_no_complaint(tmp_path: Path, port: int) -> None:
    findings = examine(reference(tmp_path, port), ("output",))  # the test's own disk may be small
    assert above_ok(findings) == []
    assert {finding.check for finding in findings} == CHECKS.keys() - {"output"}


def test_what_the_reference_run_lost_days_to_is_found(tmp_path: Path, port: int) -> None:
    """A changed torch, an unfinished download, an environment and weights on a network mount."""
    found = reference(tmp_path, port)
    found.read_package = lambda *_: Package(
        "0.5.11", ENGINE.sources, ENGINE.needs, {"torch": "2.12.0"}, prefix="/net/v"
    )
    mounts = f"40 22 0:9 / {tmp_path / 'model'} rw - fuse.mount-s3 s3 rw\n41 22 0:10 / /net rw - nfs4 n rw\n"
    found.read_mounts = lambda: f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}"
    (tmp_path / "net").mkdir()
    shard = tmp_path / "model" / "model.safetensors-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    told = above_ok(examine(found, ("output",)))
    assert {(check, level) for check, level, _ in told} == {("model", "fail"), ("places", "warn"), ("engine", "warn")}
    text = "\n".join(message for _, _, message in told)
    for word in ("torch==2.11.0, and 2.12.0 is installed", "lies on fuse.mount-s3", str(shard)):
        assert word in text


# -- time --------------------------------------------------------------------------------------------------------------
def test_a_check_that_hangs_is_named_and_hides_no_other(tmp_path: Path) -> None:
    forever = threading.Event()

    def hangs(context: Context) -> Iterator[Finding]:
        yield Finding("hangs", "warn", "", "found before it hung")
        forever.wait(30)

    def good(context: Context) -> Iterator[Finding]:
        yield Finding("good", "ok", "", "fine")

    checks: dict[str, doctor.Check] = {"hangs": hangs, "good": good, "also": hangs}
    findings = examine(context(tmp_path, engine={"kind": "fake"}), checks=checks, deadline_s=0.3)
    forever.set()
    assert [(finding.check, finding.level) for finding in findings] == [
        ("hangs", "warn"),
        ("hangs", "unknown"),
        ("good", "ok"),
        ("hangs", "warn"),
        ("also", "unknown"),
    ]
    assert "the check hangs is slow" in findings[1].message


def test_a_folder_that_does_not_answer_is_told_by_the_checks_that_wait_for_it(tmp_path: Path, port: int) -> None:
    """A read that never comes back, as on a mount whose server is gone: here of a pipe that nobody writes to."""
    found = reference(tmp_path, port)
    pipe = tmp_path / "model" / "model.safetensors.index.json"
    pipe.unlink()
    os.mkfifo(pipe)
    findings = examine(found, ("output",), deadline_s=2.0)
    os.close(os.open(pipe, os.O_RDWR))  # whoever waits may go
    slow = {finding.check for finding in findings if "is slow" in finding.message}
    assert slow == {"model", "draft", "capacity"}
    assert {finding.check for finding in findings if finding.level == "ok"} >= {"places", "engine", "gpus", "prompts"}


def test_a_check_that_took_long_is_told_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW_S", 0.0)
    (finding,) = examine(context(tmp_path, engine={"kind": "fake"}), checks={"model": lambda _: iter(())})
    assert "the check model is slow: it took" in finding.message


@pytest.mark.parametrize(
    ("error", "level"),
    [(PreflightError("no", fix="do"), "fail"), (OSError("disk"), "unknown"), (KeyError("x"), "unknown")],
)
def test_an_error_in_a_check_is_a_finding_of_it(tmp_path: Path, error: Exception, level: str) -> None:
    def breaks(context: Context) -> Iterator[Finding]:
        yield from ()
        raise error

    (finding,) = examine(context(tmp_path, engine={"kind": "fake"}), checks={"breaks": breaks})
    assert (finding.check, finding.level) == ("breaks", level)


# -- what is skipped, shown, refused -----------------------------------------------------------------------------------
def test_a_check_is_left_out_by_its_name_and_another_name_is_an_error(tmp_path: Path) -> None:
    found = context(tmp_path, engine={"kind": "fake"}, fleet={"gpus": "none"})
    assert "prompts" not in {finding.check for finding in examine(found, ("prompts",))}
    with pytest.raises(UsageError, match="there is no such check"):
        examine(found, ("prompt",))


FINDINGS = [
    Finding("a", "fail", "x", "x is broken", "mend x"),
    Finding("b", "ok", "", "fine", "nothing"),
    Finding("c", "warn", "y", "odd", "look"),
]


def test_what_stops_a_run_is_shown_last_with_its_fix() -> None:
    assert list(shown(FINDINGS)) == [
        "ok      b        fine",
        "warn    c        y: odd",
        "                 fix: look",
        "fail    a        x is broken",
        "                 fix: mend x",
    ]


def test_only_a_fail_refuses_a_run() -> None:
    refuse(FINDINGS[1:])
    with pytest.raises(PreflightError) as caught:
        refuse(FINDINGS)
    assert "a: x is broken\n      fix: mend x" in str(caught.value)
    assert "odd" not in str(caught.value)

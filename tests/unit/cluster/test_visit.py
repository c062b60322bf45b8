"""What a cluster is asked from outside a run: each machine's own answer, whatever Ray says of the others."""

from pathlib import Path
from typing import Any

import pytest

import ray
from ray import exceptions
from tokenmill import configfile
from tokenmill.cluster import visit
from tokenmill.config import Config

ERRORS: dict[str, tuple[Exception | None, str]] = {
    "ended": (None, ""),
    "away": (exceptions.ActorUnavailableError("a cable was pulled", None), "it cannot be reached"),
    "left": (exceptions.ActorDiedError(), ""),
    "full": (
        exceptions.RayTaskError(  # type: ignore[no-untyped-call]
            "dismiss", "Traceback (most recent call last):\n  File\nOSError: disk full", None
        ),
        "OSError: disk full",
    ),
    "late": (exceptions.GetTimeoutError("late"), "it has not ended in time"),
    "silent": (exceptions.RayError(), "it does not answer"),
    "last": (None, ""),
}
"""By machine: what Ray raises for it, and what is said."""


class Answers:
    """A Ray whose every call to a machine ends as ERRORS has it."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __getattr__(self, name: str) -> "Answers":
        return self  # .dismiss.remote

    def __call__(self, *words: Any) -> "Answers":
        return Answers(words[1]) if len(words) > 1 else self

    def options(self, **how: Any) -> "Answers":
        return self


def get(answer: Answers, timeout: float) -> bytes:
    error, _ = ERRORS[answer.name]
    if error is not None:
        raise error
    return b""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    data = {"name": "run", "engine": {"kind": "fake"}, "prompts": {"path": "p.jsonl"}, "fleet": {"gpus": "none"}}
    config = configfile.validate(data, "test")
    mark = f"{config.folder} "
    machine = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 1.0}}
    machines = [{**machine, "NodeName": name, "NodeID": name} for name in ERRORS]
    monkeypatch.setattr(visit, "connect", lambda *_, **__: False)
    monkeypatch.setattr(visit, "list_named_actors", lambda: [mark + name for name in ERRORS])
    monkeypatch.setattr(visit, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(ray, "get_actor", lambda title: Answers(title.removeprefix(mark)))
    monkeypatch.setattr(ray, "nodes", lambda: machines)
    monkeypatch.setattr(ray, "remote", lambda question: Answers())
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return config


def test_only_a_node_that_is_gone_counts_as_ended_and_none_hides_the_others(asked: Config) -> None:
    """`down` tells of the others that what they made is kept: while a cable is out their servers run on."""
    found = visit.dismissed(asked)
    assert found == {name: why for name, (_, why) in ERRORS.items()}


def test_a_machine_that_does_not_answer_says_why_in_a_line_whatever_ray_says(asked: Config) -> None:
    plans = visit.plans(asked)
    assert [plan.node for plan in plans] == list(ERRORS)
    told = {plan.node: plan.trouble for plan in plans}
    assert told["full"] == "OSError: disk full"
    assert told["silent"] == "it does not answer"
    assert all(len(plan.trouble.splitlines()) < 2 for plan in plans)

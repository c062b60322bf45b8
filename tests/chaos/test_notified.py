"""A run tells its end to a command: once in its whole life, and whatever that command does."""

import json
from typing import Any

import pytest

from tests.harness import Case


@pytest.mark.parametrize(("bad", "code", "event"), [(0.0, 0, "done"), (1.0, 5, "gate")])
def test_the_end_of_a_run_is_told_once(case: Case, bad: float, code: int, event: str) -> None:
    came = case.folder / "came"
    command = ["sh", "-c", f'cat >> {came}; test "$TOKENMILL_EVENT" = {event}']
    args: dict[str, Any] = {"slots": 4, "latency-ms": 20, "bad": bad}
    case.write(engine={"args": args}, notify={"command": command, "webhook": "http://127.0.0.1:9/hush-1234"})
    for _ in range(2):
        assert case.run(env={"NO_PROXY": "127.0.0.1"}) == code, case.output()
    (sent,) = [json.loads(line) for line in came.read_text().splitlines()]
    assert (sent["run"], sent["event"]) == ("case", event)
    assert "QUESTION" not in sent["text"].upper(), "no text of prompts or completions"
    assert case.output().count("could not notify") == 1, "the webhook that nobody answers"
    for path in case.run_path.rglob("*"):
        assert path.is_dir() or b"hush-1234" not in path.read_bytes(), path

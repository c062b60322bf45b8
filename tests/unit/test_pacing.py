"""How many at once through a server's lives: what is said of it, and pages that cannot be read for a moment."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmill.core.capacity import Limits
from tokenmill.core.pace import Answers
from tokenmill.engines.base import Load
from tokenmill.pacing import Pacing

OPEN = Limits(guess=32)


def sight(*, streams: bool = False, load: Load | None = None) -> Any:
    return SimpleNamespace(streams=streams, load=load, sighted=streams or load is not None)


def pacing(concurrency: int | str = "auto") -> tuple[Pacing, list[int]]:
    resized: list[int] = []
    pump = SimpleNamespace(resize=lambda lane, target: resized.append(target))
    config = SimpleNamespace(generation=SimpleNamespace(concurrency=concurrency))
    return Pacing(cast("Any", SimpleNamespace(config=config, most_in_flight=1000, pump=pump)), "0"), resized


@pytest.mark.parametrize(
    ("concurrency", "limits", "seen", "words"),
    [
        (32, OPEN, sight(), "set"),
        ("auto", Limits(running=32), sight(), "set"),
        ("auto", OPEN, sight(streams=True), "set at first, trials follow"),
        ("auto", OPEN, sight(), "set: nothing shows how many it runs. generation.concurrency = N says it"),
    ],
)
def test_what_limits_a_server_is_said(concurrency: int | str, limits: Limits, seen: Any, words: str) -> None:
    assert pacing(concurrency)[0].begin(limits, 32, "set", seen) == (32, words)


def test_a_page_that_cannot_be_read_when_a_life_begins_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters show how many run again a moment later: what was found holds, and trials go on in the new life."""
    clock = [0.0]
    monkeypatch.setattr("tokenmill.pacing.time.monotonic", lambda: clock[0])
    ours, resized = pacing()
    page, unread = Load(running=32, queued=0, tokens=1.0), Load(tokens=1.0)
    ours.begin(OPEN, 32, "set", sight(load=unread))
    lane = SimpleNamespace(held=False, in_flight=32, capacity=32, answered=Answers(), seen=0, begun=0)

    def work(seconds: float, load: Load) -> None:
        for _ in range(int(2 * seconds)):
            clock[0] += 0.5
            lane.answered = lane.answered.plus(100, 1.0)
            ours.look(cast("Any", lane), sight(load=load))

    work(20.0, unread)
    assert resized == []
    work(60.0, page)
    assert resized == [35] * len(resized) != []
    lane.answered = Answers()
    assert ours.begin(OPEN, 32, "set", sight(load=unread))[0] == 32
    lane.capacity = 32
    resized.clear()
    work(60.0, page)
    assert resized == [35] * len(resized) != []

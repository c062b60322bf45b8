"""Columns for charts, and the timeline."""

from typing import Any

from tokenmill.events import Event
from tokenmill.history import Moment, ServerMoment
from tokenmill.web.charts import columns
from tokenmill.web.timeline import Change, Timeline


def at(t: float, **fields: Any) -> Moment:
    return Moment(t, "generating", **fields)


def test_every_line_is_as_long_as_the_time() -> None:
    one, two = ServerMoment("0", "ready", 3, 4, 100.0, 2.0), ServerMoment("1", "ready", 2, 4, 300.0, 4.0)
    found = columns([at(0), at(10, servers=(one,), labels={"empty": 6}, rejected=3), at(20, servers=(one, two))])
    lines = [found.tokens_per_s, found.slots_busy, found.accept_length, found.rejected, *found.labels.values()]
    for server in found.servers.values():
        lines += [server.tokens_per_s, server.slots_busy, server.accept_length]
    assert {len(line) for line in lines} == {3}
    assert found.servers["0"].slots_busy == [None, 0.75, 0.75]
    assert found.servers["1"].tokens_per_s == [None, None, 300.0]
    assert found.accept_length == [None, 2.0, 3.5]  # by their tokens
    assert found.labels["empty"] == [None, 36.0, 0.0]  # what was taken back is no growth
    assert found.rejected == [None, 18.0, 0.0]


def test_a_gap_breaks_the_lines() -> None:
    found = columns([at(0, tokens_per_s=5.0), at(10, tokens_per_s=6.0), at(1000, tokens_per_s=7.0, rejected=5)])
    assert found.t == [0, 10, 10.1, 1000]
    assert found.tokens_per_s == [5.0, 6.0, None, 7.0]
    assert found.rejected == [None, 0.0, None, None]


def test_a_clock_that_was_set_back_draws_nothing_twice() -> None:
    assert columns([at(100), at(110), at(50), at(120)]).t == [100, 110, 120]


def test_no_moment_no_line() -> None:
    assert columns([]).t == []


def test_the_timeline_is_made_of_changes_and_gaps() -> None:
    timeline = Timeline()
    timeline.event(Event(1.0, "state", "pending → starting", "0"))
    timeline.event(Event(2.0, "server", "it said: starting → ready", "0"))
    timeline.event(Event(3.0, "state", "starting → ready", "0"))
    for t in (10.0, 20.0, 500.0):
        timeline.moment(at(t))
    assert list(timeline.servers["0"]) == [Change(1.0, "starting"), Change(3.0, "ready")]
    assert list(timeline.gaps) == [(20.0, 500.0)]

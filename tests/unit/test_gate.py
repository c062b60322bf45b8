"""The gate: a cohort's verdict as soon as it is inevitable, once, and never by what came first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.gate import Alarm, Gate, Limits
from tokenmill.core.judge import Verdict

LIMITS = Limits(cohort=10, max_rejected=0.2, max_failed=0.1, max_truncated=0.5)
GOOD, BAD, FAILED = (Verdict.ACCEPTED, ()), (Verdict.REJECTED, ("empty",)), (Verdict.FAILED, ("aborted",))
FAULTY, CUT = (Verdict.FAILED, ("bad_prompt",)), (Verdict.ACCEPTED, ("truncated_in_answer",))
Seen = tuple[Verdict, tuple[str, ...]]


def fed(gate: Gate, *seen: Seen, cohort: int = 0) -> list[Alarm]:
    return [alarm for one in seen if (alarm := gate.observe(cohort, *one)) is not None]


@pytest.mark.parametrize(
    ("kind", "what", "allowed"), [(BAD, "rejected", 2), (FAILED, "failed", 1), (CUT, "truncated", 5)]
)
def test_it_stops_when_the_verdict_is_inevitable_and_not_before(kind: Seen, what: str, allowed: int) -> None:
    gate = Gate(LIMITS)
    assert fed(gate, *[GOOD] * 2, *[kind] * allowed) == []
    (alarm,) = fed(gate, kind)
    assert (alarm.what, alarm.bad, alarm.size, alarm.ended, alarm.stops) == (what, allowed + 1, 10, allowed + 3, True)
    assert f"{allowed + 1} of 10 {what}" in str(alarm)


def test_an_alarm_is_raised_once() -> None:
    gate = Gate(LIMITS)
    assert len(fed(gate, *[BAD] * 10)) == 1
    assert gate.check(0) is None


def test_faulty_prompts_say_nothing_of_the_servers() -> None:
    gate = Gate(LIMITS)
    assert (
        fed(gate, *[FAULTY] * 5, *[(Verdict.FAILED, ("prompt_too_long",))] * 3, *[(Verdict.FAILED, ("duplicate",))] * 2)
        == []
    )
    assert fed(gate, GOOD, FAILED) == []
    assert fed(gate, FAILED)[0].what == "failed"


def test_an_alarm_names_the_labels_behind_it_the_most_frequent_first() -> None:
    gate = Gate(LIMITS)
    (alarm,) = fed(gate, BAD, (Verdict.REJECTED, ("repetition",)), (Verdict.REJECTED, ("repetition", "empty_answer")))
    assert alarm.labels == {"empty": 1, "repetition": 2, "empty_answer": 1}
    assert "labels: repetition 2, empty" in str(alarm)


def test_an_alarm_over_cut_off_answers_names_their_labels() -> None:
    (alarm,) = fed(Gate(LIMITS), *[CUT] * 6)
    assert alarm.labels == {"truncated_in_answer": 6}


def test_a_small_cohort_is_judged_by_its_own_size() -> None:
    gate = Gate(LIMITS)
    fed(gate, BAD)
    gate.expect(0, 4)
    assert gate.check(0) is not None


@pytest.mark.parametrize("stops", [True, False])
def test_later_cohorts_stop_or_warn_as_asked_and_the_first_always_stops(stops: bool) -> None:
    gate = Gate(Limits(cohort=10, later_stops=stops))
    (later,) = fed(gate, *[BAD] * 3, cohort=4)
    (first,) = fed(gate, *[BAD] * 3, cohort=0)
    assert (later.stops, first.stops) == (stops, True)


@pytest.mark.parametrize("percent", [29, 57, 58])
def test_exactly_the_allowed_share_is_allowed_and_one_more_is_not(percent: int) -> None:
    gate = Gate(Limits(cohort=100, max_rejected=percent / 100))
    assert fed(gate, *[BAD] * percent) == []
    assert len(fed(gate, BAD)) == 1


@given(seen=st.lists(st.sampled_from([GOOD, BAD, FAILED, FAULTY, CUT]), min_size=10, max_size=10))
def test_the_order_of_completion_does_not_decide(seen: list[Seen]) -> None:
    there, back = Gate(LIMITS), Gate(LIMITS)
    alarmed = bool(fed(there, *seen)), bool(fed(back, *reversed(seen)))
    counts = {kind: seen.count(kind) for kind in (BAD, FAILED, CUT)}
    assert alarmed[0] == alarmed[1] == (counts[BAD] > 2 or counts[FAILED] > 1 or counts[CUT] > 5)

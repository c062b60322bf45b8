"""Trouble from outside: when it is told from the servers' own, who is tried, when it is over."""

import pytest

from tokenmill.core import surroundings
from tokenmill.core.server import Failure, FailureKind
from tokenmill.core.surroundings import FIRST_S, HOUR_S, MOST, SPELLS, WINDOW_S, Surroundings

AWAY = Failure(FailureKind.STORAGE, "its model cannot be read: Transport endpoint is not connected")
SEVEN = range(7)


def fail(
    known: Surroundings, *indexes: int, failure: Failure = AWAY, at: float = 0.0, servers: range = SEVEN
) -> tuple[Surroundings, tuple[int, ...]]:
    """One after another; the last one's answer."""
    held: tuple[int, ...] = ()
    for index in indexes:
        known, held = surroundings.failed(known, index, failure, at, servers)
    return known, held


def test_one_cause_on_half_the_servers_is_not_theirs() -> None:
    known, held = fail(Surroundings(), 0, 1, 2)
    assert (known.cause, held) == ("", ())
    known, held = fail(known, 3, at=WINDOW_S - 1)
    assert held == (0, 1, 2, 3)
    assert known.story == f"one cause on 4 servers at once: {AWAY.cause}"
    assert fail(known, 4)[1] == (4,)


def test_two_servers_are_the_least() -> None:
    assert fail(Surroundings(), 0, servers=range(1))[1] == ()
    assert fail(Surroundings(), 0, servers=range(2))[1] == ()
    assert fail(Surroundings(), 0, 1, servers=range(2))[1] == (0, 1)


def test_one_server_that_fails_again_and_again_is_its_own_fault() -> None:
    assert fail(Surroundings(), 0, 0, 0, 0, servers=range(2))[1] == ()


def test_failures_far_apart_or_of_other_causes_have_nothing_in_common() -> None:
    known, _ = fail(Surroundings(), 0, 1, 2)
    assert fail(known, 3, at=WINDOW_S)[1] == ()
    assert fail(known, 3, failure=Failure(FailureKind.CRASH, "its scheduler crashed"))[1] == ()


def test_the_numbers_in_a_cause_do_not_tell_causes_apart() -> None:
    known, _ = fail(Surroundings(), 0, failure=Failure(FailureKind.HANG, "silent for 90 s at weights 40%"))
    assert fail(known, 1, failure=Failure(FailureKind.HANG, "silent for 90 s at weights 43%"), servers=range(2))[1]


@pytest.mark.parametrize("kind", [FailureKind.FLAG, FailureKind.PORT, FailureKind.MEMORY_GRAPHS])
def test_what_another_config_would_mend_is_no_trouble_of_outside(kind: FailureKind) -> None:
    assert fail(Surroundings(), *SEVEN, failure=Failure(kind, "no"))[1] == ()


def test_one_at_a_time_is_tried_and_each_later_than_the_one_before() -> None:
    known, _ = fail(Surroundings(), *SEVEN)
    at, tried, pauses = 0.0, list[int](), list[float]()
    for _ in range(10):
        began = at
        while True:
            at += 1.0
            known, released = surroundings.look(known, at)
            if released:
                break
        assert surroundings.look(known, at + 1e6)[1] == ()
        tried += released
        pauses.append(at - began)
        known, held = fail(known, *released, at=at)
        assert held == released
    assert tried == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert pauses == [FIRST_S, 10, 20, 40, 80, 160, *[FIRST_S * MOST] * 4]


def test_the_first_that_is_ready_again_brings_the_others_back() -> None:
    known, _ = fail(Surroundings(), *SEVEN)
    known, (first,) = surroundings.look(known, 5.0)
    known, released = surroundings.ready(known, first)
    assert (released, known.story) == ((1, 2, 3, 4, 5, 6), "")


def test_a_server_that_is_back_before_its_turn_ends_the_trouble() -> None:
    known, _ = fail(Surroundings(), 0, 1, 2, 3)
    known, released = surroundings.ready(known, 2)
    assert (released, known.story) == ((0, 1, 3), "")


def test_a_server_that_was_back_when_the_next_one_failed_has_nothing_in_common_with_it() -> None:
    known, _ = fail(Surroundings(), 0, servers=range(2))
    known, _ = surroundings.ready(known, 0)
    known, held = fail(known, 1, at=60.0, servers=range(2))
    assert (known.cause, held) == ("", ())


@pytest.mark.parametrize("tried", [False, True])
def test_a_server_whose_place_cannot_be_used_does_not_keep_the_others_waiting(tried: bool) -> None:
    known, _ = fail(Surroundings(), *SEVEN)
    if tried:
        known, released = surroundings.look(known, FIRST_S)
        assert released == (0,)
    known = surroundings.without(known, 0)
    assert surroundings.look(known, FIRST_S)[1] == (1,)


def test_a_server_that_was_never_hit_says_nothing_about_them() -> None:
    known, _ = fail(Surroundings(), 0, 1, 2, 3)
    assert surroundings.ready(known, 5) == (known, ())


def test_a_try_that_fails_of_something_else_is_that_servers_own() -> None:
    known, _ = fail(Surroundings(), *SEVEN)
    known, (first,) = surroundings.look(known, 5.0)
    known, held = fail(known, first, failure=Failure(FailureKind.CRASH, "an assertion"), at=9.0)
    assert held == ()
    assert surroundings.look(known, known.next_at + 300.0)[1] == (1,)


def test_servers_that_come_back_and_die_again_of_the_same_have_a_fault_of_their_own() -> None:
    known, at, excused = Surroundings(), 0.0, 0
    crash = Failure(FailureKind.CRASH, "its scheduler crashed")
    for _ in range(6):
        at += 60.0
        known, held = fail(known, 0, 1, failure=crash, at=at, servers=range(2))
        excused += bool(held)
        known, released = surroundings.look(known, at + 10.0)
        known, _ = surroundings.ready(known, released[0] if released else 0)
    assert excused == SPELLS
    assert fail(known, 0, 1, failure=crash, at=at + HOUR_S, servers=range(2))[1] == (0, 1)
    assert fail(known, 0, 1, failure=AWAY, at=at, servers=range(2))[1] == (0, 1), "another cause is another matter"

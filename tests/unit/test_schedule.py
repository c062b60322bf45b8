"""Which prompts come first, and which cohort each belongs to; how many servers and requests."""

from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.schedule import cohorts, spread


@given(total=st.integers(0, 100_000), wanted=st.integers(0, 300))
def test_the_first_cohort_is_spread_evenly_over_the_set(total: int, wanted: int) -> None:
    chosen = spread(total, wanted)
    assert len(chosen) == len(set(chosen)) == min(total, wanted)
    assert chosen == sorted(chosen)
    assert all(0 <= place < total for place in chosen)
    gaps = [later - earlier for earlier, later in pairwise([*chosen, total])]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_cohorts_are_filled_one_after_the_other() -> None:
    assert list(islice(cohorts({}, 2), 5)) == [1, 1, 2, 2, 3]


def test_what_was_in_flight_when_a_life_ended_fills_the_cohorts_it_left_short() -> None:
    """The longest answers are in flight the longest: a cohort of them alone would say that all are cut off."""
    assert list(islice(cohorts({0: 3, 1: 3, 2: 1, 4: 5, 5: 2}, 3), 6)) == [2, 2, 5, 6, 6, 6]

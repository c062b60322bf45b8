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
    assert list(islice(cohorts(3, 2), 5)) == [3, 3, 4, 4, 5]

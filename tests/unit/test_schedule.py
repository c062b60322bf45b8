"""Which prompts come first, and which cohort each belongs to; how many servers and requests."""

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core import capacity
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


@pytest.mark.parametrize(
    ("gpus", "each", "asked", "servers"), [(8, 1, 0, 8), (8, 3, 0, 2), (8, 1, 16, 16), (1, 2, 0, 1)]
)
def test_a_server_per_group_of_gpus_unless_asked_otherwise(gpus: int, each: int, asked: int, servers: int) -> None:
    assert capacity.servers_for(gpus, each, asked) == servers


@pytest.mark.parametrize(
    ("says", "asked", "sure", "running"),
    [
        (16, None, True, 16),
        (16, 64, True, 16),
        (16, 8, True, 8),
        (32, 64, False, 64),
        (None, 64, True, 64),
        (None, None, True, 1),
    ],
)
def test_no_more_requests_than_the_engine_surely_runs(
    says: int | None, asked: int | None, sure: bool, running: int
) -> None:
    assert capacity.running(says, asked, sure=sure) == running

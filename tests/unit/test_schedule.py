"""Which prompts come first, and which cohort each belongs to; how many servers and requests."""

from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core import capacity
from tokenmill.core.capacity import Limits
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


SAYS = Limits(running=48, why="max-running-requests", kv_tokens=90_000, good=32, good_why="the captured batch")
NOTHING = (1, "nothing is known of the server")
FITTING = "KV cache tokens ÷ tokens of a request"


@pytest.mark.parametrize(
    ("says", "asked", "tokens", "expected"),
    [
        (SAYS, None, 1_000, (32, "the captured batch")),
        (SAYS, None, 9_000, (10, FITTING)),
        (SAYS, None, 100_000, (1, FITTING)),
        (replace(SAYS, good=None), None, 1_000, (48, "max-running-requests")),
        (Limits(good=32, good_why="the captured batch"), None, 1_000, (32, "the captured batch")),
        (SAYS, 40, 9_000, (40, "generation.concurrency")),
        (SAYS, 64, 1_000, (48, "max-running-requests")),
        (Limits(), 64, 1_000, (64, "generation.concurrency")),
        (Limits(), None, 1_000, NOTHING),
        (Limits(running=0, kv_tokens=0, good=0), None, 0, NOTHING),
    ],
)
def test_no_more_requests_than_the_engine_runs_and_its_cache_holds(
    says: Limits, asked: int | None, tokens: int, expected: tuple[int, str]
) -> None:
    assert capacity.in_flight(says, asked, tokens) == expected

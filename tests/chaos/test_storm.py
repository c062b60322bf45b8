"""A few runs of the storm, with a seed that differs each time; the long form is `make chaos`."""

import random

import pytest

from tests.chaos import storm
from tests.chaos.harms import HARMS, Harm

RUNS = 4


@pytest.mark.timeout(240)
def test_a_short_storm_loses_doubles_leaves_and_misnames_nothing() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    done = storm.storm(seed, RUNS, "mixed", list(HARMS), jobs=2)
    print(storm.table(done))
    assert [(outcome.seed, outcome.harms, outcome.wrong) for outcome in done if outcome.wrong] == []


def test_a_storm_that_goes_wrong_says_so_and_how_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    harms = {**HARMS}
    try:
        HARMS["misnamed"] = Harm("misnamed", "no such words", 1.0, strike=HARMS["kill a server"].strike)
        (outcome,) = storm.storm(3, 1, "scripted", ["misnamed"], jobs=1)
    finally:
        HARMS.clear()
        HARMS.update(harms)
    assert outcome.misnamed
    assert "--runs 1 --seed 3 --engine scripted --harms misnamed" in capsys.readouterr().out

"""What `tune` decides of numbers that it was given: windows, who goes on, who wins, and the words for it."""

import random

import pytest

from tokenmill.core import trials
from tokenmill.core.trials import Answer, Standing, Trial
from tokenmill.core.variants import Setup

NONE = Setup("no speculation", "speculation", {})
EAGLE = Setup("EAGLE, 3 draft tokens", "as is", {"speculative-algorithm": "EAGLE"}, "EAGLE", as_is=True)
NGRAM = Setup("NGRAM, 4 draft tokens", "speculation", {"speculative-algorithm": "NGRAM"}, "NGRAM")


def standing(setup: Setup, *rates: float, lives: int = 2) -> Standing:
    return Standing(setup, rates, lives, 4)


def test_tokens_count_where_they_were_made_not_where_an_answer_ended() -> None:
    long = Answer(0.0, 30.0, 300)
    assert trials.windows([long], 0.0, 30.0) == pytest.approx((10, 10, 10))
    assert trials.windows([long, Answer(10.0, 20.0, 50)], 0.0, 30.0) == pytest.approx((10, 15, 10))
    assert trials.windows([long], 15.0, 45.0) == pytest.approx((10, 5, 0))  # the tail is empty
    assert trials.windows([long], 5.0, 5.0) == ()


def test_a_rate_is_told_before_all_answers_came() -> None:
    assert trials.rate_by_slot([Answer(0, 10, 100), Answer(0, 20, 200)], 4) == 40.0
    assert trials.mean_s([Answer(0, 10, 100), Answer(0, 20, 200)]) == 15.0
    assert (trials.rate_by_slot([], 4), trials.mean_s([])) == (0.0, 0.0)


def test_an_accept_length_is_of_all_steps() -> None:
    """Answers in which nothing was drafted took a step for each token."""
    assert trials.accept_length([Answer(0, 1, 60, 3.0), Answer(0, 1, 60)]) == pytest.approx(120 / 80)
    assert trials.accept_length([Answer(0, 1, 60)]) is None


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ((15, 16, 17), "speculation is slower here: 0.16 × none"),
        ((150, 160, 170), "speculation pays here: 1.60 × none"),
        ((98, 103, 101), "speculation makes no difference beyond the spread here: 1.01 × none"),
        (
            (103, 104, 105),
            "speculation makes no difference beyond the spread here: 1.04 × none",
        ),  # of one life
    ],
)
def test_whether_speculation_pays_is_said_plainly(rates: tuple[float, ...], says: str) -> None:
    lives = 1 if min(rates) > 102 and max(rates) < 106 else 2
    found = [standing(EAGLE, *rates, lives=lives), standing(NONE, 99, 100, 101, lives=lives)]
    assert says in trials.verdict(found)


def test_the_config_stays_where_nothing_is_faster_beyond_the_spread() -> None:
    found = [standing(EAGLE, 95, 100, 105), standing(NONE, 101, 104, 110)]
    assert trials.winner(found) == found[0]
    assert trials.verdict(found)[0] == "leave it as it is: the fastest, no speculation, is within the spread"
    faster = standing(NONE, 121, 124, 130)
    assert trials.winner([found[0], faster]) == faster
    assert trials.verdict([found[0], faster])[0] == "no speculation is faster: 1.25 × the config as it is"


def test_of_those_that_cannot_be_told_apart_the_plainest_wins() -> None:
    here, none, ngram = standing(EAGLE, 20, 22, 24), standing(NONE, 58, 60, 70), standing(NGRAM, 60, 63, 71)
    assert trials.winner([here, none, ngram]) == none
    assert trials.winner([here, ngram]) == ngram
    assert trials.winner([Standing(EAGLE, failure="no"), none, ngram]) == none
    more = standing(Setup("NGRAM, 4 draft tokens; slots 8", "concurrency", {}, "NGRAM"), 62, 64, 75)
    assert trials.winner([here, ngram, more]) == ngram
    said = "speculation makes no difference beyond the spread here: 1.03 × none, the best of 2: NGRAM, 4 draft tokens; "
    assert said + "as the config has it (EAGLE, 3 draft tokens) 0.35 ×" in trials.verdict([here, none, ngram])


def test_a_config_that_does_not_come_up_is_told_with_its_cause() -> None:
    found = [Standing(EAGLE, failure="out of memory"), standing(NONE, 50, 51, 52)]
    assert trials.winner(found) == found[1]
    first, *rest = trials.verdict(found)
    assert "could not be measured: out of memory" in first
    assert rest == ["speculation could not be measured: no setup with it came up"]
    assert trials.verdict([found[0]]) == ["no setup could be measured"]
    assert trials.verdict([standing(EAGLE, 9, 10, 11)])[0].startswith("leave it as it is: nothing else was measured")
    assert trials.verdict([standing(EAGLE, 9, 10, 11), standing(NONE, 5, 6, 7)])[0] == (
        "leave it as it is: nothing is faster"
    )


def test_the_hopeless_are_not_measured_again_and_the_config_is() -> None:
    others = [Setup(f"setup {n}", "speculation", {"n": n}, "EAGLE") for n in range(4)]
    found = [
        standing(EAGLE, 14, 15, 16),
        *(standing(setup, rate - 1, rate, rate + 1) for setup, rate in zip(others, (100, 99, 60, 97), strict=True)),
    ]
    assert [each.setup.name for each in trials.survivors(found)] == ["setup 0", "setup 1", "setup 3", EAGLE.name]
    assert trials.survivors([standing(EAGLE, 9, 10, 11)]) == []  # nobody to be told from
    assert trials.survivors([Standing(EAGLE, failure="no")]) == []


def test_it_ends_early_only_where_another_start_could_change_nothing() -> None:
    none = standing(NONE, 99, 100, 101, lives=1)
    assert trials.settled([standing(EAGLE, 15, 16, 17, lives=1), none])  # six times slower: plain
    assert not trials.settled([standing(EAGLE, 69, 70, 71, lives=1), none])  # apart, in one life each
    assert trials.settled([standing(EAGLE, 69, 70, 71), standing(NONE, 99, 100, 101)])
    assert not trials.settled([standing(EAGLE, 90, 98, 100), standing(NONE, 99, 100, 101)])
    assert trials.settled([none])


def test_trials_of_a_setup_come_together() -> None:
    told = [
        Trial(EAGLE.name, 1, (10.0, 11.0, 12.0), accept=2.0, width=4),
        Trial(NONE.name, 1, failure="it died", fix="mend it"),
        Trial(EAGLE.name, 2, (13.0, 14.0, 15.0), accept=3.0, width=4),
    ]
    first, second = trials.standings([EAGLE, NGRAM, NONE], told)
    assert (first.rate, first.low, first.high, first.lives, first.accept) == (12.5, 10.0, 15.0, 2, 2.5)
    assert (second.rates, second.failure, second.fix) == ((), "it died", "mend it")


def test_the_time_is_shared_out() -> None:
    assert trials.measured_s(900, 14) == pytest.approx(21.4, abs=0.1)
    assert trials.measured_s(10, 100) == trials.LEAST_S
    assert trials.measured_s(36000, 2) == trials.MOST_S
    told = [Trial(name, 1, (1.0,), seconds=seconds) for name, seconds in (("a", 30.0), ("b", 50.0), ("c", 40.0))]
    assert trials.is_affordable("a", told, 30.0)  # as long as before
    assert trials.is_affordable("d", told, 52.0)  # 1.3 times the usual
    assert not trials.is_affordable("d", told, 51.0)
    assert trials.is_affordable("d", [], 1.0)


def test_noise_alone_seldom_moves_anybody_from_their_config() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    moved = 0
    for _ in range(1000):
        setups = [EAGLE, *(Setup(f"s{n}", "speculation", {"n": n}) for n in range(4))]
        found = [standing(setup, *(rng.gauss(100, 5) for _ in range(6))) for setup in setups]
        best = trials.winner(found)
        assert best is not None
        moved += not best.setup.as_is
        assert best.setup.as_is or best.low > found[0].high
    assert moved < 30

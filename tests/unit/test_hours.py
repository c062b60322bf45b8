"""A run that changes from hour to hour is told of, one that does not is not."""

import random

from tokenmill.core.hours import HOUR_S, Change, Hours


def hours(*shares: float, tokens: tuple[int, ...] = (), answers: int = 1000, seed: int = 0) -> list[Change]:
    """All changes of a run whose hours have these shares of a label, and these mean lengths; then one hour more."""
    rng, found, made = random.Random(seed), Hours(), list[Change]()
    for hour, share in enumerate((*shares, 0.0)):
        length = tokens[min(hour, len(tokens) - 1)] if tokens else 1000
        for number in range(answers):
            labels = ("repetition",) if rng.random() < share else ()
            ended = 1e9 + (hour + number / answers) * HOUR_S
            made += found.observe(ended, labels, int(length * rng.lognormvariate(-0.5, 1)))
    return made


def test_an_hour_with_more_of_a_label_is_told_once_until_it_is_over() -> None:
    changes = hours(0.01, 0.01, 0.01, 0.06, 0.06, 0.01, 0.12)
    assert [(change.hour, change.what) for change in changes] == [(3, "repetition"), (6, "repetition")]
    assert "hour 4 since this start" in str(changes[0])
    assert "of the answers are repetition" in str(changes[0])


def test_a_label_that_goes_away_is_a_change_too() -> None:
    assert [change.hour for change in hours(0.1, 0.1, 0.1, 0.0, seed=1)] == [3]


def test_lengths_are_compared() -> None:
    changes = hours(*[0.0] * 5, tokens=(1000, 1000, 1000, 3000, 1000))
    assert [(change.hour, change.what) for change in changes] == [(3, "length")]
    assert "tokens in the mean" in str(changes[0])


def test_the_first_hour_is_not_what_the_others_are_held_against() -> None:
    assert hours(0.0, 0.2, 0.2, 0.2, tokens=(300, 1000)) == []


def test_few_answers_or_a_small_fault_say_nothing() -> None:
    assert hours(0.0, 0.0, 0.5, answers=100) == []
    assert hours(0.001, 0.001, 0.004, answers=5000) == []


def test_runs_that_do_not_change_are_never_told_of() -> None:
    """200 runs of six hours: the chance that one is told of is below one in a million."""
    assert [change for seed in range(200) for change in hours(*[0.03] * 6, answers=250, seed=seed)] == []


def test_an_hour_without_answers_is_passed_over() -> None:
    found = Hours()
    for hour in (0, 1, 5):
        for number in range(300):
            assert found.observe((hour + number / 300) * HOUR_S, (), 100) == []

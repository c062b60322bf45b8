"""Times as people say them."""

import pytest

from tokenmill.plain import duration, span


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"),
        (0, "0 s"),
        (42.4, "42 s"),
        (300, "5 min"),
        (12_000, "3 h 20 min"),
        (7_200, "2 h 00 min"),
        (352_800, "4 d 2 h"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_ranges_are_said_as_people_say_them() -> None:
    assert span(11_100, 13_800) == "3 h 05 min to 3 h 50 min"
    assert span(11_100, None) == "at least 3 h 05 min"
    assert span(11_100, 11_110) == "3 h 05 min"

"""When a start will be ready, by what the last one took."""

import pytest

from tokenmill.core import starts

LAST = (("begin", 20.0), ("weights", 30.0), ("graphs", 40.0), ("canary", 10.0))


@pytest.mark.parametrize(
    ("phase", "elapsed", "left"),
    [
        ("", 5.0, 95.0),
        ("weights", 0.0, 80.0),
        ("weights", 45.0, 50.0),
        ("canary", 4.0, 6.0),
        ("draft weights", 1, None),
    ],
)
def test_what_is_left_of_a_start(phase: str, elapsed: float, left: float | None) -> None:
    assert starts.left_s(LAST, phase, elapsed) == left


def test_without_a_last_start_nothing_is_known() -> None:
    assert starts.left_s((), "weights", 1.0) is None


def test_a_start_in_words() -> None:
    assert starts.words((*LAST[:2], ("http", 0.2), ("weights", 5.0))) == "begin 20 s, weights 35 s"

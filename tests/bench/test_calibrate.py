"""The calibration's rows: sound ones pass, loops are put where they are said to be."""

import itertools
import random

import pytest
from bench.calibrate_loops import LIMIT, PLACES, goes_round, ratio, with_loop

from bench import calibrate_loops
from tests.unit.test_judge import prose

TEXTS = [prose(1500, seed) for seed in range(8)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("period", ["phrase", "sentence"])
def test_a_loop_of_8000_characters_is_found_in_every_place(period: str, place: str) -> None:
    stream, rng = itertools.cycle(TEXTS), random.Random(1)
    found = [ratio(with_loop(period, place, 8000, stream, rng)) > LIMIT for _ in range(10)]
    assert sum(found) >= 9


def test_text_without_a_loop_is_sound() -> None:
    stream, rng = itertools.cycle(TEXTS), random.Random(1)
    rows = [calibrate_loops.piece(stream, calibrate_loops.length(rng), rng) for _ in range(20)]
    assert not any(map(goes_round, rows))
    assert max(map(ratio, rows)) < LIMIT


def test_rounds_are_seen_exactly() -> None:
    assert goes_round("It begins. " + "So it goes. " * 20)
    assert not goes_round("So it goes. " * 2)
    assert not goes_round("It begins. " + "So it goes. " * 20 + "It ends.")

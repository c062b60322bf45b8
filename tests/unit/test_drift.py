"""A server that goes bad is named soon, and a sound fleet is left alone: by a test whose chance is known."""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import count, pairwise

import pytest

from tokenmill.core.drift import CHANCE, Drift, Judged, Rejects, tail

COHORT = 200


def seeded() -> random.Random:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def played(
    rng: random.Random,
    speeds: list[float],
    answers: int,
    rejected: Callable[[int, int, int], float],
    *,
    slots: int = 16,
) -> Iterator[tuple[int, Drift | None]]:
    """A fleet at work: whichever slot is free takes the next row; the time of an answer is heavy-tailed, and one that
    is rejected is a loop, eight times as long. `rejected(server, its answers begun, row)` is the chance. Gives server
    and verdict of each answer, as they end."""
    audit = Rejects()
    rows, begun = count(), [0] * len(speeds)
    ends: list[tuple[float, int, int, Judged]] = []

    def begin(server: int, moment: float) -> None:
        row = next(rows)
        bad = rng.random() < rejected(server, begun[server], row)
        begun[server] += 1
        length = rng.paretovariate(2.0) * (8.0 if bad else 1.0)
        seconds = length / speeds[server]
        answer = Judged(row, row // COHORT, round(length * 500), moment, seconds, bad)
        heapq.heappush(ends, (moment + seconds, row, server, answer))

    for server in range(len(speeds)):
        audit.begin(server)
        for _ in range(slots):
            begin(server, 0.0)
    for _ in range(answers):
        moment, _, server, answer = heapq.heappop(ends)
        yield server, audit.observe(server, answer)
        begin(server, moment)


def answer(row: int, cohort: int = 0, *, bad: bool = False) -> Judged:
    return Judged(row, cohort, 100, float(row), 1.0, bad)


def blamed(fleet: Iterator[tuple[int, Drift | None]]) -> list[tuple[int, Drift]]:
    return [(server, drift) for server, drift in fleet if drift is not None]


def by_difficulty(total: int) -> Callable[[int, int, int], float]:
    """3 % on the whole; the prompts are sorted, so that all servers go from 0 to 6 % together."""
    return lambda server, begun, row: 0.06 * row / total


# -- a sound fleet -----------------------------------------------------------------------------------------------------
@pytest.mark.timeout(300)
@pytest.mark.parametrize("answers", [200_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_sound_fleet_is_never_blamed_though_its_prompts_get_harder(answers: int) -> None:
    assert blamed(played(seeded(), [1.0] * 16, answers, by_difficulty(answers))) == []


@pytest.mark.parametrize("speeds", [[1.0] * 15 + [1 / 3], [1.0] * 15 + [3.0], [1.0, 1 / 3]])
def test_nor_are_unlike_cards_where_a_hard_part_of_the_prompts_begins_and_ends(speeds: list[float]) -> None:
    """The slow card's long answers come when the others are long past that part."""
    assert blamed(played(seeded(), speeds, 60_000, lambda s, b, row: 0.15 if row // 5000 % 2 else 0.005)) == []


def test_samples_of_one_hard_prompt_on_one_server_are_one_bad_answer() -> None:
    audit = Rejects()
    for row in range(400):
        for server in (0, 1):
            assert audit.observe(server, answer(1000 * server + row, row // 100)) is None
    for row in (501, 502, 503):
        for _ in range(64):
            assert audit.observe(0, answer(row, 4, bad=True)) is None


def test_a_fleet_whose_prompts_all_turn_bad_has_no_sick_server() -> None:
    assert blamed(played(seeded(), [1.0] * 4, 8000, lambda s, b, row: 0.95 if row > 4000 else 0.02)) == []


# -- a server that goes bad --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("servers", "sick", "within"),
    [(2, 1.0, 60), (2, 0.5, 180), (7, 1.0, 30), (7, 0.5, 90), (7, 0.25, 600), (16, 1.0, 30), (16, 0.25, 600)],
)
def test_a_sick_server_is_the_first_to_be_named(servers: int, sick: float, within: int) -> None:
    """Within so many of its answers after it turned; seen: 10 to 20, 25 to 80, and 80 to 200."""
    turned = 300
    fleet = played(
        seeded(), [1.0] * servers, 10**6, lambda s, begun, row: sick if s == 0 and begun >= turned else 0.03, slots=4
    )
    ended = 0
    for server, drift in fleet:
        ended += server == 0
        if drift is not None:
            break
    assert server == 0
    assert drift is not None
    print(f"{ended - turned} answers after it turned: {drift}")
    assert ended - turned <= within


def test_a_server_that_is_alone_is_compared_with_its_own_past() -> None:
    audit = Rejects()
    rows = count()
    assert all(audit.observe(0, answer(row, 0, bad=row % 30 == 0)) is None for row in (next(rows) for _ in range(150)))
    verdicts = [audit.observe(0, answer(next(rows), 0, bad=True)) for _ in range(40)]
    named = next(place for place, verdict in enumerate(verdicts, 1) if verdict is not None)
    assert named <= 25
    assert "of its first 100" in str(verdicts[named - 1])


def test_a_server_that_is_alone_and_bad_from_the_start_is_the_gates_to_stop() -> None:
    audit = Rejects()
    assert all(audit.observe(0, answer(row, 0, bad=row % 2 == 0)) is None for row in range(1000))


def test_a_new_life_is_judged_by_itself() -> None:
    audit = Rejects()
    rows = count()
    for _ in range(200):
        audit.observe(1, answer(next(rows), 0, bad=False))
        last = audit.observe(0, answer(next(rows), 0, bad=True))
    assert last is not None
    audit.begin(0)
    for _ in range(9):
        audit.observe(1, answer(next(rows), 1, bad=False))
        assert audit.observe(0, answer(next(rows), 1, bad=True)) is None


# -- the test itself ---------------------------------------------------------------------------------------------------
def test_the_tail_is_that_of_the_hypergeometric_distribution() -> None:
    """By counting: 3 of 4 answers bad here, 1 of 6 there."""
    ways = math.comb(4, 3) * math.comb(6, 1) + math.comb(4, 4)
    assert tail(Drift(3, 4, 1, 6)) == pytest.approx(float(Fraction(ways, math.comb(10, 4))))
    chances = [tail(Drift(bad, 25, 6, 200)) for bad in range(26)]
    assert chances[0] == pytest.approx(1.0)
    assert all(one > next_one for one, next_one in pairwise(chances))
    assert chances[16] < CHANCE < chances[10]

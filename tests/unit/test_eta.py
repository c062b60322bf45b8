"""The time to go: a range that holds the truth though short answers come first, and one number once it is steady."""

import heapq
import math
import random

import pytest

from tokenmill.core.eta import Eta, is_steady


def told(
    seed: int, sigma: float, slots: int, total: int, every: int = 1
) -> list[tuple[float, float, float | None, float]]:
    """A run of answers with lognormal lengths, cut at six times the mean; time, low, high and the truth."""
    rng = random.Random(seed)

    def length() -> float:
        return min(rng.lognormvariate(3.0, sigma), 6 * math.exp(3.0 + sigma**2 / 2))

    running = [length() for _ in range(slots)]
    heapq.heapify(running)
    begun, ends = slots, list[float]()
    while running:
        now = heapq.heappop(running)
        ends.append(now)
        if begun < total:
            begun += 1
            heapq.heappush(running, now + length())
    eta, done, found = Eta(), 0, []
    for second in range(int(ends[-1])):
        while ends[done] <= second:
            done += 1
        eta.note(float(second), done)
        if second % every == 0 and (estimate := eta.estimate(total - done, min(slots, total - done))) is not None:
            found.append((float(second), estimate.low_s, estimate.high_s, ends[-1] - second))
    return found


@pytest.mark.parametrize("sigma", [0.1, 0.6, 1.2])
def test_the_range_holds_the_truth(sigma: float) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    looks = [look for number in range(4) for look in told(seed + number, sigma, 32, 1500)]
    early = [look for look in looks if look[0] < 200]
    for some, share in ((looks, 0.85), (early, 0.85)):
        held = sum(low * 0.97 <= truth and (high is None or truth <= high * 1.03) for _, low, high, truth in some)
        assert held >= share * len(some), f"{held} of {len(some)}"
    long = told(seed, sigma, 32, 12_000, every=25)
    steady = [look for look in long if is_steady(look[1], look[2])]
    assert steady, "a long run gets one number"
    assert steady[0][0] > 300, "but not at once"
    assert all(low * 0.75 <= truth <= (high or 0.0) * 1.25 for _, low, high, truth in steady)


def test_early_there_is_no_upper_end_and_never_one_number() -> None:
    eta = Eta()
    for second in range(30):
        eta.note(float(second), second)
    found = eta.estimate(pending=100_000, in_flight=448)
    assert found is not None
    assert found.high_s is None, "what came is a fifteenth of what is in flight"
    assert not found.steady
    assert found.low_s < found.likely_s


def test_nothing_is_told_of_nothing() -> None:
    eta = Eta()
    assert eta.estimate(100, 10) is None
    for second in range(60):
        eta.note(float(second), 5)
    assert eta.estimate(100, 10) is None, "no answer came"
    assert eta.estimate(0, 0) is None


def test_a_slower_fleet_is_told_within_minutes_and_days_take_no_memory() -> None:
    eta = Eta()
    done = 0
    for second in range(100_000):
        done += 20 if second < 99_000 else 10
        eta.note(float(second), done)
    found = eta.estimate(pending=100_000, in_flight=100)
    assert found is not None
    assert found.steady
    assert abs(found.likely_s - 10_000) < 500
    assert len(eta._looks) <= 601

"""Progress in words: not too often, with a rate of the last seconds and the time left."""

from tokenmill.staging.pace import Pace


def test_a_line_every_so_often_with_rate_and_time_left() -> None:
    clock = [100.0]
    said: list[str] = []
    told = Pace("staged", said.append, clock=lambda: clock[0])
    for tenth in range(1, 61):
        clock[0] = 100.0 + tenth / 10
        told.seen(tenth * 10**8, 54 * 10**9, "32 streams")
    assert len(said) in (2, 3)
    assert said[0] == "staged 2.0 GB of 54.0 GB, 1.00 GB/s, 52 s to go, 32 streams"
    clock[0] += 60.0
    told.seen(6 * 10**9, 54 * 10**9)
    assert said[-1] == "staged 6.0 GB of 54.0 GB, 0.0 MB/s", "what stands still has no time left"


def test_what_was_there_before_counts_for_no_rate() -> None:
    clock = [0.0]
    said: list[str] = []
    told = Pace("fetched", said.append, clock=lambda: clock[0])
    told.start_at(52 * 10**9)
    clock[0] = 2.0
    told.seen(52 * 10**9 + 2 * 10**8, 54 * 10**9)
    assert said == ["fetched 52.2 GB of 54.0 GB, 0.10 GB/s, 18 s to go"]

"""Who gets which prompt when, on a clock that jumps: slots are busy where a server has died, too, or is slow."""

from bench.slots import measure_all


def test_slots_are_busy_with_unlike_latencies_and_unlike_servers_and_no_order_is_beaten_by_its_bound() -> None:
    rows = {what: here for what, _, here in measure_all(500, 150, slots=8)}
    busy = [here for what, here in rows.items() if what.startswith("slots busy")]
    assert len(busy) == 3
    for here in busy:
        pumped, _, turns = here.partition("; round robin ")
        assert float(pumped) >= 0.99
        assert float(turns) < float(pumped)
    for what, here in rows.items():
        if "makespan" in what:
            assert all(float(each) >= 0.999 for each in here.replace("; round robin", ",").split(", ")), (what, here)

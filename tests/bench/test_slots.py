"""Who gets which prompt when, on a clock that jumps: slots are busy where a server has died, too, or is slow."""

from bench.slots import measure_all


def test_slots_are_busy_with_unlike_latencies_and_unlike_servers_and_no_order_is_beaten_by_its_bound() -> None:
    rows = {what: (pumped, turns) for what, _, pumped, _, turns in measure_all(500, 150, 1, slots=8)}
    busy = [both for what, both in rows.items() if what.startswith("slots busy")]
    assert len(busy) == 3
    for pumped, turns in busy:
        assert float(pumped) >= 0.99
        assert float(turns.removeprefix("round robin ")) < float(pumped)
    for what, both in rows.items():
        if "makespan" in what:
            told = "; ".join(filter(None, both)).replace("round robin ", "")
            assert all(float(each) >= 0.999 for each in told.split("; ")), (what, both)

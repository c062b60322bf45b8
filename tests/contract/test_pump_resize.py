"""A server's room that changes while the pump works: no request is cut off, none is one too many."""

from tests.contract.pump_fakes import Scene, hangs, play, prompts, settle


def test_more_begin_at_once_and_fewer_as_requests_end() -> None:
    async def scene() -> None:
        async with Scene() as made:
            lane = made.lane(0, capacity=4)
            made.pump.offer(prompts(60))
            await settle()
            assert made.pump.in_flight == 4
            made.pump.resize(lane, 6)
            await settle()
            assert (made.pump.in_flight, made.pump.capacity) == (6, 6)
            made.pump.resize(lane, 2)
            await settle()
            assert made.pump.in_flight == 6
            await made.until(10)
            await settle()
            assert made.pump.in_flight == 2
            made.pump.resize(lane, 3)
            await made.until(60)
            assert len(made.outcome()) == 60

    play(scene())


def test_slots_that_wait_for_a_prompt_go_at_once() -> None:
    async def scene() -> None:
        async with Scene() as made:
            lane = made.lane(0, hangs, capacity=5)
            await settle()
            made.pump.resize(lane, 2)
            made.pump.offer(prompts(9))
            await settle()
            assert (made.pump.in_flight, len(lane.slots)) == (2, 2)

    play(scene())

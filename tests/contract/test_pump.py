"""The pump alone: no prompt lost, doubled or with two servers at once, and nobody pays for another's failure."""

import asyncio
import sys

import msgspec
import pytest

from tests.contract.pump_fakes import DONE, Behaviour, Dialect, Scene, answers, fails, hangs, play, prompts, settle
from tokenmill.attempt import Lane
from tokenmill.client import Client
from tokenmill.config import Generation
from tokenmill.core.records import Completion, Record
from tokenmill.engines.base import Rendered, Request, Sampling, Spec
from tokenmill.errors import (
    BadPromptError,
    BrokenError,
    BusyError,
    GoneError,
    LateError,
    LocalLimitError,
    RefusedError,
    RequestError,
)
from tokenmill.generate import BROKEN_IN_ROW

STOP = "stop"


# -- the usual way -----------------------------------------------------------------------------------------------------
def test_every_prompt_becomes_one_record_and_a_server_is_kept_as_full_as_it_can_be() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, capacity=2)
            made.lane(1, capacity=3)
            made.pump.offer(prompts(20))
            await settle()
            assert made.pump.in_flight == 5
            await made.until(20)
            assert made.outcome() == {f"p{n}": (STOP, 1) for n in range(20)}
            assert (made.pump.in_flight, made.pump.queued) == (0, 0)

    play(scene())


def test_credits_are_what_can_be_used_and_never_more() -> None:
    async def scene() -> None:
        async with Scene() as made:
            assert made.pump.credits() == 0
            lane = made.lane(0, hangs, capacity=4)
            first = made.pump.credits()
            assert first >= lane.capacity
            made.pump.offer(prompts(first))
            await settle()
            assert (made.pump.credits(), made.pump.in_flight, made.pump.queued) == (0, 4, first - 4)
            made.pump.drain()
            assert made.pump.credits() == 0

    play(scene())


def test_a_bug_that_ends_a_slot_is_not_waited_out() -> None:
    class Broken(Scene):
        def _take(self, record: Record) -> None:
            raise ValueError("a bug")

    async def scene() -> None:
        made = Broken()
        made.lane(0)
        made.pump.look()
        made.pump.offer(prompts(1))
        await asyncio.sleep(10.0)
        with pytest.raises(ValueError, match="a bug"):
            made.pump.look()
        made.pump.close(0)

    play(scene())


# -- whose fault it is -------------------------------------------------------------------------------------------------
def test_a_server_that_is_gone_is_reported_once_and_its_prompts_are_not_charged() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(GoneError("refused")), capacity=3)
            made.pump.offer(prompts(6))
            await settle()
            await asyncio.sleep(1.0)
            assert made.troubles == ["s0: refused"]
            assert made.pump.queued == 6
            made.pump.close(0)
            made.lane(1)
            await made.until(6)
            assert made.outcome() == {f"p{n}": (STOP, 1) for n in range(6)}

    play(scene())


def test_a_server_that_only_says_it_is_full_is_in_trouble_after_a_while() -> None:
    """A quota that is used up, a server that will never be done with shutting down."""

    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(BusyError("HTTP 429: out of quota")), capacity=3)
            made.pump.offer(prompts(6))
            await asyncio.sleep(60.0)
            assert made.troubles == []
            await asyncio.sleep(60.0)
            assert made.troubles == ["s0: HTTP 429: out of quota"]
            assert made.pump.queued == 6

    play(scene())


def test_a_server_error_is_charged_and_the_prompt_goes_to_another_server() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(BrokenError("HTTP 500")), capacity=1)
            made.lane(1, capacity=1)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": (STOP, 2)}
            assert made.board.where("p0") == ["s0", "s1"]
            assert made.troubles == []

    play(scene())


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_a_prompt_that_fails_everywhere_is_aborted_after_its_attempts(attempts: int) -> None:
    """On a server that is sound and is trusted again whenever it was in doubt: it never takes long."""

    async def scene() -> None:
        async with Scene(attempts=attempts) as made:
            lane = made.lane(0, fails(BrokenError("HTTP 500: it breaks on this")), capacity=1)
            made.pump.offer(prompts(1))
            for _ in range(attempts):
                await made.until(1, within_s=10.0)
                made.pump.resume(lane)
            assert made.outcome() == {"p0": ("aborted", attempts)}
            assert made.board.begun["p0"] == attempts + len(made.troubles)
            assert "it breaks on this" in made.records[0].error

    play(scene())


def test_a_sick_server_that_is_alone_does_not_use_up_the_usual_attempts() -> None:
    async def scene() -> None:
        async with Scene(attempts=Generation().attempts) as made:
            made.lane(0, fails(BrokenError("HTTP 500")), capacity=2)
            made.pump.offer(prompts(6))
            await asyncio.sleep(100.0)
            assert (made.records, len(made.troubles)) == ([], 1)
            made.pump.close(0)
            made.lane(1)
            await made.until(6)
            assert {finish for finish, _ in made.outcome().values()} == {STOP}

    play(scene())


def test_a_finish_reason_that_is_no_end_is_another_attempt() -> None:
    async def aborts(key: str, times: int) -> bytes:
        return b'{"finish":"abort"}' if times == 1 else DONE

    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, aborts)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": (STOP, 2)}

    play(scene())


@pytest.mark.parametrize("error", [BusyError("HTTP 503: the queue is full"), LocalLimitError("EMFILE")])
def test_a_full_server_is_waited_for_and_nobody_is_charged(error: RequestError) -> None:
    async def scene() -> None:
        async with Scene(attempts=1) as made:
            made.lane(0, fails(error, first=6), capacity=1)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": (STOP, 1)}
            assert made.troubles == []
            assert asyncio.get_running_loop().time() > 5.0, "the same request again and again, without a pause"

    play(scene())


def test_a_refused_prompt_is_a_failed_record_at_once() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(RefusedError("HTTP 400: bad logit_bias")), capacity=1)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": ("request_refused", 1)}

    play(scene())


def test_an_answer_without_its_tool_calls_is_told_at_once_and_no_doubt_of_the_server() -> None:
    async def parses(key: str, times: int) -> bytes:
        return b'{"finish":"tool_calls"}'

    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, parses, capacity=1)
            made.pump.offer(prompts(4))
            await made.until(4)
            assert set(made.outcome().values()) == {("request_refused", 1)}
            assert made.troubles == []

    play(scene())


def test_a_prompt_that_the_server_finds_too_long_is_the_prompts_fault() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(RefusedError("HTTP 400: maximum context length is 8192 tokens")), capacity=1)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": ("prompt_too_long", 1)}

    play(scene())


def test_a_prompt_that_the_template_refuses_never_reaches_a_server() -> None:
    async def refuses(messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
        raise BadPromptError("no user turn")

    async def scene() -> None:
        async with Scene(renders=refuses) as made:
            made.lane(0)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": ("bad_prompt", 1)}
            assert made.board.log == []

    play(scene())


def test_a_late_request_is_aborted_on_its_server_before_another_one_begins_it() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(LateError("no answer within 600 s")), capacity=1)
            made.lane(1, capacity=1)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": (STOP, 2)}
            steps = [(what, server) for what, server, _ in made.board.log]
            assert steps == [("begin", "s0"), ("end", "s0"), ("abort", "s0"), ("begin", "s1"), ("end", "s1")]
            assert made.board.log[2][2] in made.board.ids

    play(scene())


def test_a_server_that_says_it_is_dead_is_reported_and_nobody_is_charged() -> None:
    async def scene() -> None:
        async with Scene(attempts=1) as made:
            made.lane(0, fails(BrokenError("HTTP 500", body="the engine is dead")), capacity=2)
            made.pump.offer(prompts(4))
            await asyncio.sleep(2.0)
            assert made.records == []
            assert len(made.troubles) == 1

    play(scene())


def test_server_errors_in_a_row_are_the_servers_trouble() -> None:
    async def scene() -> None:
        async with Scene(attempts=1000) as made:
            made.lane(0, fails(BrokenError("HTTP 500")), capacity=1)
            made.pump.offer(prompts(20))
            await asyncio.sleep(100.0)
            assert len(made.troubles) == 1
            assert sum(made.board.begun.values()) == BROKEN_IN_ROW

    play(scene())


# -- servers that come and go ------------------------------------------------------------------------------------------
def test_a_server_in_doubt_gets_nothing_new_until_it_is_trusted_again() -> None:
    async def scene() -> None:
        async with Scene() as made:
            lane = made.lane(0, capacity=2)
            made.pump.hold(lane)
            made.pump.offer(prompts(4))
            await asyncio.sleep(100.0)
            assert made.board.log == []
            made.pump.resume(lane)
            await made.until(4)
            assert len(made.outcome()) == 4

    play(scene())


def test_what_is_in_flight_goes_on_at_a_server_in_doubt() -> None:
    async def scene() -> None:
        async with Scene() as made:
            lane = made.lane(0, capacity=2)
            made.pump.offer(prompts(4))
            await settle()
            made.pump.hold(lane)
            await asyncio.sleep(100.0)
            assert len(made.records) == 2
            assert made.pump.queued == 2

    play(scene())


def test_a_server_that_goes_gives_its_prompts_back_uncharged() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, hangs, capacity=3)
            made.pump.offer(prompts(5))
            await settle()
            made.pump.close(0)
            await settle()
            assert (made.pump.queued, made.pump.in_flight, made.pump.capacity) == (5, 0, 0)
            made.lane(1)
            await made.until(5)
            assert made.outcome() == {f"p{n}": (STOP, 1) for n in range(5)}

    play(scene())


def test_a_prompt_is_not_left_behind_when_the_server_it_waits_for_goes() -> None:
    """It failed at s0 and so waits for s1, which is in doubt and then gone: s0 is idle and must take it."""

    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(BrokenError("HTTP 500"), first=1), capacity=1)
            doubtful = made.lane(1, capacity=1)
            made.pump.hold(doubtful)
            made.pump.offer(prompts(1))
            await asyncio.sleep(10.0)
            made.pump.close(1)
            await made.until(1)
            assert made.outcome() == {"p0": (STOP, 2)}

    play(scene())


def test_a_prompt_does_not_wait_for_a_server_in_doubt_while_another_one_is_idle() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(BrokenError("HTTP 500"), first=1), capacity=1)
            doubtful = made.lane(1, capacity=1)
            made.pump.hold(doubtful)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": (STOP, 2)}

    play(scene())


@pytest.mark.parametrize("what", ["goes", "falls into doubt"])
def test_a_prompt_is_not_left_behind_by_a_server_that_takes_a_pause_and_then(what: str) -> None:
    """It failed at s0 and so waits for s1, which has said that it is full and is not asked for half a second."""

    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, fails(BrokenError("HTTP 500"), first=1), capacity=1)
            full = made.lane(1, fails(BusyError("HTTP 503")), capacity=1)
            made.pump.offer(prompts(2))
            await made.until(1)
            assert made.pump.queued == 1
            if what == "goes":
                made.pump.close(1)
            else:
                made.pump.hold(full)
            await made.until(2)
            assert made.outcome() == {"p0": (STOP, 2), "p1": (STOP, 1)}

    play(scene())


# -- memory ------------------------------------------------------------------------------------------------------------
def test_answers_are_not_read_before_there_is_room_for_their_records() -> None:
    async def scene() -> None:
        room = asyncio.Event()
        async with Scene(room=room.wait) as made:  # type: ignore[arg-type]
            made.lane(0, capacity=3)
            made.pump.offer(prompts(5))
            await asyncio.sleep(100.0)
            assert made.records == []
            assert made.pump.in_flight == 3, "a slot whose answer waits is not free"
            room.set()
            await made.until(5)
            assert sorted(made.outcome()) == ["p0", "p1", "p2", "p3", "p4"]

    play(scene())


def test_an_idle_slot_does_not_hold_its_last_record() -> None:
    """Seen: 448 slots held 65 MB of records that were long on disk."""

    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, capacity=1)
            made.pump.offer(prompts(1))
            await made.until(1)
            await settle()
            references = sys.getrefcount(made.records[0])
            assert references == 2, "the list's and the question's own"

    play(scene())


# -- the end -----------------------------------------------------------------------------------------------------------
def test_a_draining_pump_ends_what_is_in_flight_and_begins_nothing() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, capacity=2)
            made.pump.offer(prompts(5))
            await settle()
            made.pump.drain()
            await made.until(5, within_s=100.0)
            assert sorted(made.outcome()) == ["p0", "p1"]
            assert made.pump.queued == 0

    play(scene())


def test_a_draining_pump_begins_nothing_that_was_offered_too_late() -> None:
    """The run took its credits, Ctrl-C came, and only then did the run have the prompts read."""

    async def scene() -> None:
        async with Scene() as made:
            made.lane(0)
            made.pump.drain()
            made.pump.offer(prompts(2))
            await asyncio.sleep(100.0)
            assert made.board.log == []

    play(scene())


class FaultyDecode(Dialect):
    """Plug-ins with a bug: they do not keep to the errors of the contract."""

    def decode(self, body: bytes) -> Completion:
        raise KeyError("choices")


class FaultyEncode(Dialect):
    def encode(
        self, spec: Spec, rendered: Rendered, sampling: Sampling, *, request_id: str, thinking: bool, seed: int | None
    ) -> Request:
        raise TypeError("no tools here")


class FaultyTooLong(Dialect):
    def too_long(self, body: str) -> bool:
        raise IndexError("list index out of range")


class FaultyLost(Dialect):
    def lost(self, body: str) -> bool:
        raise IndexError("list index out of range")


class FaultyAbort(Dialect):
    def abort(self, request_id: str) -> Request | None:
        raise ValueError("not an id")


def no_slot_lost(made: Scene, lane: Lane) -> bool:
    return all(not slot.done() for slot in lane.slots) and (made.pump.in_flight, made.pump.queued) == (0, 0)


@pytest.mark.parametrize(
    ("engine", "behaviour", "words"),
    [
        (FaultyDecode(), answers, "engine dialect: KeyError: 'choices'"),
        (FaultyEncode(), answers, "engine dialect: TypeError: no tools here"),
        (FaultyTooLong(), fails(RefusedError("HTTP 400")), "engine dialect: IndexError"),
    ],
)
def test_a_plug_ins_bug_costs_no_prompt_and_no_slot(engine: Dialect, behaviour: Behaviour, words: str) -> None:
    """Else the run waits for ever for a record that nobody will make; the record says whose bug it is."""

    async def scene() -> None:
        async with Scene(attempts=2) as made:
            lane = made.lane(0, behaviour, capacity=1, engine=engine)
            made.pump.offer(prompts(2))
            await made.until(2, within_s=100.0)
            assert made.outcome() == {f"p{n}": ("aborted", 2) for n in range(2)}
            assert all(words in record.error for record in made.records)
            assert made.troubles == []
            await settle()
            assert no_slot_lost(made, lane)

    play(scene())


@pytest.mark.parametrize(
    ("engine", "error"), [(FaultyLost(), BrokenError("HTTP 500")), (FaultyAbort(), LateError("no answer within 600 s"))]
)
def test_a_plug_ins_bug_while_a_failure_is_looked_at_costs_no_prompt_and_no_slot(
    engine: Dialect, error: RequestError
) -> None:
    async def scene() -> None:
        async with Scene(attempts=1) as made:
            lane = made.lane(0, fails(error), capacity=1, engine=engine)
            made.pump.offer(prompts(2))
            await made.until(2, within_s=100.0)
            assert made.outcome() == {f"p{n}": ("aborted", 1) for n in range(2)}
            await settle()
            assert no_slot_lost(made, lane)

    play(scene())


def test_a_prompt_that_one_engine_cannot_send_is_done_by_another() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.lane(0, capacity=1, engine=FaultyEncode())
            made.lane(1, capacity=1)
            made.pump.offer(prompts(1))
            await made.until(1)
            assert made.outcome() == {"p0": (STOP, 2)}

    play(scene())


# -- a prompt that kills its servers -----------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", [None, GoneError("the connection broke"), BrokenError("HTTP 500", body="dead")])
def test_a_prompt_that_kills_every_server_fails_and_no_other_pays_for_it(ending: RequestError | None) -> None:
    """As an engine does that asserts on one prompt: all in flight go down with it, again and again. Most of the time
    the connections go before the death is known."""

    async def scene() -> None:
        async with Scene() as made:
            doomed: set[int] = set()

            def poisoned(index: int) -> Behaviour:
                dead = asyncio.Event()

                async def behave(key: str, times: int) -> bytes:
                    async with asyncio.TaskGroup() as tasks:
                        death = tasks.create_task(dead.wait())
                        await asyncio.wait([death], timeout=1.0)
                        death.cancel()
                    if key == "p3" or dead.is_set():
                        doomed.add(index)
                        dead.set()
                        if ending is not None:
                            raise ending
                        await asyncio.sleep(1e9)
                    return DONE

                return behave

            made.pump.offer(prompts(40))
            for index in (0, 1):
                made.lane(index, poisoned(index), capacity=4)
            deaths = 0
            while len(made.records) < 40:
                await asyncio.sleep(0.5)
                for index in sorted(doomed):
                    deaths += 1
                    made.pump.close(index, died=True)
                    await settle()
                    made.lane(index, poisoned(index), capacity=4)
                doomed.clear()
                assert deaths <= 4, "it goes on and on"
            outcome = made.outcome()
            assert outcome.pop("p3")[0] != STOP
            assert outcome == {f"p{n}": (STOP, 1) for n in range(40) if n != 3}
            (failed,) = (record for record in made.records if record.key == "p3")
            assert failed.labels == ("aborted",)

    play(scene())


def test_servers_that_die_of_something_else_cost_no_prompt_anything() -> None:
    async def scene() -> None:
        async with Scene() as made:
            made.pump.offer(prompts(30))
            for index in (0, 1):
                made.lane(index, hangs, capacity=3)
            for _ in range(4):
                for index in (0, 1):
                    await settle()
                    made.pump.close(index, died=True)
                    await settle()
                    made.lane(index, answers, capacity=3)
            await made.until(30)
            assert made.outcome() == {f"p{n}": (STOP, 1) for n in range(30)}

    play(scene())


def test_a_server_that_is_retired_gets_no_prompt_though_it_answers_again() -> None:
    async def scene() -> None:
        async with Scene() as made:
            lane = made.lane(0, capacity=2)
            made.lane(1, capacity=2)
            made.pump.offer(prompts(12))
            await settle()
            made.pump.retire(lane)
            made.pump.resume(lane)
            await made.until(12)
            assert len(made.outcome()) == 12
            assert sum(server == "s0" for what, server, _ in made.board.log if what == "begin") == 2

    play(scene())

"""Readings that may never come, and many at once: in order, each once, and their errors are told."""

import asyncio
import subprocess
import sys
import threading

import pytest

from tokenmill.errors import StoppedError
from tokenmill.machine import threads


@pytest.mark.parametrize("crew", [1, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_results_come_in_the_items_order(crew: int, count: int) -> None:
    seen: list[int] = []

    def double(number: int) -> int:
        seen.append(number)
        return 2 * number

    assert threads.each(range(count), double, crew) == [2 * number for number in range(count)]
    assert sorted(seen) == list(range(count))


def test_an_error_of_one_is_the_error_of_all() -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise OSError(5, "Input/output error")
        return number

    with pytest.raises(OSError, match="Input/output"):
        threads.each(range(9), fail, 4)


def test_an_answer_comes_or_is_unknown_in_time() -> None:
    never = threading.Event()

    async def ask() -> list[object]:
        return [
            await threads.reading(lambda: 7, None),
            await threads.reading(never.wait, "unknown", 0.01),
        ]

    try:
        assert asyncio.run(ask()) == [7, "unknown"]
    finally:
        never.set()


def test_an_answer_is_waited_for_until_a_stop_and_a_little_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    never, late = threading.Event(), threading.Event()

    async def story() -> None:
        stopping = asyncio.Event()
        assert await threads.unless_stopped(stopping, lambda: 7) == 7
        waiting = asyncio.create_task(threads.unless_stopped(stopping, lambda: late.wait() and 8))
        await asyncio.sleep(0.01)
        stopping.set()
        late.set()
        assert await waiting == 8, "what is well comes"
        monkeypatch.setattr(threads, "STOPPED_S", 0.05)
        with pytest.raises(StoppedError, match="is its mount away"):
            await threads.unless_stopped(stopping, never.wait)

    try:
        asyncio.run(story())
    finally:
        never.set()


def test_an_error_of_a_reading_is_the_askers() -> None:
    def fail() -> None:
        raise PermissionError(1, "not for you")

    with pytest.raises(PermissionError, match="not for you"):
        asyncio.run(threads.reading(fail, None))


def test_no_exit_waits_for_a_reading_that_hangs() -> None:
    script = """
import asyncio, threading
from tokenmill.machine import threads
print(asyncio.run(threads.reading(threading.Event().wait, "unknown", 0.01)))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=15, check=True)
    assert (ended.stdout, ended.stderr) == ("unknown\n", "")


def test_an_asker_begins_no_second_question_while_one_hangs() -> None:
    go, asked = threading.Event(), []

    def hang() -> str:
        asked.append("hung")
        go.wait()
        return "late"

    async def story() -> list[str]:
        asker: threads.Asker[str] = threads.Asker()
        try:
            told = [await asker.reading(hang, "unknown", 0.01) for _ in range(3)]
            go.set()
            return [*told, await asker.reading(hang, "unknown"), await asker.reading(lambda: "new", "unknown")]
        finally:
            go.set()
            asker.close()

    assert asyncio.run(story()) == ["unknown", "unknown", "unknown", "late", "new"]
    assert asked == ["hung"]

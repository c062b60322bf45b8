"""Who gets how many prompts, and that each counts once, whatever nodes come and go."""

import heapq
import random
from itertools import islice

import pytest
from msgspec import Raw
from msgspec.structs import replace

from tokenmill.core.dispatch import Dispatch, Load, allowance, id_of
from tokenmill.core.records import NULL, Again, Prompt, Record


def prompt(number: int) -> Prompt:
    return Prompt(f"k{number}", 0, number, 0, "0", NULL)


def record(asked: Prompt, seconds: float = 1.0) -> Record:
    own = (asked.key, asked.sample, asked.turn, asked.row, asked.cohort, asked.digest, "s", asked.messages)
    return Record(*own, seconds=seconds)


def test_one_node_alone_gets_what_it_asks_for() -> None:
    dispatch = Dispatch()
    dispatch.join("a")
    assert dispatch.allowed("a", 40, 8, 3) == 40


def test_far_from_the_end_every_node_gets_what_it_asks_for() -> None:
    assert allowance(Load(8, 3, 1.0), [Load(8, 8, 1.0)], 21, 10_000) == 21


def test_towards_the_end_only_free_slots_are_filled() -> None:
    assert allowance(Load(8, 6, 1.0), [Load(8, 8, 1.0)], 18, 3) == 2
    assert allowance(Load(8, 8, 1.0), [Load(8, 8, 1.0)], 16, 3) == 0


def test_a_slow_node_gets_nothing_that_the_others_would_have_done_sooner() -> None:
    others = [Load(8, 8, 1.0), Load(8, 8, 1.0), Load(8, 8, 1.0)]
    assert allowance(Load(8, 0, 3.3), others, 24, 10) == 0
    assert allowance(Load(8, 0, 3.3), others, 24, 1000) == 24


def test_a_node_that_cannot_work_yet_does_not_count() -> None:
    assert allowance(Load(8, 8, 1.0), [Load(0, 0, 0.0)], 16, 3) == 16


def test_what_nobody_asked_for_does_not_count_nor_does_anything_twice() -> None:
    dispatch = Dispatch()
    dispatch.join("a")
    dispatch.join("b")
    dispatch.offered("a", [prompt(1)])
    assert not dispatch.returned("b", record(prompt(1)))
    assert dispatch.returned("a", record(prompt(1)))
    assert not dispatch.returned("a", record(prompt(1)))
    assert dispatch.outstanding == 0


def test_a_record_with_another_history_is_no_answer_and_rows_and_cohorts_are_those_of_now() -> None:
    dispatch = Dispatch()
    dispatch.join("a")
    dispatch.offered("a", [replace(prompt(1), row=7, cohort=2)])
    assert dispatch.returned("a", replace(record(prompt(1)), messages=Raw(b"[1]"))) is None
    counts = dispatch.returned("a", record(prompt(1)))
    assert counts is not None
    assert (counts.row, counts.cohort) == (7, 2)


def test_a_record_made_once_more_counts_once_more() -> None:
    dispatch = Dispatch()
    dispatch.join("a")
    dispatch.offered("a", [prompt(1)])
    old, new = record(prompt(1)), replace(record(prompt(1)), attempt=2)
    said = Again("k1", 0, 0, 0, 1, (), 0)
    assert [dispatch.again("a", said), dispatch.again("a", said)] == [True, False], "a parcel may come twice"
    counts = [bool(dispatch.returned("a", each)) for each in (old, old, new, new)]
    assert counts == [True, False, True, False], "the old one once more is not the new one"
    assert not dispatch.again("a", said), "late"
    assert dispatch.outstanding == 0


def test_a_record_of_before_settles_its_prompt_wherever_it_is() -> None:
    dispatch = Dispatch()
    dispatch.join("a")
    dispatch.join("b")
    dispatch.offered("a", [prompt(1)])
    dispatch.settled(id_of(prompt(1)))
    assert not dispatch.returned("a", record(prompt(1)))
    dispatch.offered("a", [prompt(2)])
    dispatch.leave("a")
    assert set(dispatch.out()) == {id_of(prompt(2))}
    dispatch.settled(id_of(prompt(2)))
    assert not dispatch.waiting
    assert not dispatch.out()
    assert dispatch.outstanding == 0


def test_nodes_that_come_and_go_lose_nothing_and_double_nothing() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    for number in range(20):
        come_and_go(random.Random(seed + number))


def come_and_go(rng: random.Random) -> None:
    dispatch, total = Dispatch(), 200
    feed = iter(range(total))
    nodes: dict[int, list[Prompt]] = {}
    counted: list[str] = []
    names = iter(range(10**6))
    while len(counted) < total:
        deed = rng.random()
        if not nodes or (deed < 0.05 and len(nodes) < 4):
            nodes[name := next(names)] = []
            dispatch.join(name)
        name = rng.choice(list(nodes))
        if deed > 0.97:
            assert dispatch.leave(name) == len(nodes.pop(name))
        elif deed > 0.5:
            given = [dispatch.waiting.popleft() for _ in range(min(3, len(dispatch.waiting)))]
            given = given or [prompt(number) for number in islice(feed, 3)]
            dispatch.offered(name, given)
            nodes[name] += given
        elif nodes[name]:
            done = nodes[name].pop(rng.randrange(len(nodes[name])))
            assert dispatch.returned(name, record(done))
            assert not dispatch.returned(name, record(done))
            counted.append(done.key)
    assert sorted(counted) == sorted(f"k{number}" for number in range(total))
    assert dispatch.outstanding == 0


# -- the end of a set --------------------------------------------------------------------------------------------------
def makespan(speeds: list[float], slots: int, tasks: list[float]) -> float:
    """When nodes of these speeds are through with tasks that take so long at speed 1, in simulated seconds."""
    dispatch = Dispatch()
    queues: list[list[tuple[Prompt, float]]] = [[] for _ in speeds]
    running = [0] * len(speeds)
    ends: list[tuple[float, int, int, Prompt, float]] = []
    todo = [(prompt(number), seconds) for number, seconds in enumerate(tasks)][::-1]
    now = 0.0
    for node in range(len(speeds)):
        dispatch.join(node)

    def work(node: int) -> None:
        credits = slots + max(16, slots) - running[node] - len(queues[node])
        count = min(len(todo), dispatch.allowed(node, credits, slots, len(todo)))
        given = [todo.pop() for _ in range(count)]
        dispatch.offered(node, [asked for asked, _ in given])
        queues[node] += given
        while queues[node] and running[node] < slots:
            asked, seconds = queues[node].pop(0)
            running[node] += 1
            took = seconds / speeds[node]
            heapq.heappush(ends, (now + took, asked.row, node, asked, took))

    for node in range(len(speeds)):
        work(node)
    while ends:
        now, _, node, asked, took = heapq.heappop(ends)
        running[node] -= 1
        dispatch.returned(node, record(asked, took))
        for other in range(len(speeds)):
            work(other)
    assert not todo
    return now


@pytest.mark.parametrize(("rows", "limit"), [(3000, 1.05), (100, 1.3)])
def test_no_node_waits_for_a_slow_one_at_the_end(rows: int, limit: float) -> None:
    """With 100 prompts one answer of the slow node takes 0.9 of the lower bound: its first ones decide."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    speeds, slots = [1.0, 1.0, 1.0, 0.3], 8
    tasks = [rng.uniform(0.7, 1.3) for _ in range(rows)]
    bound = sum(tasks) / (slots * sum(speeds))
    quarters = sum(tasks[: len(tasks) // 4]) / (slots * 0.3)
    took = makespan(speeds, slots, tasks)
    print(f"makespan {took / bound:.3f} × the lower bound; static quarters {quarters / bound:.3f} ×")
    assert took <= limit * bound

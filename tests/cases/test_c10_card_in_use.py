"""C10: a card whose memory somebody holds is named with its holder; our own servers are never taken for somebody."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract import recorded
from tests.doctoring import CARDS, context, told
from tokenmill.checks.base import Context
from tokenmill.checks.gpus import check_gpus
from tokenmill.core.server import Failure, FailureKind, Restart
from tokenmill.engines.sglang import SGLang
from tokenmill.folder import ServerEntry
from tokenmill.machine import processes
from tokenmill.machine.cards import Cards, CardUse
from tokenmill.machine.gpus import Gpu
from tokenmill.occupied import explain


def with_cards(tmp_path: Path, cards: list[Gpu], ours: list[ServerEntry] | None = None, **sections: Any) -> Context:
    found = context(tmp_path, ours or [], model={"path": "/models/m"}, **sections)
    found.read_gpus = lambda: cards
    return found


def held(used: dict[int, tuple[int, tuple[int, ...]]]) -> list[Gpu]:
    """Cards of which some have so many MiB in use, by these pids."""
    cards = list(CARDS)
    for index, (mib, pids) in used.items():
        cards[index] = replace(cards[index], memory_used=mib << 20, pids=pids)
    return cards


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process of somebody's own."""
    code = "import time; print(flush=True); time.sleep(60)"
    words = [sys.executable, "-c", code, "train-my-own-model"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is itself by now, no more a copy of us
        yield process.pid
        process.kill()


def test_held_by_a_process_and_held_by_nobody_visible_are_told_apart(tmp_path: Path, stranger: int) -> None:
    cards = held({3: (62000, (stranger,)), 5: (30000, ())})
    process, nobody = told(check_gpus, with_cards(tmp_path, cards))
    assert process.startswith(f"GPU 3: 65.0 of 183.0 GB are in use by pid {stranger} (")
    assert "train-my-own-model" in process
    assert nobody.startswith("GPU 5: 31.5 of 183.0 GB are in use by no process that can be seen from here")


def test_what_the_driver_itself_takes_is_no_ones(tmp_path: Path) -> None:
    assert told(check_gpus, with_cards(tmp_path, held({0: (600, ())}))) == []


def entry(pid: int, gpu: str) -> ServerEntry:
    process = processes.identify(pid)
    assert process is not None
    return ServerEntry("", 0, process, os.getpgid(pid), 30000, 31000, gpu, "tm-x", {})


@pytest.mark.parametrize("seen", ["its own pid", "the host's pid", "no pid"])
def test_a_restart_does_not_take_its_own_living_servers_for_strangers(tmp_path: Path, stranger: int, seen: str) -> None:
    """In a container NVML tells the pids of the host, or none; state.json tells which card a server of ours has."""
    pids = {"its own pid": (stranger,), "the host's pid": (4_000_000,), "no pid": ()}[seen]
    cards = held({2: (160000, pids)})
    assert told(check_gpus, with_cards(tmp_path, cards, [entry(stranger, "2")])) == []
    assert len(told(check_gpus, with_cards(tmp_path, cards))) == 1


@pytest.mark.parametrize(
    ("args", "count", "is_fatal"),
    [({}, 7, True), ({}, 6, False), ({"gpu-memory-utilization": 0.4}, 7, False)],
)
def test_vllm_refuses_a_card_without_its_share_and_all_of_them_stop_the_run(
    tmp_path: Path, args: dict[str, Any], count: int, is_fatal: bool
) -> None:
    cards = held(dict.fromkeys(range(count), (60000, ())))
    found = with_cards(tmp_path, cards, engine={"kind": "vllm", "args": args})
    assert bool(told(check_gpus, found, "fail")) is is_fatal
    blocked = [message for message in told(check_gpus, found) if "will end" in message]
    assert len(blocked) == (0 if args else count)
    assert told(check_gpus, with_cards(tmp_path, cards), "fail") == [], "SGLang takes what is there"


# -- taken while a server starts or works ------------------------------------------------------------------------------
LOG = recorded.lines("sglang-0.5.11-h200/graphs-taken.log")
EATER, GIB = 23618, 1 << 30


def at_graphs(*, base: int | None = None, cards: Cards | None = None) -> Failure:
    failure = SGLang().diagnose(LOG, -9)
    assert failure.kind is FailureKind.MEMORY_GRAPHS, "by its own words"
    return explain(failure, {1}, cards or Cards(lambda _: None), (0,), (base,))


def test_who_took_the_card_while_graphs_were_captured_is_named_and_waited_for() -> None:
    """Recorded: somebody took the rest of an H200 after the cache was made."""
    failure = at_graphs(base=615 << 20)
    assert failure.kind is FailureKind.OCCUPIED
    assert failure.restart is Restart.WAIT
    words = f"while CUDA graphs were captured: {processes.describe(EATER)} has 136.3 of the card's 139.8 GiB"
    assert failure.cause == f"out of GPU memory {words}"


def test_what_was_there_before_or_is_our_own_leaves_it_to_a_lower_fraction() -> None:
    assert at_graphs(base=137 * GIB).kind is FailureKind.MEMORY_GRAPHS
    shared = Cards(lambda _: CardUse(140 * GIB, 0, {EATER: 130 * GIB}, 140 * GIB))
    for server in (0, 1):
        shared.take((0,), server)
    assert at_graphs(cards=shared).kind is FailureKind.MEMORY_GRAPHS


@pytest.mark.parametrize(
    ("held", "kind"),
    [(136 * GIB, FailureKind.OCCUPIED), (6 * GIB, FailureKind.MEMORY_WEIGHTS), (None, FailureKind.MEMORY_WEIGHTS)],
)
def test_a_start_on_a_card_that_is_taken_waits_for_it(stranger: int, held: int | None, kind: FailureKind) -> None:
    """Where the log says no more than that memory was lacking, NVML tells who has it."""
    lines = ("RuntimeError: CUDA error: out of memory",)
    cards = Cards(lambda _: CardUse(139 * GIB, 0, {stranger: held, 4_000_000: 100 * GIB}, 140 * GIB))
    failure = Failure(
        FailureKind.MEMORY_WEIGHTS, "out of GPU memory while the weights were loaded: too small", "", lines
    )
    found = explain(failure, {1}, cards, (0,), (137 * GIB,))
    assert found.kind is kind
    if kind is FailureKind.OCCUPIED:
        assert f"were loaded: pid {stranger} (" in found.cause
        assert "has 136.0 of the card's 140.0 GiB" in found.cause

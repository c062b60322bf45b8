"""The cards as the doctor sees them: canned readings of healthy, sick and worn ones."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctoring import CARDS, context, told
from tokenmill import launch
from tokenmill.checks.base import Context
from tokenmill.checks.gpus import check_gpus
from tokenmill.doctor import examine
from tokenmill.errors import PreflightError
from tokenmill.machine.gpus import Gpu
from tokenmill.node import LocalNode

UNKNOWN = [Gpu(card.index, card.uuid, card.name, card.memory_total, card.memory_used) for card in CARDS]
"""Cards of which NVML tells no more than it must."""


def cards(tmp_path: Path, found: list[Gpu], **fleet: Any) -> Context:
    made = context(tmp_path, model={"path": "/models/m"}, fleet=fleet)
    made.read_gpus = lambda: found
    return made


def changed(**reading: Any) -> list[Gpu]:
    """Good cards, the fourth with this reading."""
    return [replace(card, **(reading if card.index == 3 else {})) for card in CARDS]


@pytest.mark.parametrize("found", [CARDS, UNKNOWN])
def test_good_cards_and_cards_that_tell_little_leave_no_complaint(tmp_path: Path, found: list[Gpu]) -> None:
    assert told(check_gpus, cards(tmp_path, found)) == []


SICK: list[dict[str, Any]] = [
    {"lost": "GPU is lost"},
    {"recovery": "reset the GPU"},
    {"remap_failed": True},
    {"mig": True},
]


@pytest.mark.parametrize("reading", SICK)
def test_a_sick_card_is_left_out_where_enough_are_left_and_else_stops_the_run(
    tmp_path: Path, reading: dict[str, Any]
) -> None:
    found = changed(**reading)
    (message,) = [text for text in told(check_gpus, cards(tmp_path, found), "warn") if "leaves it out" in text]
    assert message.startswith("GPU 3 ")
    assert "goes on with 6 of 7 servers" in message
    assert told(check_gpus, cards(tmp_path, found), "fail") == []
    (message,) = told(check_gpus, cards(tmp_path, found, min_ready=7), "fail")
    assert "fewer than fleet.min_ready = 7" in message
    assert len(told(check_gpus, cards(tmp_path, found, gpus=[3]), "fail")) == 1


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        ({}, [0, 1, 2, 4, 5, 6]),
        ({"servers": 7}, [0, 1, 2, 4, 5, 6]),
        ({"servers": 3}, [0, 1, 2]),
        ({"gpus_per_server": 2}, [0, 2]),
        ({"min_ready": 6}, [0, 1, 2, 4, 5, 6]),
        ({"min_ready": 7}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_run_keeps_its_servers_numbers_when_it_leaves_one_out(
    tmp_path: Path, fleet: dict[str, Any], expected: list[int]
) -> None:
    found = changed(remap_failed=True)
    config = cards(tmp_path, found, **fleet).config
    kept, bad = launch.without(launch.places(config, found), found, config.fleet.min_ready)
    assert [place.index for place in kept] == expected
    assert list(bad) == ([] if len(expected) == 7 else ["GPU 3"])


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ({"ecc_errors": 2}, "2 memory errors that ECC could not correct"),
        ({"remap_pending": True}, "replaced at the next reset"),
        ({"throttled": ("temperature",)}, "held down by temperature"),
        ({"power_limit": 500_000}, "limited to 500 W of 1000 W"),
    ],
)
def test_a_worn_card_is_told_and_used(tmp_path: Path, reading: dict[str, Any], words: str) -> None:
    (message,) = told(check_gpus, cards(tmp_path, changed(**reading)))
    assert message.startswith("GPU 3: ")
    assert words in message


LOG = "4,1,2,-;NVRM: Xid (PCI:0000:04:00): {number}, pid='<unknown>', name=<unknown>, words\n"


@pytest.mark.parametrize(("number", "is_told"), [(48, 1), (79, 1), (94, 1), (95, 1), (154, 1), (13, 0), (31, 0)])
def test_xids_of_the_card_are_told_and_those_of_a_program_are_not(tmp_path: Path, number: int, is_told: int) -> None:
    found = cards(tmp_path, CARDS)
    found.read_kernel_log = lambda: LOG.format(number=number) * 3
    said = told(check_gpus, found)
    assert len(said) == is_told
    assert all(text.startswith(f"GPU 3: Xid {number} in the kernel's log, 3 times: ") for text in said)


def test_xids_of_cards_that_are_not_ours_are_none_of_ours(tmp_path: Path) -> None:
    found = cards(tmp_path, CARDS, gpus=[0, 1])
    found.read_kernel_log = lambda: LOG.format(number=79)
    assert told(check_gpus, found) == []


def test_a_kernel_log_that_cannot_be_read_is_unknown_not_ok(tmp_path: Path) -> None:
    found = cards(tmp_path, CARDS)
    found.read_kernel_log = lambda: None
    assert len(told(check_gpus, found, "unknown")) == 1


def test_more_servers_than_cards_and_idle_cards_are_told(tmp_path: Path) -> None:
    assert "some would share a card" in told(check_gpus, cards(tmp_path, CARDS, servers=8))[0]
    assert "1 of 7 GPUs stay idle" in told(check_gpus, cards(tmp_path, CARDS, gpus_per_server=2))[0]


def test_without_nvml_there_is_one_clear_finding(tmp_path: Path) -> None:
    def none() -> list[Gpu]:
        raise PreflightError("no NVIDIA GPU can be reached: Driver Not Loaded", fix='set fleet.gpus = "none"')

    found = context(tmp_path, engine={"kind": "sglang"}, model={"path": "/models/none"})
    found.read_gpus = none
    about = [finding for finding in examine(found) if "NVIDIA" in finding.message]
    assert [(finding.check, finding.level) for finding in about] == [("gpus", "fail")]


@pytest.mark.parametrize(("min_ready", "servers"), [(1, [0, 1, 2, 4, 5, 6]), (7, [0, 1, 2, 3, 4, 5, 6])])
def test_a_node_starts_no_server_on_a_sick_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_ready: int, servers: list[int]
) -> None:
    monkeypatch.setattr("tokenmill.machine.nvml.read", lambda: changed(recovery="reset the GPU"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = context(tmp_path, engine={"kind": "fake"}, fleet={"min_ready": min_ready})

    async def prepared() -> tuple[list[int], list[str]]:
        node = LocalNode(found.config, found.folder, "", [])
        await node.prepare()
        told = [event.text for event in (await node.results()).events if event.kind == "gpus"]
        return [supervisor.place.index for supervisor in node.supervisors], told

    assert asyncio.run(prepared()) == (
        servers,
        [] if min_ready == 7 else ["GPU 3 is left out: NVIDIA's diagnosis says: reset the GPU"],
    )

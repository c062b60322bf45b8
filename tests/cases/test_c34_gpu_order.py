"""C34: one tool's GPU number is another GPU for CUDA; some ids crash an engine. Each server gets exactly its cards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctoring import CARDS, context, told
from tokenmill import launch
from tokenmill.checks.base import Context
from tokenmill.checks.gpus import check_gpus
from tokenmill.engines.base import Launch
from tokenmill.errors import PreflightError
from tokenmill.machine import gpus
from tokenmill.machine.gpus import Gpu

UNLIKE = [replace(CARDS[0], name="NVIDIA RTX 4000", memory_total=20 * 10**9), CARDS[1]]
SLICES = [
    *(replace(CARDS[0], uuid=f"MIG-{letter * 4}", name="NVIDIA B200 MIG 3g.90gb", mig=True) for letter in "ab"),
    CARDS[1],
]
SHELL = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@pytest.fixture(autouse=True)
def _plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHELL:
        monkeypatch.delenv(name, raising=False)


def planned(tmp_path: Path, cards: list[Gpu], **sections: Any) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each server that would be launched."""
    found = context(tmp_path, model={"path": "/models/m"}, **sections)
    config = found.config
    chosen = gpus.choose(cards, config.fleet.gpus)
    places = launch.places(config, chosen)
    seen = []
    for place in places:
        env = launch.environment(config, place, found.engine, Launch(()), tmp_path, tmp_path)
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        seen.append(env["CUDA_VISIBLE_DEVICES"])
    return seen


@pytest.mark.parametrize(
    ("variable", "servers"),
    [
        (None, ["0", "1", "2", "3", "4", "5", "6"]),
        ("3,1", ["3", "1"]),
        ("GPU-1111", ["1"]),
        ("GPU-6666-aa,GPU-0000", ["6", "0"]),
        ("0,0", ["0"]),
    ],
)
def test_an_inherited_choice_is_kept_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, servers: list[str]
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert planned(tmp_path, CARDS) == servers


@pytest.mark.parametrize("variable", ["", "9", "MIG-aaaa", "-1"])
def test_an_inherited_choice_of_nothing_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with pytest.raises(PreflightError, match="none is visible"):
        planned(tmp_path, CARDS)


@pytest.mark.parametrize(
    ("asked", "servers"),
    [("all", ["MIG-aaaa", "MIG-bbbb", "1"]), (["MIG-bbbb"], ["MIG-bbbb"]), (["MIG-b", 1], ["MIG-bbbb", "1"])],
)
def test_a_sliced_card_gives_one_server_a_slice_by_its_uuid(tmp_path: Path, asked: Any, servers: list[str]) -> None:
    assert planned(tmp_path, SLICES, fleet={"gpus": asked}) == servers


def test_whole_cards_are_named_by_number_which_every_engine_reads(tmp_path: Path) -> None:
    assert planned(tmp_path, CARDS, fleet={"gpus": ["GPU-2222", "GPU-5555-aa"]}) == ["2", "5"]


# -- what the doctor says ----------------------------------------------------------------------------------------------
def judged(tmp_path: Path, cards: list[Gpu]) -> list[str]:
    found: Context = context(tmp_path, model={"path": "/models/m"})
    found.read_gpus = lambda: cards
    return told(check_gpus, found)


def test_unlike_cards_are_named(tmp_path: Path) -> None:
    (message,) = judged(tmp_path, UNLIKE + CARDS[2:])
    assert message.endswith("most are a NVIDIA B200 with 183 GB, GPU 0 is a NVIDIA RTX 4000 with 20 GB")


def test_a_sliced_card_among_whole_ones_is_named(tmp_path: Path) -> None:
    messages = judged(tmp_path, SLICES)
    assert any("GPU 0 is in MIG mode, the others are whole" in message for message in messages)


@pytest.mark.parametrize(("order", "is_told"), [(None, True), ("FASTEST_FIRST", True), ("PCI_BUS_ID", False)])
def test_numbers_that_mean_other_cards_to_the_shell_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str | None, is_told: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    said = [message for message in judged(tmp_path, UNLIKE) if "fastest first" in message]
    assert bool(said) is is_told
    assert [message for message in judged(tmp_path, CARDS) if "fastest first" in message] == []


def test_cards_that_nvml_counts_in_another_order_than_pci_are_told(tmp_path: Path) -> None:
    swapped = [replace(CARDS[0], bus=CARDS[1].bus), replace(CARDS[1], bus=CARDS[0].bus)]
    assert ["PCI order" in message for message in judged(tmp_path, swapped)] == [True]

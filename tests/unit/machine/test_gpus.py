"""GPUs: what CUDA_VISIBLE_DEVICES leaves, and what a config may name (cases C34)."""

import pytest

from tokenmill.errors import PreflightError
from tokenmill.machine import gpus
from tokenmill.machine.gpus import Gpu

CARDS = [Gpu(n, f"GPU-{n}{n}{n}{n}-aa", "H200", 100, 0) for n in range(4)]


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("3,1", [3, 1]),
        (" 2 , 0 ", [2, 0]),
        ("GPU-1111", [1]),
        ("GPU-2222-aa,0", [2, 0]),
        ("0,9,1", [0]),
        ("9", []),
        ("-1", []),
        ("MIG-aaaa", []),
        ("0,0,1", [0]),
    ],
)
def test_what_the_shell_leaves_visible(monkeypatch: pytest.MonkeyPatch, variable: str | None, seen: list[int]) -> None:
    assert [card.index for card in gpus.visible(CARDS, variable)] == seen
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    if seen:
        assert [card.index for card in gpus.choose(CARDS, "all")] == seen
    else:
        with pytest.raises(PreflightError, match="none is visible"):
            gpus.choose(CARDS, "all")


@pytest.mark.parametrize(("asked", "chosen"), [([2, 0], [2, 0]), (["GPU-3333"], [3]), (["1", "GPU-0000-aa"], [1, 0])])
def test_named_cards_are_taken_in_the_order_named(asked: list[int | str], chosen: list[int]) -> None:
    assert [card.index for card in gpus.choose(CARDS, asked)] == chosen


@pytest.mark.parametrize(
    ("asked", "told"),
    [([7], "names 7, and there is no such GPU; there are: 0 (GPU-0000-aa), 1"), ([1, "GPU-1111"], "names GPU 1 twice")],
)
def test_a_card_that_is_not_there_is_named(asked: list[int | str], told: str) -> None:
    with pytest.raises(PreflightError) as caught:
        gpus.choose(CARDS, asked)
    assert told in str(caught.value)


def test_a_cluster_lends_cards_and_no_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-0000")
    gpus.lent(CARDS, [0, "GPU-2222"])
    with pytest.raises(PreflightError, match="names GPU 1, and the cluster has given this node GPU 2, GPU 0"):
        gpus.lent(CARDS, [0, 1])

"""A model that is still coming is waited for: by what is missing, and by whether bytes come (the reference run)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.staging import contents, write_model
from tests.unit.machine.test_sources import hub_cache
from tokenmill.errors import PreflightError, StoppedError
from tokenmill.staging import arrival

LOOK_S = 0.02


class Downloader:
    """Does its next step at each word that the waiting says: no clock is raced."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)
        self.said: list[str] = []

    def __call__(self, text: str) -> None:
        self.said.append(text)
        if self.steps:
            self.steps.pop(0)()


def test_shards_that_come_one_by_one_are_waited_for_and_told(tmp_path: Path) -> None:
    whole, model = write_model(tmp_path / "whole"), tmp_path / "model"
    model.mkdir()
    files = sorted(contents(whole).items(), key=lambda file: (not file[0].endswith("json"), file[0]))
    steps = [lambda name=name, data=data: (model / name).write_bytes(data) for name, data in files]
    coming = Downloader(*steps)
    arrival.follow(model, coming, look_s=LOOK_S, patience_s=30.0)
    assert not coming.steps
    assert coming.said[-1] == f"{model} is whole: {arrival.arrived(model) / 1e6:.1f} MB"
    assert any("of 9.0 MB" in text for text in coming.said), "the index says how much there will be"
    assert any("model-00002-of-00003.safetensors is missing" in text for text in coming.said)


@pytest.mark.parametrize("cut", [1, 4096])
def test_a_shard_under_its_final_name_is_not_taken_for_whole_before_its_last_byte(tmp_path: Path, cut: int) -> None:
    model = write_model(tmp_path / "model")
    shard = model / "model-00003-of-00003.safetensors"
    data = shard.read_bytes()
    os.truncate(shard, len(data) - cut)
    coming = Downloader(lambda: None, lambda: shard.write_bytes(data))
    arrival.follow(model, coming, look_s=LOOK_S, patience_s=30.0)
    assert not coming.steps
    assert shard.read_bytes() == data


def test_bytes_that_still_come_into_a_file_of_the_right_size_are_waited_for(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shards=1)
    shard = model / "model-00001-of-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: 1 << 20])
    os.truncate(shard, len(data))  # a hole: some tools reserve first
    assert arrival.arrived(model) < len(data)

    grown = [1 << 20]

    def more() -> None:
        grown[0] += 1 << 20
        with shard.open("r+b") as file:
            file.write(data[: grown[0]])

    coming = Downloader(more, more)
    arrival.follow(model, coming, look_s=LOOK_S, patience_s=30.0)
    assert not coming.steps


def test_an_unfinished_file_of_the_hubs_cache_counts_and_the_snapshot_may_not_be_there_yet(tmp_path: Path) -> None:
    weights = (write_model(tmp_path / "m", shards=1) / "model-00001-of-00001.safetensors").read_bytes()
    done = hub_cache(tmp_path / "done", weights)
    coming_repo = tmp_path / "hub" / "models--org--tiny"
    part = coming_repo / "blobs" / "ab.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(weights[: 1 << 20])
    snapshot = coming_repo / "snapshots" / done.name
    assert arrival.arrived(snapshot) == 1 << 20

    def finish() -> None:
        part.unlink()
        for blob in (done.parent.parent / "blobs").iterdir():
            blob.rename(coming_repo / "blobs" / blob.name)
        done.parent.rename(snapshot.parent)

    coming = Downloader(lambda: None, finish)
    arrival.follow(snapshot, coming, look_s=LOOK_S, patience_s=30.0)
    assert coming.said[-1].startswith(f"{snapshot} is whole: ")


def test_a_download_that_has_died_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(PreflightError, match=r"no byte came for 0 s: .*model-00002-of-00003.safetensors is missing"):
        arrival.follow(model, lambda text: None, look_s=LOOK_S, patience_s=0.1)


def test_a_stop_ends_the_waiting(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        arrival.follow(tmp_path / "model", lambda text: None, lambda: True, look_s=LOOK_S)


def test_a_model_that_is_whole_costs_one_look_and_no_word(tmp_path: Path) -> None:
    said: list[str] = []
    arrival.follow(write_model(tmp_path / "model"), said.append, look_s=LOOK_S)
    assert said == []

"""The maps of a reduced draft vocabulary: offsets, flags, filling up, and what they cover."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.unit.make import record
from tokenmill import vocabmap
from tokenmill.core.judge import Rules
from tokenmill.core.records import NULL
from tokenmill.errors import GateError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.store import line_of


def raw(*ids: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(list(ids)))


RECORDS = [
    record("a", 0, prompt_ids=raw(1, 1, 1, 1), output_ids=raw(9, 9, 9, 4, 6)),
    record("b", 1, output_ids=raw(9, 4, 2)),
    record("rejected", 2, output_ids=raw(7, 7, 7, 7, 7, 7), labels=("empty",)),
    record("bare", 3, output_ids=NULL),
    record("none", 4, output_ids=raw()),
]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.data / "journal-000001.jsonl").write_bytes(b"".join(map(line_of, RECORDS)))
    return folder


def test_offsets_and_flags_as_the_trainers_read_them(run: RunFolder, tmp_path: Path) -> None:
    """Supervised tokens of accepted rows: 9 four times, 4 twice, 2 and 6 once, the lower id first."""
    told = vocabmap.write(run, tmp_path / "out", Rules(), size=3, vocabulary=12)
    d2t, t2d = np.load(tmp_path / "out" / "d2t-3.npy"), np.load(tmp_path / "out" / "t2d-3.npy")
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)
    assert (np.arange(3) + d2t).tolist() == [2, 4, 9]
    assert np.flatnonzero(t2d).tolist() == [2, 4, 9]
    assert len(t2d) == 12
    both = np.load(tmp_path / "out" / "vocab-map.npz")
    assert (both["d2t"].tolist(), both["t2d"].tolist()) == (d2t.tolist(), t2d.tolist())
    assert told == ["3 of 12 ids cover 87.500% of 8 supervised tokens (4 different ones)"]


def test_too_few_tokens_are_filled_up_with_the_lowest_others(run: RunFolder, tmp_path: Path) -> None:
    vocabmap.write(run, tmp_path / "out", Rules(), size=7, vocabulary=12)
    assert (np.arange(7) + np.load(tmp_path / "out" / "d2t-7.npy")).tolist() == [0, 1, 2, 3, 4, 6, 9]


@pytest.mark.parametrize(
    ("size", "vocabulary", "told"), [(3, 9, "the id 9, and the vocabulary has 9"), (13, 12, "--size 13")]
)
def test_what_does_not_fit_is_refused(run: RunFolder, tmp_path: Path, size: int, vocabulary: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        vocabmap.write(run, tmp_path / "out", Rules(), size=size, vocabulary=vocabulary)
    assert not (tmp_path / "out").exists()


def test_a_run_without_ids_and_a_folder_that_is_there_are_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        vocabmap.write(run, run.path, Rules(), size=3, vocabulary=12)
    (run.data / "journal-000001.jsonl").write_bytes(b"".join(map(line_of, RECORDS[2:])))
    with pytest.raises(GateError, match="no accepted record"):
        vocabmap.write(run, tmp_path / "out", Rules(), size=3, vocabulary=12)

"""Token ids in Parquet files, as arrays: what stands there, whatever the columns' types; and damage is told."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.errors import UsageError
from tokenmill.inspecting.reading import BATCH, stream
from tokenmill.inspecting.shapes import Bad, Talk, Tokens


def written(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def rows(path: Path) -> list[Any]:
    return [row for row, _ in stream([path])]


IDS, MARKS = [[5, 6, 7], [8, 9]], [[0, 1, 1], [0, 1]]


@pytest.mark.parametrize("listed", [pa.list_, pa.large_list])
@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint32()])
@pytest.mark.parametrize("mark", [pa.int8(), pa.bool_(), pa.int64()])
def test_ids_and_masks_of_any_type(tmp_path: Path, listed: Any, kind: Any, mark: Any) -> None:
    path = written(
        tmp_path / "a.parquet",
        id=["x", "y"],
        input_ids=pa.array(IDS, listed(kind)),
        loss_mask=pa.array(MARKS, listed(pa.int8())).cast(listed(mark)),
    )
    first, second = rows(path)
    assert isinstance(first, Tokens)
    assert (first.name, first.ids.tolist(), first.mask.tolist()) == ("x", [5, 6, 7], [False, True, True])
    assert (second.name, second.ids.tolist(), second.mask.tolist()) == ("y", [8, 9], [False, True])


@pytest.mark.parametrize("null", [False, True])
def test_lists_of_one_length_are_lists(tmp_path: Path, null: bool) -> None:
    """As `datasets` writes a feature with a length: rows that are all padded to it."""
    ids, marks = [[5, 6, 7], [8, 9, 10]], [[0, 1, 1], [0, 0, 1]]
    listed = pa.array([*ids, None] if null else ids, pa.list_(pa.int64(), 3))
    found = rows(written(tmp_path / "a.parquet", input_ids=listed, loss_mask=[*marks, *([[1]] if null else [])]))
    assert [(row.ids.tolist(), row.mask.tolist()) for row in found[:2]] == list(zip(ids, marks, strict=True))
    assert [type(row) for row in found[2:]] == [Bad] * null


def test_labels_are_a_mask(tmp_path: Path) -> None:
    (row,) = rows(
        written(tmp_path / "a.parquet", input_ids=[[5, 6, 7]], labels=[[-100, 6, 7]], finish_reason=["length"])
    )
    assert (row.name, row.mask.tolist(), row.finish) == ("a.parquet:1", [False, True, True], "length")


def test_rows_are_right_beyond_a_batch(tmp_path: Path) -> None:
    count = 2 * BATCH + 3
    ids = [[n, n + 1] for n in range(count)]
    found = rows(written(tmp_path / "a.parquet", input_ids=ids, loss_mask=[[0, 1]] * count))
    assert [row.ids.tolist() for row in found] == ids


@pytest.mark.parametrize(
    ("ids", "marks", "why"),
    [
        ([None, [1]], [[1], [1]], "input_ids is no list"),
        ([[None, 1], [1]], [[0, 1], [1]], "input_ids is no list"),
        ([[1, 2], [1]], [None, [1]], "loss_mask is no list"),
        ([[1, 2], [1]], [[0, 2], [1]], "loss_mask is no list"),
        ([[1, 2], [1]], [[1], [1]], "2 input_ids and 1 entries"),
        ([[1.5, 2.0], [1.0]], [[0, 1], [1]], "input_ids is no list"),
        ([[-1, 2], [1]], [[0, 1], [1]], "no such token"),
    ],
)
def test_a_bad_row_is_named_and_the_next_is_read(tmp_path: Path, ids: Any, marks: Any, why: str) -> None:
    first, second = rows(written(tmp_path / "a.parquet", input_ids=ids, loss_mask=marks))
    assert isinstance(first, Bad)
    assert first.name == "a.parquet:1"
    assert why in first.why
    assert isinstance(second, Bad if isinstance(ids[1][0], float) else Tokens)


def test_conversations_in_parquet(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes."}]
    (row,) = rows(written(tmp_path / "a.parquet", id=[7], messages=[talk]))
    assert isinstance(row, Talk)
    assert (row.name, row.content) == ("7", "Yes.")


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", input_ids=IDS, loss_mask=MARKS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="damaged"):
        rows(path)


def test_no_harmed_file_is_a_crash(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    path = written(tmp_path / "a.parquet", id=["x", "y"], input_ids=IDS, loss_mask=MARKS)
    whole = path.read_bytes()
    for _ in range(150):
        harmed = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            harmed[chance.randrange(len(harmed))] = chance.randrange(256)
        path.write_bytes(harmed)
        with suppress(UsageError):
            rows(path)

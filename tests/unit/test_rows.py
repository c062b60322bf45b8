"""Rows of a data file or a folder: every line once, in order, and no file that is damaged passes for a shorter one."""

import json
import struct
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.make import jsonl
from tokenmill import prompts, rows
from tokenmill.errors import UsageError
from tokenmill.rows import BLOCK, MAX_LINE, RawRow

COLUMNS = ("id", "prompt", "messages")


def data_of(path: Path) -> list[bytes]:
    return [raw.data for raw in rows.rows(path, COLUMNS)]


def ids_of(path: Path) -> list[Any]:
    return [json.loads(data)["id"] for data in data_of(path)]


# -- lines -------------------------------------------------------------------------------------------------------------
def test_lines_end_in_any_way_and_blank_ones_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id":"a"}\r\n\n  \t\r\n{"id":"b"}\n{"id":"c"}')
    assert ids_of(path) == ["a", "b", "c"]
    assert [(raw.row, raw.place) for raw in rows.rows(path, COLUMNS)] == [
        (0, "a.jsonl:1"),
        (1, "a.jsonl:4"),
        (2, "a.jsonl:5"),
    ]


@pytest.mark.parametrize("text", [b"", b"\n", b"\xef\xbb\xbf", b"\r\n \n"])
def test_a_file_without_a_row_has_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(text)
    assert data_of(tmp_path) == []


def test_a_line_longer_than_a_block_is_one_row(tmp_path: Path) -> None:
    found = [{"id": "a", "prompt": "x" * 3 * BLOCK}, {"id": "b"}]
    assert ids_of(jsonl(tmp_path / "a.jsonl", found)) == ["a", "b"]


LENGTHS = st.one_of(st.integers(0, 3), st.integers(BLOCK - 3, BLOCK + 3), st.just(2 * BLOCK))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(LENGTHS, max_size=5), ends=st.booleans(), frames=st.integers(0, 3))
def test_lines_are_found_wherever_a_block_ends(lengths: list[int], ends: bool, frames: int) -> None:
    lines = [b"%d" % (n % 10) * length for n, length in enumerate(lengths)]
    text = b"\n".join(lines) + b"\n" * ends
    with TemporaryDirectory() as folder:
        path = Path(folder) / ("a.jsonl.zst" if frames else "a.jsonl")
        cuts = [len(text) * n // max(frames, 1) for n in range(frames + 1)]
        packed = b"".join(zstandard.compress(text[a:b]) for a, b in pairwise(cuts))
        path.write_bytes(packed if frames else text)
        expected = [(f"{path.name}:{n}", line) for n, line in enumerate(lines, 1) if line]
        assert [(raw.place, raw.data) for raw in rows.rows(path, COLUMNS)] == expected


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.one_of(st.integers(0, 2), st.just(BLOCK // 3)), max_size=12), seed=st.integers(0, 2**24 - 1))
def test_the_rows_that_are_wanted_come_with_the_numbers_they_have_among_all(lengths: list[int], seed: int) -> None:
    with TemporaryDirectory() as folder:
        text = b"\n".join(b"x" * length for length in lengths)
        for name, data in (("a.jsonl", text), ("b.jsonl.zst", zstandard.compress(text)), ("c.jsonl", text)):
            (Path(folder) / name).write_bytes(data)
        found = list(rows.rows(Path(folder), COLUMNS))
        wanted = np.array([bool(seed >> n & 1) for n in range(len(found))], dtype=np.bool_)
        expected = [raw for raw in found if wanted[raw.row]]
        assert list(rows.rows(Path(folder), COLUMNS, wanted)) == expected
        for limit in (0, len(found) // 2):
            marks = prompts.scan(Path(folder), limit).marks
            first = wanted[: limit or len(found)]
            kept = [raw for raw in expected if raw.row < len(first)]
            assert list(rows.rows(Path(folder), COLUMNS, first, marks)) == kept


def test_a_file_that_was_changed_since_it_was_marked_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"%b\n" % (b"x" * 99) * 3000)
    marks = prompts.scan(path).marks
    path.write_bytes(b"%b\n" % (b"x" * 98) * 3000)
    with pytest.raises(UsageError, match=r"a\.jsonl was changed while it was being read"):
        list(rows.rows(path, COLUMNS, np.arange(3000) == 2500, marks))


def test_a_line_without_an_end_in_sight_is_one_row_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        for row in (b'{"id":"a"}\n', b'\n{"id":"b"}\n', b""):
            file.write(row)
            if row != b'\n{"id":"b"}\n':
                file.truncate(file.seek(MAX_LINE + 9 * BLOCK, 1))
    found = list(rows.rows(path, COLUMNS))
    assert [raw.place for raw in found] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    assert (found[0].data, found[2].data) == (b'{"id":"a"}', b'{"id":"b"}')
    assert all(MAX_LINE <= len(raw.data) <= MAX_LINE + 2 * BLOCK for raw in (found[1], found[3]))


# -- packed files ------------------------------------------------------------------------------------------------------
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"pzst"
"""What pzstd writes between frames."""


@pytest.mark.parametrize("between", [b"", SKIPPABLE])
@pytest.mark.parametrize("frames", [1, 3])
def test_packed_files_of_any_number_of_frames_are_read(tmp_path: Path, frames: int, between: bytes) -> None:
    packed = [zstandard.compress(f'{{"id":"{n}a"}}\n{{"id":"{n}b"}}\n'.encode()) + between for n in range(frames)]
    (tmp_path / "a.jsonl.zst").write_bytes(between + b"".join(packed))
    assert ids_of(tmp_path) == [f"{n}{letter}" for n in range(frames) for letter in "ab"]


PACKED = zstandard.ZstdCompressor(write_checksum=True).compress(
    "\n".join(f'{{"id":{n * n * 7919 % 10007}}}' for n in range(5000)).encode()
)
"""As the zstd command writes it: with a checksum."""


def as_parquet(folder: Path, table: pa.Table) -> bytes:
    pq.write_table(table, folder / "whole")
    return (folder / "whole").read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl.zst", PACKED[: len(PACKED) // 2]),
        ("cut.jsonl.zst", PACKED[:-1]),
        ("cut.jsonl.zst", PACKED + PACKED[:9]),
        ("bad.jsonl.zst", b"no zstandard at all"),
        ("bad.jsonl.zst", PACKED[:200] + b"\xaa" * 9 + PACKED[209:]),
        ("bad.parquet", b"PAR1 and nothing else"),
        ("bad.parquet", b""),
    ],
)
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=rf"{name} is (damaged|cut off): "):
        data_of(tmp_path)


def test_a_parquet_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    whole = as_parquet(tmp_path, pa.table({"id": list(range(3000))}))
    for content in (whole[: len(whole) // 2], whole[:20] + b"\xaa" * 99 + whole[119:]):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(UsageError, match=r"bad\.parquet is damaged: "):
            data_of(tmp_path)


# -- tables ------------------------------------------------------------------------------------------------------------
def test_parquet_rows_hold_the_wanted_columns_and_no_nulls(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "hi"}], None]
    table = pa.table({"id": [7, None], "messages": turns, "prompt": [None, "ho"], "when": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert list(rows.rows(tmp_path, COLUMNS)) == [
        RawRow(0, "a.parquet:1", b'{"id":7,"messages":[{"role":"user","content":"hi"}]}'),
        RawRow(1, "a.parquet:2", b'{"prompt":"ho"}'),
    ]


def test_a_parquet_file_without_a_wanted_column_has_its_rows_all_the_same(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    assert data_of(tmp_path) == [b"{}"] * 3


def test_a_parquet_text_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    buffers = pa.array([b"hi", b"\xff\xfe"], pa.binary()).buffers()
    pq.write_table(pa.table({"prompt": pa.Array.from_buffers(pa.string(), 2, buffers)}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"a\.parquet is damaged: .*utf-8"):
        data_of(tmp_path)


def test_long_rows_are_made_objects_a_few_at_a_time(tmp_path: Path) -> None:
    texts = [f"{n} " + "x" * 20_000 for n in range(300)]
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")
    found = list(rows.blocks(tmp_path / "a.parquet", COLUMNS))
    assert max(sum(map(len, block)) for _, _, block in found) < 2 * rows.OBJECT_BYTES
    assert [first for first, _, _ in found] == [
        1 + sum(len(block) for _, _, block in found[:n]) for n in range(len(found))
    ]
    assert [json.loads(data)["prompt"] for _, _, block in found for data in block] == texts


@pytest.mark.parametrize("count", [1, rows.PARQUET_BATCH, rows.PARQUET_BATCH + 1])
def test_rows_are_numbered_on_over_batches(tmp_path: Path, count: int) -> None:
    pq.write_table(pa.table({"id": list(range(count))}), tmp_path / "a.parquet")
    *_, last = rows.rows(tmp_path, COLUMNS)
    assert last == RawRow(count - 1, f"a.parquet:{count}", b'{"id":%d}' % (count - 1))


# -- folders -----------------------------------------------------------------------------------------------------------
def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    jsonl(tmp_path / "b.jsonl", [{"id": "b"}])
    jsonl(tmp_path / "sub" / "c.jsonl", [{"id": "c"}])
    jsonl(tmp_path / "a.jsonl", [{"id": "a1"}, {"id": "a2"}])
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / "bb.jsonl.zst").write_bytes(zstandard.compress(b'{"id":"bb"}'))
    pq.write_table(pa.table({"id": ["bc"]}), tmp_path / "bc.parquet")
    assert ids_of(tmp_path) == ["a1", "a2", "b", "bb", "bc", "c"]
    assert [raw.row for raw in rows.rows(tmp_path, COLUMNS)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "words"),
    [("none.jsonl", "no such file or folder"), ("a.csv", "not a .jsonl"), ("empty", "holds no .jsonl")],
)
def test_a_path_that_holds_no_rows_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=words):
        rows.files(tmp_path / name)

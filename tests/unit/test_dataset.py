"""Reading a store back: in the prompts' order over all files, each id once, briefs and records alike."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.make import record
from tokenmill import dataset
from tokenmill.core.records import Record
from tokenmill.seal import seal
from tokenmill.store import line_of


def store(data: Path, *files: list[Record], open_last: bool = True) -> None:
    """Each list is a file, sealed but for the last one."""
    for number, rows in enumerate(files, 1):
        journal = data / f"journal-{number:06d}.jsonl"
        journal.write_bytes(b"".join(map(line_of, rows)))
        if number < len(files) or not open_last:
            seal(journal, data / f"part-{number:06d}.parquet")


def places(data: Path) -> list[tuple[int, int, int]]:
    return [(found.row, found.sample, found.attempt) for found in dataset.records(data)]


@pytest.mark.parametrize("open_last", [True, False])
@pytest.mark.parametrize("rows", [[[9, 3, 6], [1, 8], [2, 7, 0], [5, 4]], [[0, 5], [9], [1], [8, 2, 3, 4, 6, 7]]])
def test_overlapping_files_are_merged_in_the_prompts_order(
    tmp_path: Path, rows: list[list[int]], open_last: bool
) -> None:
    store(tmp_path, *([record(str(row), row) for row in file] for file in rows), open_last=open_last)
    assert [found.row for found in dataset.records(tmp_path)] == list(range(10))


def test_samples_of_a_row_stand_together(tmp_path: Path) -> None:
    store(
        tmp_path, [record(row=1, sample=1), record(row=0, sample=1)], [record(row=0, sample=0), record(row=1, sample=0)]
    )
    assert places(tmp_path) == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]


def test_the_latest_attempt_counts_wherever_it_stands(tmp_path: Path) -> None:
    first, second, third = (record(row=4, attempt=attempt) for attempt in (1, 2, 3))
    store(tmp_path, [second, record(row=5)], [third], [first])
    assert places(tmp_path) == [(4, 0, 3), (5, 0, 1)]


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert list(dataset.records(tmp_path)) == []
    assert list(dataset.briefs(tmp_path)) == []


@settings(max_examples=15, deadline=None)
@given(files=st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=6), min_size=1, max_size=4))
def test_briefs_and_records_tell_the_same(files: list[list[tuple[int, int]]]) -> None:
    seen: set[tuple[int, int]] = set()
    with TemporaryDirectory() as folder:
        data = Path(folder)
        fresh: list[list[Record]] = []
        for file in files:
            fresh.append(
                [
                    record(f"k{row}", row, sample=sample)
                    for row, sample in dict.fromkeys(file)
                    if (row, sample) not in seen
                ]
            )
            seen |= set(file)
        store(data, *fresh)
        records = list(dataset.records(data))
        assert [(found.row, found.sample) for found in records] == sorted(seen)
        briefs = {(brief.key, brief.sample): brief for brief in dataset.briefs(data)}
        assert len(briefs) == len(records)
        for found in records:
            brief = briefs[found.key, found.sample]
            assert all(
                getattr(brief, name) == (list(found.labels) if name == "labels" else getattr(found, name))
                for name in dataset.Brief.__struct_fields__
            )

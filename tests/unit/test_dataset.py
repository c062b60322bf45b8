"""Reading a store back: in the prompts' order over all files, each id once, briefs and records alike."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.make import record
from tokenmill import dataset
from tokenmill.core.records import NULL, Record
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
    def sample(row: int, number: int) -> Record:
        return record(f"k{row}", row, sample=number)

    store(tmp_path, [sample(1, 1), sample(0, 1)], [sample(0, 0), sample(1, 0)])
    assert places(tmp_path) == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]


@pytest.mark.parametrize("open_last", [True, False])
def test_some_ids_are_found_in_all_files_each_as_it_counts(tmp_path: Path, open_last: bool) -> None:
    files = [[record(f"k{row}", row, text=f"{file}.{row}") for row in range(file, 40, 2 + file)] for file in range(4)]
    files[3].append(record("k3", 3, text="again"))  # twice in one file
    files[3].append(record("k3", 3, turn=1))
    store(tmp_path, *files, open_last=open_last)
    wanted = {"k0", "k3", "k18", "k37"}
    found = dataset.picked(
        tmp_path, lambda key, sample, turn: key in wanted and (sample, turn) == (0, 0), with_ids=False
    )
    counted = [one for one in dataset.records(tmp_path) if one.key in wanted and not one.turn]
    without_ids = [replace(one, prompt_ids=NULL, output_ids=NULL) for one in counted]
    assert sorted(found.values(), key=lambda one: one.row) == without_ids != counted
    assert [one.text for one in counted] == ["0.0", "again", "3.18", "1.37"]


@pytest.mark.parametrize("open_last", [True, False])
def test_the_newest_record_of_an_id_counts_whatever_its_attempt_was(tmp_path: Path, open_last: bool) -> None:
    """Attempts are counted anew in every life of a run."""
    one, two, three, four = (record(row=4, attempt=attempt, text=f"{n}") for n, attempt in enumerate((3, 1, 2, 1)))
    store(tmp_path, [one, record("other", 5)], [two], [three, four], open_last=open_last)
    assert [(found.row, found.text) for found in dataset.records(tmp_path) if found.row == 4] == [(4, "3")]
    newest = {brief.key: brief for brief in reversed(list(dataset.briefs(tmp_path)))}
    assert len(newest) == 2
    assert next(brief for brief in dataset.briefs(tmp_path) if brief.key == "k").output_tokens == 40


def test_prompts_that_have_moved_to_other_rows_lose_no_record(tmp_path: Path) -> None:
    """A file that sorts first was added to the folder of prompts: new records have the row numbers of old ones."""
    old = [record(f"old{n}", n) for n in range(4)]
    new = [record(f"new{n}", n) for n in range(3)]
    again = [record("old1", 4, text="written anew after it had moved")]
    store(tmp_path, old, new, again)
    found = {one.key: one.text for one in dataset.records(tmp_path)}
    assert sorted(found) == ["new0", "new1", "new2", "old0", "old1", "old2", "old3"]
    assert found["old1"] == "written anew after it had moved"


def test_a_journal_that_is_sealed_while_it_is_read_is_read_once(tmp_path: Path) -> None:
    store(tmp_path, [record("a", 0)], [record("b", 1), record("c", 2)])
    whole, brief = dataset.records(tmp_path), dataset.briefs(tmp_path)
    first = next(whole).key, next(brief).key
    seal(tmp_path / "journal-000002.jsonl", tmp_path / "part-000002.parquet")
    assert [first[0], *(found.key for found in whole)] == ["a", "b", "c"]
    assert sorted([first[1], *(found.key for found in brief)]) == ["a", "b", "c"]
    assert [found.key for found in dataset.records(tmp_path)] == ["a", "b", "c"]


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

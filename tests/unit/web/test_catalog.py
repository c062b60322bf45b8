"""Single records out of journals and parts, while they grow, are sealed, and are made anew."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.make import record
from tokenmill import seal, store
from tokenmill.core.judge import Rules
from tokenmill.core.records import Record
from tokenmill.errors import StoreError
from tokenmill.web import catalog as module
from tokenmill.web.catalog import Catalog


def journal(data: Path, number: int) -> Path:
    return data / f"journal-{number:06d}.jsonl"


def write(data: Path, number: int, records: Sequence[Record]) -> Path:
    path = journal(data, number)
    with path.open("ab") as out:
        out.writelines(map(store.line_of, records))
    return path


def sealed(data: Path, number: int, records: Sequence[Record]) -> Path:
    path = write(data, number, records)
    seal.seal(path, store.part_of(path))
    return store.part_of(path)


def ready(catalog: Catalog) -> Catalog:
    """With all taken in that there is."""
    for _ in range(100):
        if not catalog.step():
            return catalog
    raise AssertionError("there is always something left")


def keys(found: list[module.Found]) -> list[str]:
    return [one.record.key for one in found]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path


def test_the_newest_need_nothing_taken_in(data: Path) -> None:
    sealed(data, 1, [record(f"a{row}", row, started=100.0 - row) for row in range(9)])
    write(data, 2, [record("b0"), record("b1")])
    catalog = Catalog(data, Rules())
    assert keys(catalog.newest(4)) == ["b1", "b0", "a0", "a1"]  # a part is sorted by the prompts' order
    assert keys(catalog.newest(1)) == ["b1"]
    assert catalog.rows == 0


def test_a_key_is_found_in_parts_and_journals_alike(data: Path) -> None:
    sealed(data, 1, [record(f"a{row}", row) for row in range(50)])
    write(data, 2, [record(f"b{row}", row, text=f"<think>\nx\n</think>\n\n{row}") for row in range(50)])
    catalog = ready(Catalog(data, Rules()))
    assert (catalog.rows, catalog.left) == (100, 0)
    for key in ("a0", "a49", "b0", "b49"):
        assert keys(catalog.find(key)) == [key]
    assert catalog.find("b17")[0].record.text.endswith("17")
    assert catalog.find("nothing") == []


def test_a_journal_is_taken_in_as_it_grows_and_torn_lines_wait(data: Path) -> None:
    path = write(data, 1, [record("a")])
    catalog = ready(Catalog(data, Rules()))
    line = store.line_of(record("b"))
    with path.open("ab") as out:
        out.write(line[:40])
    ready(catalog)
    assert catalog.find("b") == []
    with path.open("ab") as out:
        out.write(line[40:])
    for number in range(40):
        write(data, 1, [record(f"c{number}")])
        ready(catalog)
    assert keys([*catalog.find("b"), *catalog.find("c0"), *catalog.find("c39")]) == ["b", "c0", "c39"]
    assert catalog.rows == 42


def test_a_long_journal_is_taken_in_piece_by_piece(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 2000)
    write(data, 1, [record(f"a{row}", row) for row in range(40)])
    catalog = Catalog(data, Rules())
    assert catalog.step()
    assert 0 < catalog.rows < 40
    assert ready(catalog).rows == 40
    assert keys(catalog.find("a39")) == ["a39"]


def test_sealing_moves_what_was_found(data: Path) -> None:
    records = [record(f"a{row}", row, labels=("empty",)) for row in range(5)]
    path = write(data, 1, records)
    catalog = ready(Catalog(data, Rules()))
    seal.seal(path, store.part_of(path))
    ready(catalog)
    assert catalog.rows == 5
    assert keys(catalog.find("a3")) == ["a3"]
    assert sorted(keys(catalog.worst("", 10))) == [f"a{row}" for row in range(5)]


def test_a_newer_record_supersedes_an_older_one(data: Path) -> None:
    sealed(data, 1, [record("k", labels=("empty",), attempt=1), record("other", 1)])
    write(data, 2, [record("k", attempt=2)])
    write(data, 2, [record("k", attempt=3), record("k", sample=1)])
    catalog = ready(Catalog(data, Rules()))
    told = [(one.record.sample, one.record.attempt, one.superseded) for one in catalog.find("k")]
    assert told == [(0, 3, False), (0, 2, True), (0, 1, True), (1, 1, False)]
    assert [one.record.sample for one in catalog.find("k", 1, 0)] == [1]
    assert catalog.worst("", 10) == []  # the bad one was made anew


def test_the_worst_have_the_most_to_object_to(data: Path) -> None:
    rejected = [
        record("fine", 0),
        record("cut", 1, labels=("truncated_in_answer",)),
        record("one", 2, labels=("empty_answer",)),
        record("loop", 3, repetition=50.0),
        record("two", 4, labels=("empty_answer", "bad_text")),
        record("refused", 5, labels=("request_refused",), error="no"),
        record("shallow", 6, reasoning_tokens=3),
    ]
    sealed(data, 1, rejected)
    catalog = ready(Catalog(data, Rules()))
    assert keys(catalog.worst("", 10)) == ["two", "loop", "one", "shallow", "refused"]
    assert keys(catalog.worst("truncated_in_answer", 10)) == ["cut"]
    assert keys(catalog.worst("empty_answer", 1)) == ["two"]
    assert catalog.labels() == [
        *("bad_text", "empty_answer", "empty_reasoning", "repetition", "request_refused", "truncated_in_answer"),
    ]


def test_of_the_worst_only_some_are_kept(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 10)
    rows = list(range(100))
    random.Random(5).shuffle(rows)
    write(data, 1, [record(f"a{row}", row, repetition=10.0 + row) for row in rows])
    assert keys(ready(Catalog(data, Rules())).worst("", 5)) == ["a99", "a98", "a97", "a96", "a95"]


def test_a_damaged_part_is_told_once_and_the_rest_is_found(data: Path) -> None:
    sealed(data, 1, [record("a")])
    part = sealed(data, 2, [record("b")])
    part.write_bytes(part.read_bytes()[:100])
    catalog = Catalog(data, Rules())
    with pytest.raises(StoreError, match="part-000002"):
        catalog.step()
    assert keys(ready(catalog).find("a")) == ["a"]


def test_an_empty_folder_holds_nothing(data: Path) -> None:
    catalog = ready(Catalog(data / "none", Rules()))
    assert (catalog.newest(5), catalog.worst("", 5), catalog.find("a"), catalog.left) == ([], [], [], 0)

"""The journal: whole after any cut, flip or full disk; sealed parts hold the same records."""

import asyncio
import errno
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.make import record
from tokenmill import dataset, store
from tokenmill.core.records import NULL, Parts, Record
from tokenmill.errors import StoreError, VanishedError
from tokenmill.seal import seal
from tokenmill.store import Store, is_whole, line_of, plain

BIG = 1 << 30


def opened(data: Path, segment: int = BIG) -> tuple[Store, list[str]]:
    told: list[str] = []
    return Store(data, segment, lambda text, level: told.append(f"{level}: {text}")), told


async def kept(data: Path, *batches: list[Record], segment: int = BIG, seal: bool = False) -> list[str]:
    """Appends batches with a store of their own and closes it; returns what it told."""
    new, told = opened(data, segment)
    for batch in batches:
        await new.append(batch)
    await new.close(seal=seal)
    return told


def keys(data: Path) -> list[str]:
    return [found.key for found in dataset.records(data)]


def names(data: Path) -> list[str]:
    return sorted(path.name for path in data.iterdir())


# -- lines -------------------------------------------------------------------------------------------------------------
@given(key=st.text(), text=st.text(), error=st.text(st.characters(codec="utf-8")), tokens=st.integers(0, 2**31 - 1))
def test_any_record_comes_back_from_its_line(key: str, text: str, error: str, tokens: int) -> None:
    stored = record(key, text=text, error=error, output_tokens=tokens)
    line = line_of(stored)
    assert line.count(b"\n") == 1
    assert is_whole(line)
    assert is_whole(line.rstrip() + b"\r\n")
    assert msgspec.json.decode(plain(line), type=Record) == stored


def test_any_flipped_bit_is_noticed() -> None:
    line = line_of(record(text="a 🙂"))
    for place in range(len(line) - 1):
        for bit in range(8):
            flipped = bytearray(line)
            flipped[place] ^= 1 << bit
            assert not is_whole(bytes(flipped)), (place, bit)


def test_a_journal_cut_at_any_byte_keeps_its_whole_lines_and_takes_the_next(tmp_path: Path) -> None:
    first, second = (line_of(record(key, row, text=f"{key} 🙂")) for row, key in enumerate("ab"))
    journal, torn = tmp_path / "journal-000001.jsonl", tmp_path / "torn.bin"
    for cut in range(len(second) + 1):
        journal.write_bytes(first + second[:cut])
        store.recover(tmp_path)
        with journal.open("ab") as out:
            out.write(line_of(record("new", 9)))
        whole = cut >= len(second) - 1  # all but its newline
        told: list[str] = []
        found = [brief.key for brief in dataset.briefs(tmp_path, told.append)]
        assert (found, told) == (["new", "b", "a"] if whole else ["new", "a"], []), cut
        assert (torn.read_bytes() if torn.exists() else b"\n") == (b"" if whole else second[:cut]) + b"\n", cut
        torn.unlink(missing_ok=True)


# -- files -------------------------------------------------------------------------------------------------------------
def test_a_new_store_goes_on_in_the_newest_journal_until_it_is_full(tmp_path: Path) -> None:
    asyncio.run(kept(tmp_path, [record("a")]))
    asyncio.run(kept(tmp_path, [record("b", 1)]))
    assert names(tmp_path) == ["journal-000001.jsonl"]
    asyncio.run(kept(tmp_path, [record("c", 2)], segment=100))
    assert keys(tmp_path) == ["a", "b", "c"]
    assert "journal-000002.jsonl" in names(tmp_path)


def test_a_write_does_not_wait_for_the_disk_to_flush_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = threading.Event()
    monkeypatch.setattr("tokenmill.store.SYNC_ROWS", 1)
    monkeypatch.setattr(os, "fdatasync", lambda handle: flushed.wait(30))

    async def scene() -> None:
        new, _ = opened(tmp_path)
        async with asyncio.timeout(10):
            for row, name in enumerate("abc"):
                await new.append([record(name, row)])
        assert keys(tmp_path) == ["a", "b", "c"]
        flushed.set()
        await new.close(seal=False)

    asyncio.run(scene())


def test_a_number_is_never_used_twice(tmp_path: Path) -> None:
    (tmp_path / "journal-000001.jsonl").write_bytes(line_of(record("a")))
    seal(tmp_path / "journal-000001.jsonl", tmp_path / "part-000001.parquet")
    asyncio.run(kept(tmp_path, [record("b", 1)]))
    assert names(tmp_path) == ["journal-000002.jsonl", "part-000001.parquet"]


def test_a_store_that_takes_nothing_leaves_nothing(tmp_path: Path) -> None:
    assert asyncio.run(kept(tmp_path, seal=True)) == []
    assert names(tmp_path) == []


def test_full_journals_and_what_is_left_at_the_end_are_sealed_by_a_process_of_their_own(tmp_path: Path) -> None:
    told = asyncio.run(kept(tmp_path, [record("b", 1)], [record("a", 0), record("c", 2)], segment=1000, seal=True))
    assert told == []
    assert keys(tmp_path) == ["a", "b", "c"]
    assert {Path(name).suffix for name in names(tmp_path)} == {".parquet"}


def test_a_journal_that_cannot_be_sealed_stays_and_is_told(tmp_path: Path) -> None:
    (tmp_path / ".part-000001.parquet").mkdir()
    (told,) = asyncio.run(kept(tmp_path, [record("a")], seal=True))
    assert told.startswith("warn: journal-000001.jsonl could not be sealed and stays as it is, whole: ")
    assert keys(tmp_path) == ["a"]


# -- what a death leaves behind ----------------------------------------------------------------------------------------
def test_a_journal_beside_its_part_is_a_leftover(tmp_path: Path) -> None:
    journal = tmp_path / "journal-000001.jsonl"
    lines = line_of(record("a")) + line_of(record("b", 1))
    journal.write_bytes(lines)
    seal(journal, tmp_path / "part-000001.parquet")
    journal.write_bytes(lines)
    assert store.recover(tmp_path) == []
    assert names(tmp_path) == ["part-000001.parquet"]
    assert keys(tmp_path) == ["a", "b"]


def test_a_part_that_was_being_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "journal-000001.jsonl").write_bytes(line_of(record("a")))
    (tmp_path / ".part-000001.parquet").write_bytes(b"PAR1 half")
    store.recover(tmp_path)
    assert names(tmp_path) == ["journal-000001.jsonl"]
    assert keys(tmp_path) == ["a"]


# -- sealed parts ------------------------------------------------------------------------------------------------------
RICH = record(
    "模",
    5,
    sample=1,
    turn=2,
    tools=msgspec.Raw(b'[{"type":"function"}]'),
    text="<think>a</think>\u2028🙂",
    parts=Parts(7, 8, 16, 18),
    labels=("truncated_in_answer", "repetition"),
    accept_length=2.5,
    error="why",
)
BARE = record("b", 6, prompt_ids=NULL, output_ids=NULL, text="", parts=Parts(0, 0, 0, 0), labels=("aborted",))


def sealed(data: Path, *records: Record) -> list[Record]:
    (data / "journal-000001.jsonl").write_bytes(b"".join(map(line_of, records)))
    assert seal(data / "journal-000001.jsonl", data / "part-000001.parquet") == len(records)
    assert names(data) == ["part-000001.parquet"]
    return list(dataset.records(data))


@pytest.mark.parametrize(
    "stored",
    [
        RICH,
        BARE,
        record("fractions", repetition=8.3, seconds=1.234, accept_length=2.345),
    ],
    ids=lambda stored: stored.key,
)
def test_a_sealed_record_is_the_same_record(tmp_path: Path, stored: Record) -> None:
    assert sealed(tmp_path, stored) == [stored]


def test_a_part_is_in_the_prompts_order(tmp_path: Path) -> None:
    places = [(n * 7 % 300, sample) for n in range(300) for sample in (1, 0)]
    found = sealed(tmp_path, *(record(f"{row}-{sample}", row, sample=sample) for row, sample in places))
    assert [(one.row, one.sample) for one in found] == sorted(places)


def test_a_journal_without_a_whole_line_leaves_no_part(tmp_path: Path) -> None:
    journal = tmp_path / "journal-000001.jsonl"
    journal.write_bytes(b"nothing\nwhole\n")
    assert seal(journal, store.part_of(journal)) == 0
    assert names(tmp_path) == ["torn.bin"]


# -- a full disk -------------------------------------------------------------------------------------------------------
@contextmanager
def tmpfs(folder: Path) -> Iterator[None]:
    """64 KB of room."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def limited(folder: Path) -> Iterator[None]:
    """No file may have more than 64 KB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("disk", [tmpfs, limited])
def test_a_failed_write_leaves_the_file_whole_and_the_records_in_hand(tmp_path: Path, disk: type) -> None:
    async def fill() -> None:
        new, _ = opened(tmp_path)
        await new.append([record("first")])
        batch = [record(f"big{row}", row, text="x" * 30_000) for row in range(1, 4)]
        with pytest.raises(StoreError, match=errno_words()) as caught:
            await new.append(batch)
        assert caught.value.fix == f"df -h {tmp_path}"
        assert (new.rows, new.unsaved) == (1, batch)
        await new.append([record("small", 100)])
        await new.close(seal=False)

    with disk(tmp_path):
        asyncio.run(fill())
        assert keys(tmp_path) == ["first", "small"]
        assert all(map(is_whole, (tmp_path / "journal-000001.jsonl").read_bytes().splitlines()))


def errno_words() -> str:
    return "|".join(os.strerror(code) for code in (errno.ENOSPC, errno.EFBIG))


# -- a disk that fails otherwise ---------------------------------------------------------------------------------------
def failing(patch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """The next calls of a function of os fail with EIO; of a write, half of it is on the disk by then."""
    real, left = getattr(os, name), [times]

    def call(*args: Any) -> Any:
        if not left[0]:
            return real(*args)
        left[0] -= 1
        if name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, name, call)


def test_a_line_that_could_be_neither_finished_nor_cut_is_cut_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        new, _ = opened(tmp_path)
        await new.append([record("a")])
        failing(monkeypatch, "write", 1)
        failing(monkeypatch, "ftruncate", 3)
        for _ in range(2):  # the write, and its cut; the cut before the next, and the one after it
            with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
                await new.append([record("b", 1)])
        await new.append([record("c", 2)])
        await new.append([record("d", 3)])
        await new.close(seal=False)

    asyncio.run(scene())
    assert keys(tmp_path) == ["a", "c", "d"]
    assert all(map(is_whole, (tmp_path / "journal-000001.jsonl").read_bytes().splitlines()))


@pytest.mark.parametrize("earlier", [False, True])
def test_a_journal_is_opened_once_though_its_name_could_not_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """Opened again when it was full, it might be unlinked by the process that seals it, with new rows in it."""
    if earlier:
        asyncio.run(kept(tmp_path, [record("old", 9)]))

    async def scene() -> None:
        new, _ = opened(tmp_path, 1000)
        failing(monkeypatch, "fsync", 1)
        with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
            await new.append([record("a")])
        for row, name in enumerate("ab"):
            await new.append([record(name, row, text="x" * 1000)])
        await new.close(seal=True)

    asyncio.run(scene())
    assert keys(tmp_path) == [*"ab", *["old"] * earlier]
    assert names(tmp_path) == ["part-000001.parquet", "part-000002.parquet"], "each was full with its row"


def test_what_a_journal_that_is_gone_did_not_take_stays_in_hand(tmp_path: Path) -> None:
    async def scene() -> None:
        new, _ = opened(tmp_path)
        await new.append([record("a")])
        journal = tmp_path / "journal-000001.jsonl"
        journal.rename(tmp_path / "away")
        with pytest.raises(VanishedError, match="was removed or moved away"):
            await new.append([record("b", 1)])
        assert [left.key for left in new.unsaved] == ["b"]
        (tmp_path / "away").rename(journal)
        await new.append(new.unsaved)
        await new.close(seal=False)

    asyncio.run(scene())
    assert keys(tmp_path) == ["a", "b"]

"""A journal that was cut anywhere, or in which any bit is another: the rows that are whole come back as they were, the
others are not done, and nothing else is ever read. A hundred rows; `--long` takes every byte of the last ten of them,
and 10,000 bits."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.unit.make import record
from tokenmill import dataset, store
from tokenmill.core.records import Record
from tokenmill.seal import seal
from tokenmill.store import Store, line_of

ROWS = [
    record(f"k{row}", row, text=f"<think>\n{row} 🙂\u2028</think>\n\nanswer {row * 7}", labels=("truncated_in_answer",))
    for row in range(100)
]
LINES = [line_of(row) for row in ROWS]
WHOLE = b"".join(LINES)
BY_KEY = {row.key: row for row in ROWS}
NEW = record("new", 100)


def journal(data: Path, content: bytes) -> Path:
    """The only file of the store."""
    for old in data.iterdir():
        old.unlink()
    path = data / "journal-000001.jsonl"
    path.write_bytes(content)
    return path


def read(data: Path) -> dict[str, Record]:
    """What is stored, once; the accounts of a start see the same ids."""
    found = {row.key: row for row in dataset.records(data)}
    assert sorted(brief.key for brief in dataset.briefs(data)) == sorted(found)
    return found


def cut(data: Path, end: int) -> None:
    """After a start on a journal of so many bytes, its whole lines are there, and one more can be written."""
    journal(data, WHOLE[:end])
    store.recover(data)
    whole = WHOLE[:end].count(b"\n")
    if end < len(WHOLE) and WHOLE[end : end + 1] == b"\n":
        whole += 1  # it lacks its newline only
    assert list(read(data).values()) == ROWS[:whole], f"cut after {end} bytes"

    async def append() -> None:
        after = Store(data, 1 << 30, lambda text, level: None)
        await after.append([NEW])
        await after.close(seal=False)

    if end % 97 == 0:
        asyncio.run(append())
        assert list(read(data).values()) == [*ROWS[:whole], NEW], f"cut after {end} bytes"


def flip(data: Path, bit: int, *, sealed: bool) -> None:
    """Every row that is read is one that was written; a bit costs two of them at most, where it was a line's end."""
    spoilt = bytearray(WHOLE)
    spoilt[bit // 8] ^= 1 << bit % 8
    path = journal(data, bytes(spoilt))
    store.recover(data)
    found = read(data)
    assert all(row == BY_KEY[key] for key, row in found.items()), f"bit {bit}"
    assert len(found) >= len(ROWS) - 2, f"bit {bit}"
    if sealed:
        assert seal(path, store.part_of(path)) == len(found), f"bit {bit}"
        assert read(data) == found, f"bit {bit}"


def test_a_journal_cut_in_its_last_line_keeps_its_whole_lines(tmp_path: Path) -> None:
    last, end = len(WHOLE) - len(LINES[-1]), len(WHOLE)
    for place in (
        *range(last - 300, last, 13),
        *range(last - 9, last + 10),
        *range(last, end, 7),
        *range(end - 60, end),
    ):
        cut(tmp_path, place)


def test_a_bit_that_is_another_costs_its_row_and_no_more(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    for number, bit in enumerate(random.Random(seed).sample(range(8 * len(WHOLE)), 60)):
        flip(tmp_path, bit, sealed=number % 10 == 0)


def test_a_bit_of_a_lines_end_costs_two_rows(tmp_path: Path) -> None:
    end = len(LINES[0]) - 1
    for bit in range(8 * end, 8 * end + 8):
        flip(tmp_path, bit, sealed=True)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_journal_cut_at_any_byte_of_its_end_keeps_its_whole_lines(tmp_path: Path) -> None:
    for end in range(len(WHOLE) - sum(map(len, LINES[-10:])), len(WHOLE) + 1):
        cut(tmp_path, end)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_thousand_bits_that_are_others_cost_their_rows_and_no_more(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    for number, bit in enumerate(random.Random(seed).sample(range(8 * len(WHOLE)), 10_000)):
        flip(tmp_path, bit, sealed=number % 10 == 0)

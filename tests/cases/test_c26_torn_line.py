"""C26: a torn line costs its own row only: kept aside and asked again; the next append never joins it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.harness import Case, answered_prompts, assert_whole
from tests.unit.make import record
from tokenmill import dataset, events, settings, store
from tokenmill.events import EventLog
from tokenmill.seal import seal
from tokenmill.settings import Settings
from tokenmill.store import Store, line_of


def _line(number: int) -> bytes:
    return line_of(record(f"p{number}", number, text=f"an answer 🙂 to {number}"))


GOOD = b"".join(map(_line, range(3)))
HALF = _line(3)[: len(_line(3)) // 2]
HALF_CHARACTER = _line(3)[: _line(3).index("🙂".encode()) + 2]
WRONG_SUM = _line(3).replace(b"an answer", b"An answer")
FUSED = HALF + _line(4)


@pytest.mark.parametrize(
    ("before", "kept", "rows", "aside"),
    [
        pytest.param(GOOD + HALF, GOOD, [0, 1, 2], HALF, id="half a line"),
        pytest.param(GOOD + HALF_CHARACTER, GOOD, [0, 1, 2], HALF_CHARACTER, id="half a character"),
        pytest.param(GOOD + bytes(4096), GOOD, [0, 1, 2], bytes(4096), id="zeros, as a power failure leaves them"),
        pytest.param(GOOD[:-1], GOOD, [0, 1, 2], b"", id="whole but for its newline"),
        pytest.param(HALF, b"", [], HALF, id="nothing but half a line"),
        pytest.param(b"", b"", [], b"", id="empty"),
        pytest.param(b"\n", b"\n", [], b"", id="only a newline"),
        pytest.param(GOOD.replace(b"\n", b"\r\n"), GOOD.replace(b"\n", b"\r\n"), [0, 1, 2], b"", id="CRLF"),
    ],
)
def test_a_torn_tail_is_cut_and_kept_aside(
    tmp_path: Path, before: bytes, kept: bytes, rows: list[int], aside: bytes
) -> None:
    journal = tmp_path / "journal-000001.jsonl"
    journal.write_bytes(before)
    told = store.recover(tmp_path)
    asyncio.run(_append(tmp_path, 9))
    assert journal.read_bytes() == kept + _line(9)
    assert [found.row for found in dataset.records(tmp_path)] == [*rows, 9]
    torn = tmp_path / "torn.bin"
    assert (torn.read_bytes() if torn.exists() else b"") == (aside + b"\n" if aside else b"")
    words = f"{journal.name}: cut {len(aside)} bytes of an unfinished line (kept in torn.bin)"
    assert told == ([words] if aside else [])


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"not JSON\n", id="no JSON"),
        pytest.param(WRONG_SUM, id="a wrong checksum"),
        pytest.param(FUSED, id="two lines in one"),
        pytest.param(b"\xff\xfe\x00\n", id="no text"),
    ],
)
def test_a_bad_line_in_the_middle_is_told_by_number_and_the_rest_is_read(tmp_path: Path, bad: bytes) -> None:
    journal = tmp_path / "journal-000001.jsonl"
    journal.write_bytes(GOOD + bad + _line(5))
    assert store.recover(tmp_path) == []
    assert journal.read_bytes() == GOOD + bad + _line(5), "what others may want to look at is left as it is"
    told: list[str] = []
    assert sorted(found.key for found in dataset.briefs(tmp_path, told.append)) == ["p0", "p1", "p2", "p5"]
    assert told == ["journal-000001.jsonl:4: not a whole record; its id counts as not done"]
    assert [found.key for found in dataset.records(tmp_path)] == ["p0", "p1", "p2", "p5"]

    assert seal(journal, store.part_of(journal)) == 4
    assert [found.key for found in dataset.records(tmp_path)] == ["p0", "p1", "p2", "p5"]
    assert (tmp_path / "torn.bin").read_bytes() == bad


def test_a_run_goes_on_after_a_torn_tail_and_a_damaged_line(case: Case) -> None:
    log = case.folder / "requests.jsonl"
    case.write(engine={"args": {"slots": 4, "latency-ms": 150, "requests": str(log)}})
    process = case.start()
    case.until_done(16, process)
    assert process.poll() is None, case.output()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    journal = case.run_path / "data" / "journal-000001.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"ANSWER", b"answer")
    lines[-1] = lines[-1][:-20]
    journal.write_bytes(b"".join(lines))
    assert case.run() == 0
    assert_whole(case, {f"p{n}" for n in range(40)})
    assert "journal-000001.jsonl: cut " in case.output()
    assert "journal-000001.jsonl:5: not a whole record" in case.output()
    assert answered_prompts(log).total() <= 40 + 8 + 2


def test_a_torn_settings_row_is_written_again(tmp_path: Path) -> None:
    row = Settings("abc", {"model": "m"}, "fake", "", {})
    settings.keep(tmp_path, row)
    file = tmp_path / "settings.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    settings.keep(tmp_path, row)
    assert settings.read(tmp_path) == [row]
    rendered = replace(row, first_prompt="<user>hello")
    for kept in (rendered, row):  # a row from before any server had rendered gets its first prompt, and keeps it
        settings.keep(tmp_path, kept)
        assert settings.read(tmp_path) == [rendered]


def test_an_event_after_a_torn_one_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).say("run", "first")
    EventLog(path).say("run", "torn")
    path.write_bytes(path.read_bytes()[:-10])
    EventLog(path).say("run", "after")
    assert [event.text for event, _ in events.read(path)] == ["first", "after"]


async def _append(data: Path, number: int) -> None:
    opened = Store(data, 10**9, lambda text, level: None)
    await opened.append([record(f"p{number}", number, text=f"an answer 🙂 to {number}")])
    await opened.close(seal=False)

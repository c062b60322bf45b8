"""The copier: every byte in its place whatever the sizes, nothing under a name that is not right, streams that pay."""

import random
from pathlib import Path

import pytest

from tests.conftest import Slow
from tests.staging import contents
from tokenmill.machine import copying
from tokenmill.machine.copying import BLOCK, FIRST_STREAMS, MOST_STREAMS, Copier, Moment, Ramp
from tokenmill.machine.sources import listing


def ignore(moment: Moment) -> None:
    """Nothing to look at."""


def copy(source: Path, target: Path, look: copying.Look = ignore, *, direct: bool = True) -> None:
    Copier(listing(source), target, sync=False, direct=direct).run(look)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("mounted", [False, True])
def test_files_of_all_sizes_arrive_with_every_byte_in_its_place(
    tmp_path: Path, slow: Slow, mounted: bool, direct: bool
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    sizes = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, *(draw.randrange(12 * BLOCK) for _ in range(4))]
    for number, size in enumerate(sizes):
        path = tmp_path / "source" / f"folder-{number % 3}" / f"file-{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(size))
    copy(slow(tmp_path / "source") if mounted else tmp_path / "source", tmp_path / "target", direct=direct)
    assert contents(tmp_path / "target") == contents(tmp_path / "source")


def test_one_large_file_is_read_by_many_streams_and_is_right(tmp_path: Path, slow: Slow) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(random.Random(1).randbytes(96 * BLOCK + 17))
    most = 0

    def look(moment: Moment) -> None:
        nonlocal most
        most = max(most, moment.streams)

    copy(slow(tmp_path / "source", "--latency-ms", "30"), tmp_path / "target", look)
    assert contents(tmp_path / "target") == contents(tmp_path / "source")
    assert most > FIRST_STREAMS, "more streams pay where each read costs a round trip"


def test_a_read_that_fails_now_and_then_is_tried_again(tmp_path: Path, slow: Slow) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(random.Random(2).randbytes(5 * BLOCK))
    copy(slow(tmp_path / "source", "--fail-reads", "6"), tmp_path / "target")
    assert contents(tmp_path / "target") == contents(tmp_path / "source")


def test_a_source_that_cannot_be_read_is_named_and_nothing_gets_its_name(
    tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "READ_PAUSE_S", 0.01)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(bytes(3 * BLOCK))
    with pytest.raises(OSError, match=r"mount-source/weights cannot be read: Input/output error"):
        copy(slow(tmp_path / "source", "--fail-reads", "100000"), tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["weights.partial"]


@pytest.mark.parametrize("change", ["shorter", "longer", "other bytes"])
def test_a_source_that_changes_meanwhile_fails(tmp_path: Path, slow: Slow, change: str) -> None:
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "weights"
    file.write_bytes(bytes(20 * BLOCK))
    changed = False

    def look(moment: Moment) -> None:
        nonlocal changed
        if moment.done and not changed:
            changed = True
            size = {"shorter": BLOCK, "longer": 21 * BLOCK}.get(change, 20 * BLOCK)
            aside = file.with_name(".aside")
            aside.write_bytes(b"\1" * size)
            aside.rename(file)

    with pytest.raises(OSError, match="mount-source/weights changed while it was copied"):
        copy(slow(tmp_path / "source", "--latency-ms", "100"), tmp_path / "target", look)
    assert not (tmp_path / "target" / "weights").exists()


def test_bytes_that_read_back_otherwise_fail(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(bytes(2 * BLOCK))
    copier = Copier(listing(tmp_path / "source"), tmp_path / "target", sync=False)
    part = copier._parts[0]
    copier._prepare(part)
    part.hashes[1] = 1
    with (
        part.partial.open("r+b") as target,
        pytest.raises(OSError, match=f"reads back otherwise than it was written, at byte {BLOCK}"),
    ):
        copier._write(part, 1, memoryview(bytearray(BLOCK)), target.fileno())


def test_whatever_the_watch_raises_ends_the_copy_before_any_name_is_given(tmp_path: Path, slow: Slow) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(bytes(20 * BLOCK))

    def look(moment: Moment) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(slow(tmp_path / "source", "--latency-ms", "20"), tmp_path / "target", look)
    assert not (tmp_path / "target" / "weights").exists()


# -- how many streams --------------------------------------------------------------------------------------------------
def streams(rates: dict[int, float], windows: int = 20) -> list[int]:
    """The numbers of streams over time, where so many bring such rates."""
    ramp = Ramp()
    return [ramp.streams, *(ramp.seen(rates[ramp.streams]) for _ in range(windows))]


def test_streams_are_added_while_each_brings_as_much_as_the_first() -> None:
    assert streams({1 << n: float(1 << n) for n in range(8)})[-1] == MOST_STREAMS


def test_streams_stop_where_the_mount_has_no_more_to_give() -> None:
    assert streams({8: 100.0, 16: 190.0, 32: 195.0})[-1] == 16


def test_fewer_streams_are_tried_where_more_cost() -> None:
    assert streams({1: 90.0, 2: 200.0, 4: 210.0, 8: 100.0, 16: 50.0})[-1] in (2, 4)


def test_one_bad_window_ends_no_climb() -> None:
    ramp = Ramp()
    seen = [ramp.seen(rate) for rate in (100.0, 110.0, 200.0, 400.0)]
    assert seen == [16, 16, 32, 64]


def test_a_mount_that_others_have_left_is_looked_at_again() -> None:
    crowded = dict.fromkeys((4, 8, 16, 32, 64), 100.0)
    ramp = Ramp()
    for _ in range(10):
        ramp.seen(crowded[ramp.streams])
    settled = ramp.streams
    for _ in range(2 * copying.REST_WINDOWS):
        ramp.seen(10.0 * ramp.streams)
    assert (settled, ramp.streams) == (8, 64)

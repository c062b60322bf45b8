"""A copy: whatever is stored, copied and killed, a lost machine's run comes back as the newest whole copy has it."""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.make import record
from tokenmill import dataset, store
from tokenmill.backup import layout, restore
from tokenmill.backup.keeper import wait_s
from tokenmill.backup.layout import DamagedError, Holder, Lease
from tokenmill.backup.restore import TOLD
from tokenmill.backup.round import MOST_PIECES, Order, Reply, visit
from tokenmill.folder import RunFolder
from tokenmill.machine import processes
from tokenmill.machine.processes import ProcessId
from tokenmill.seal import seal
from tokenmill.store import line_of

GONE = ProcessId(2**22 + 1, 1, processes.boot_id())
"""A process of this machine that does not live: no pid is as high."""


class KilledError(Exception):
    """What a test raises in the middle of a round."""


@pytest.fixture(autouse=True)
def every_life_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lives of a test follow each other in one process: a lease must not seem to be held by it."""
    monkeypatch.setattr(layout, "this_process", lambda life: Holder(life, socket.gethostname(), GONE))


@dataclass
class World:
    """A run folder and its copy. `told` are the warnings; `life` changes at every start."""

    at: Path
    number: int = 0
    rows: int = 0
    told: list[str] = field(default_factory=list)
    snapshots: dict[int, set[str]] = field(default_factory=dict)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.at / "run")

    @property
    def target(self) -> Path:
        return self.at / "copy" / "case"

    def start(self) -> Reply:
        """A new life begins."""
        self.number += 1
        self.folder.create()
        self.target.parent.mkdir(exist_ok=True)
        return self.visit("begin")

    def visit(self, kind: str, die_at: int = -1) -> Reply:
        left = die_at

        def sign() -> None:
            nonlocal left
            if left == 0:
                raise KilledError
            left -= 1

        order = Order(kind, str(self.folder.path), str(self.target), "case", f"{self.number:08x}", 3600.0)  # type: ignore[arg-type]
        return visit(order, lambda reply: self.told.append(reply.text), sign)

    def append(self, count: int, torn: bytes = b"") -> None:
        """Rows in the newest journal, or the first line of one."""
        data = self.folder.data
        newest = max((*store.journals(data), *store.parts(data)), key=store.number_of, default=None)
        if newest is None or newest.suffix == ".parquet":
            newest = data / f"journal-{store.number_of(newest) + 1 if newest else 1:06d}.jsonl"
        with newest.open("ab") as out:
            for _ in range(count):
                self.rows += 1
                out.write(line_of(record(f"k{self.rows}", self.rows)))
            out.write(torn)

    def rotate(self) -> None:
        journals = store.journals(self.folder.data)
        if journals:
            journals[-1].with_name(f"journal-{store.number_of(journals[-1]) + 1:06d}.jsonl").touch()

    def seal(self) -> None:
        for journal in store.journals(self.folder.data)[:1]:
            seal(journal, store.part_of(journal))

    def roll_back(self) -> None:
        """A failed write takes its lines back, and others come."""
        for journal in store.journals(self.folder.data)[-1:]:
            lines = journal.read_bytes().splitlines(keepends=True)
            journal.write_bytes(b"".join(lines[:-1]))
            self.append(1)

    def copy(self, die_at: int = -1) -> None:
        """A round, perhaps cut short; the snapshot is what is stored when its manifest is there."""
        names, stored = layout.listing(self.target), self.keys()
        try:
            reply = self.visit("round", die_at)
            assert reply.kind == "done", reply
        except KilledError:
            pass
        for manifest in layout.manifests(self.target, layout.listing(self.target) - names):
            self.snapshots[manifest.number] = stored

    def lose(self) -> None:
        """The machine is lost; another goes on."""
        shutil.rmtree(self.folder.path)
        expected = self.newest()
        reply = self.start()
        if expected is None and layout.unreadable(self.target, layout.listing(self.target)):
            # Its very first manifest was being written when all else was lost: somebody must say that it begins anew.
            assert reply.kind == "StoreError", reply
            shutil.rmtree(self.target)
            reply = self.start()
        assert reply.kind == ("done" if expected is None else "restored"), reply
        assert self.keys() == (set() if expected is None else self.snapshots[expected])

    def restart(self) -> None:
        store.recover(self.folder.data)
        if self.keys():
            assert self.start().kind == "done"

    def newest(self) -> int | None:
        found = next(layout.whole(self.target, layout.listing(self.target)), None)
        return found.number if found else None

    def keys(self) -> set[str]:
        return {found.key for found in dataset.records(self.folder.data)}


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    assert made.start().kind == "done"
    return made


# -- whatever happens --------------------------------------------------------------------------------------------------
OPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4)),
    st.tuples(st.just("append_torn"), st.integers(0, 2)),
    st.tuples(st.just("copy"), st.just(-1)),
    st.tuples(st.just("copy"), st.integers(0, 40)),
    st.tuples(st.sampled_from(["rotate", "seal", "roll_back", "restart", "lose"]), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(ops=st.lists(OPS, max_size=25))
def test_a_lost_machine_comes_back_as_the_newest_whole_copy_has_it(
    tmp_path_factory: pytest.TempPathFactory, ops: list[tuple[str, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # most of the time, and no power fails here
        patch.setattr(layout, "CHUNK", 512)
        patch.setattr("tokenmill.backup.round.MOST_PIECES", 3)
        world = World(tmp_path_factory.mktemp("world"))
        world.start()
        for name, number in [*ops, ("copy", -1), ("lose", 0), ("append", 1), ("copy", -1), ("lose", 0)]:
            if name == "append":
                world.append(number)
            elif name == "append_torn":
                world.append(number, b'{"key":"half a li')
                world.copy()
                world.restart()  # the torn end is cut, and the rows that follow stand where it was
            elif name == "copy":
                world.copy(number)
            else:
                getattr(world, name)()
        # A manifest that its writer died in is all that may be complained of.
        assert [text for text in world.told if "is damaged: the copy before it" not in text] == []
        shutil.rmtree(world.at)


# -- what a round writes -----------------------------------------------------------------------------------------------
def new_files(world: World) -> list[str]:
    """What a round adds, but for manifests and leases."""
    before = layout.listing(world.target)
    world.copy()
    added = sorted(layout.listing(world.target) - before)
    return [name.partition(".r0")[0] for name in added if not name.startswith(("copy-", "lease-"))]


def test_a_round_copies_only_what_is_new(world: World) -> None:
    world.folder.events.write_bytes(b'{"t":1}\n')
    world.folder.config.write_text("a = 1")
    world.append(2)
    assert new_files(world) == ["config", "events.from-000000000000", "journal-000001.from-000000000000"]
    assert new_files(world) == []
    size = store.journals(world.folder.data)[0].stat().st_size
    world.append(1, b"half a line")
    assert new_files(world) == [f"journal-000001.from-{size:012d}"]
    assert new_files(world) == []
    store.recover(world.folder.data)
    world.seal()
    assert new_files(world) == ["part-000001"]
    world.folder.config.write_text("a = 2")
    assert new_files(world) == ["config"]


def test_lines_that_a_failed_write_took_back_are_not_in_the_next_copy(world: World) -> None:
    world.append(3)
    world.copy()
    before = world.keys()
    world.roll_back()
    assert len(world.keys() ^ before) == 2
    world.copy()
    world.roll_back()
    world.append(2)
    world.copy()
    world.lose()


def test_half_a_line_is_not_copied(world: World) -> None:
    world.append(2)
    whole = store.journals(world.folder.data)[0].read_bytes()
    world.append(0, b"half a line")
    world.copy()
    shutil.rmtree(world.folder.path)
    world.start()
    assert store.journals(world.folder.data)[0].read_bytes() == whole


def test_what_somebody_removed_from_the_copy_is_copied_again(world: World) -> None:
    world.append(2)
    world.copy()
    for path in world.target.glob("journal-*"):
        path.unlink()
    world.copy()
    world.lose()
    assert len(world.keys()) == 2


def test_the_last_two_whole_copies_stay_and_nothing_else(world: World) -> None:
    for _ in range(5):
        world.append(1)
        world.copy()
    world.seal()
    for _ in range(3):
        world.copy()
    names = layout.listing(world.target)
    kept = list(layout.whole(world.target, names))
    assert [manifest.number for manifest in kept] == [8, 7]
    leases = {name for name in names if name.startswith("lease-")}
    manifests = {name for name in names if name.startswith("copy-")}
    assert len(leases) == 1
    assert names - leases - manifests == kept[0].names | kept[1].names
    assert not any(name.startswith("journal") for name in names)


def test_a_file_that_grows_for_weeks_is_no_thousand_pieces(world: World) -> None:
    for _ in range(MOST_PIECES + 2):
        world.append(1)
        world.copy()
    newest = next(layout.whole(world.target, layout.listing(world.target)))
    assert max(len(file.pieces) for file in newest.files) <= MOST_PIECES
    world.lose()


def test_a_journal_that_is_sealed_in_the_middle_of_a_round_is_in_its_copy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append(2)
    look, stored = store.parts, world.keys()

    def sealed_first(data: Path) -> list[Path]:
        if store.journals(data):
            world.seal()
        return look(data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "parts", sealed_first)
        assert world.visit("round").kind == "done"
    assert len(look(world.folder.data)) == 1
    world.snapshots[1] = stored
    world.lose()


def test_a_failed_round_costs_none_of_what_was_verified(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        world.append(1)
        world.rotate()
        world.seal()
    whole = layout.put

    def full(path: Path, content: Iterator[bytes], sign: layout.Sign) -> tuple[int, str]:
        if path.name.startswith("part-000003"):
            raise OSError(28, "No space left on device", str(path))
        return whole(path, content, sign)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "put", full)
        reply = world.visit("round")
    assert (reply.kind, reply.text.partition(": ")[2]) == ("OSError", "No space left on device")
    assert world.newest() is None
    assert [name for name in new_files(world) if name.startswith("part")] == ["part-000003"]
    world.lose()


def test_what_is_lost_here_is_not_copied_over(world: World) -> None:
    world.append(2)
    world.rotate()
    world.seal()
    world.append(1)
    world.copy()
    store.parts(world.folder.data)[0].unlink()
    reply = world.visit("round")
    assert reply.kind == "StoreError"
    assert "part-000001.parquet is gone, and only its copy is left" in reply.text
    world.lose()
    assert len(world.keys()) == 3


def test_a_mount_that_goes_away_does_not_fill_the_disk_below_it(world: World) -> None:
    world.append(1)
    point = world.target.parent
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", point], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        world.copy()
    finally:
        subprocess.run(["umount", "-l", point], check=True)
    before = list(point.rglob("*"))
    reply = world.visit("round")
    assert (reply.kind, reply.text.partition(": ")[0]) == ("OSError", str(point))
    assert "its mount is gone" in reply.text
    assert world.visit("begin").kind == "OSError"
    assert list(point.rglob("*")) == before


# -- damage ------------------------------------------------------------------------------------------------------------
def damaged(world: World, harm: str) -> None:
    """Two layout, the newer one damaged in a file that the older one has not."""
    world.append(3)
    world.copy()
    world.append(3)
    world.copy()
    newer, older = list(layout.whole(world.target, layout.listing(world.target)))
    (name,) = newer.names - older.names
    path = world.target / name
    content = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(content[:-1])
    else:
        content[random.randrange(len(content))] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped"])
def test_where_the_newest_copy_is_damaged_the_one_before_it_is_taken_and_told(world: World, harm: str) -> None:
    damaged(world, harm)
    shutil.rmtree(world.folder.path)
    assert world.start().kind == "restored"
    assert world.keys() == world.snapshots[1]
    assert [text.partition(":")[0] for text in world.told] == ["copy 2 cannot be restored"]
    world.append(1)
    world.copy()
    world.lose()
    assert len(world.keys()) == 4


def test_a_flipped_bit_in_a_manifest_is_noticed_wherever_it_is(world: World) -> None:
    """Seen: one in a file's name, and the copy came back "verified", without that file."""
    world.append(3)
    world.copy()
    world.append(3)
    world.copy()
    (path,) = world.target.glob("copy-000002-*")
    whole = path.read_bytes()
    for at in random.sample(range(len(whole)), 40):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        shutil.rmtree(world.folder.path)
        world.told.clear()
        assert world.start().kind == "restored", at
        assert world.keys() == world.snapshots[1], at
        assert world.told == [f"{path} is damaged: the copy before it is used"]


def test_a_run_is_not_begun_anew_over_a_copy_whose_manifests_are_all_damaged(world: World) -> None:
    world.append(3)
    world.copy()
    pieces = set(world.target.glob("journal-*"))
    for path in world.target.glob("copy-*"):
        path.write_bytes(b"X" + path.read_bytes()[1:])
    shutil.rmtree(world.folder.path)
    reply = world.start()
    assert (reply.kind, reply.fix) == ("StoreError", f"mv {world.target} {world.target}.old   begins anew")
    assert set(world.target.glob("journal-*")) == pieces


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty"])
def test_an_old_piece_that_rots_is_copied_anew_while_the_run_folder_has_it(world: World, harm: str) -> None:
    for _ in range(3):
        world.append(2)
        world.copy()
    piece = min(world.target.glob("journal-*"))
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 4
    piece.write_bytes({"flipped": bytes(content), "cut": bytes(content[:-1]), "empty": b""}[harm])
    for _ in range(5):  # more rounds than there are pieces: each is read back in its turn
        world.copy()
    world.lose()
    assert len(world.keys()) == 6


def test_an_empty_run_is_not_begun_on_copies_of_which_none_is_whole(world: World) -> None:
    world.append(1)
    world.copy()
    for path in world.target.glob("journal-*"):
        path.unlink()
    shutil.rmtree(world.folder.path)
    reply = world.start()
    assert (reply.kind, reply.fix) == ("StoreError", f"mv {world.target} {world.target}.old   begins anew")


def test_a_file_that_comes_back_other_than_it_was_written_is_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = []

    def sign() -> None:
        written.append(0)
        if len(written) == 2:  # it is written and closed, and now read back
            path.write_bytes(b"other")

    with pytest.raises(DamagedError, match="has other bytes than were written"):
        layout.put(path, iter([b"bytes"]), sign)
    assert not path.exists()


def test_a_death_while_restoring_leaves_an_empty_folder_that_is_restored_again(world: World) -> None:
    world.append(3)
    past = [world.folder.path / name for name in TOLD]
    for path in past:
        path.write_bytes(b"old\n")
    world.copy()
    shutil.rmtree(world.folder.path)
    world.number += 1
    world.folder.create()
    for path in past[:-2]:
        path.write_bytes(b"new\n")
    for die_at in range(100):
        try:
            reply = world.visit("begin", die_at)
        except KilledError:
            assert restore.is_empty(world.folder.data)
            continue
        assert reply.kind == "restored"
        break
    assert world.keys() == world.snapshots[1]
    assert [path.read_bytes() for path in past] == [b"old\nnew\n", b"old\nnew\n", b"old\n", b"old\n"]
    assert not (world.folder.path / ".restore").exists()


# -- whose it is -------------------------------------------------------------------------------------------------------
HERE, BOOT = socket.gethostname(), processes.boot_id()
ME = processes.identify(os.getpid()) or GONE


@pytest.mark.parametrize(
    ("host", "process", "left_s", "folder", "held"),
    [
        ("other", ProcessId(1, 1, "other"), 60.0, "f", True),
        ("other", ProcessId(1, 1, "other"), -1.0, "f", False),
        (HERE, ME, 60.0, "f", True),
        (HERE, GONE, 60.0, "f", False),  # killed, and started again at once
        (HERE, ProcessId(1, 1, "before"), 60.0, "mine", False),  # this machine has rebooted
        (HERE, ProcessId(1, 1, "before"), 60.0, "f", True),  # a container of the same name, elsewhere
    ],
)
def test_a_lease_is_held_until_it_ends_or_its_holder_is_known_to_be_gone(
    host: str, process: ProcessId, left_s: float, folder: str, held: bool
) -> None:
    lease = Lease(1, Holder("12345678", host, process), folder, time.time() + left_s)
    assert layout.is_held(lease, "mine") is held


def elsewhere(world: World, number: int = 1) -> Lease:
    """A lease of another machine, fresh."""
    holder = Holder("ffffffff", "gpu-7", ProcessId(4711, 1, "deadbeef-1"))
    lease = Lease(number, holder, "f", time.time() + 1800)
    (world.target / layout.lease_name(lease)).write_bytes(msgspec.json.encode(lease))
    return lease


def test_a_second_machine_is_refused_and_told_who_has_it_and_how_to_go_on(world: World) -> None:
    world.append(1)
    world.copy()
    shutil.rmtree(world.folder.path)
    lease = elsewhere(world, 99)
    before = layout.listing(world.target)
    reply = world.start()
    assert reply.kind == "UsageError"
    assert f"{world.target} is in use by tokenmill pid 4711 on gpu-7, boot deadbeef; its lease holds" in reply.text
    remove = reply.fix.partition("rm ")[2]
    assert remove == str(world.target / layout.lease_name(lease))
    assert layout.listing(world.target) == before
    assert restore.is_empty(world.folder.data)
    Path(remove).unlink()
    assert world.start().kind == "restored"


def test_a_run_that_was_taken_over_writes_no_more(world: World) -> None:
    world.append(1)
    world.copy()
    elsewhere(world, 99)
    world.append(1)
    before = layout.listing(world.target)
    assert world.visit("round").kind == "UsageError"
    assert layout.listing(world.target) == before


def test_a_folder_whose_run_went_on_elsewhere_is_refused(world: World, tmp_path: Path) -> None:
    world.append(1)
    world.copy()
    other = World(tmp_path / "other", number=100)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "copy").symlink_to(tmp_path / "copy")
    assert other.start().kind == "restored"
    other.append(1)
    other.copy()
    reply = world.start()
    assert reply.kind == "GuardError"
    assert "holds a copy that this run folder is not part of: number 2" in reply.text
    assert f"mv {world.folder.path} {world.folder.path}.old" in reply.fix
    assert world.visit("round").kind == "GuardError"
    assert other.start().kind == "done"


def test_a_lease_given_back_lets_another_machine_begin_at_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "this_process", lambda life: Holder(life, "gpu-1", ME))
    world.append(2)
    assert world.start().kind == "done"
    assert world.visit("end").kind == "done"
    monkeypatch.setattr(layout, "this_process", lambda life: Holder(life, "gpu-2", ME))
    shutil.rmtree(world.folder.path)
    assert world.start().kind == "restored"
    monkeypatch.setattr(layout, "this_process", lambda life: Holder(life, "gpu-3", ME))
    shutil.rmtree(world.folder.path)
    assert world.start().kind == "UsageError"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_manifest_that_its_writer_died_in_is_none(world: World, content: bytes) -> None:
    world.append(1)
    world.copy()
    (world.target / "copy-000099-ffffffff.json").write_bytes(content)
    (world.target / "lease-000099-ffffffff.json").write_bytes(content)
    world.lose()
    world.append(1)
    world.copy()
    assert world.newest() == 100


def test_a_copy_that_fails_is_tried_again_later_each_time_and_within_the_hour() -> None:
    assert [wait_s(600, failures) for failures in (0, 1, 2, 3, 10**6)] == [600, 1200, 2400, 3600, 3600]
    assert wait_s(7200, 5) == 7200

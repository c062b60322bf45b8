"""A visit to the copy, in a process of its own: python -m tokenmill.backup.round ORDER. Prints a sign of life a second.

A mount may hang for minutes, and a thread that hangs in it could never be ended: a process can. It dies with its run.

Each visit first asks whose the copy is. A round then copies what is new: sealed parts once, journals, events and
history by the whole lines that came since, and last of all the manifest. A restore puts them together (restore.py).
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TextIO

import msgspec
import xxhash
from msgspec.structs import replace

from tokenmill import store
from tokenmill.backup import layout, restore
from tokenmill.backup.layout import Copied, Lease, Manifest, Piece
from tokenmill.backup.restore import Book
from tokenmill.errors import GuardError, StoreError, TokenmillError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.machine import processes

NICE = 19
"""Serving and storing go first."""

SIGN_S = 1.0

MOST_PIECES = 32
"""Of a file: a long one that grows slowly would else be a thousand small files, of 50 ms each on an object store."""

SMALL = (
    *("config.toml", "environment.jsonl", "notified.json", "data/settings.jsonl", "data/prompts.json"),
    *("report.html", "report.json"),
)
"""Files that are copied whole when they have changed. The settings follow the records made with them."""

GROWING = ("events.jsonl", "history.jsonl")
"""Files of which the new lines are copied. Last: what they tell of is in the copy, too."""


class Order(msgspec.Struct, frozen=True):
    """`begin` also restores an empty run folder; `end` also gives the lease back. `lease_s`: how long it holds."""

    visit: Literal["begin", "round", "end"]
    folder: str
    target: str
    run: str
    life: str
    lease_s: float


class Reply(msgspec.Struct, frozen=True):
    """`kind` is done, restored, warn, or the name of an error; `time` of the newest whole copy, 0 for none."""

    kind: str
    text: str = ""
    fix: str = ""
    time: float = 0.0
    size: int = 0


Tell = Callable[[Reply], None]


class Visit:
    """One visit: raises UsageError where another life holds the copy, GuardError where it is of another run folder."""

    def __init__(self, order: Order, tell: Tell, sign: layout.Sign) -> None:
        self.order = order
        self.folder = RunFolder(Path(order.folder))
        self.target = Path(order.target)
        self.holder = layout.this_process(order.life)
        self.names: frozenset[str] = frozenset()
        self._tell = tell
        self._outer_sign = sign
        self._renewed = 0.0
        self._number = 0

    def run(self) -> Reply:
        """Does what was ordered."""
        restore.check_mount(self.folder, self.target)
        self.target.mkdir(exist_ok=True)  # no parents: where copy_to is missing, its mount may be
        self.names = layout.listing(self.target)
        self._refuse(self._others())
        lease = self._renew()
        try:
            self.names = layout.listing(self.target)
            # Two machines that begin at the same moment see each other's lease: the lower number goes on.
            self._refuse([other for other in self._others() if _rank(other) < _rank(lease)])
            newest = next(layout.manifests(self.target, self.names), None)
            if restored := self._own(newest):
                return restored
        except TokenmillError:
            self._renew(expires=0.0)
            raise
        if self.order.visit == "begin":
            return Reply("done", time=newest.time if newest else 0.0)
        manifest, size = self._round()
        if self.order.visit == "end":
            self._renew(expires=0.0)
        return Reply("done", time=manifest.time, size=size)

    # -- whose it is ---------------------------------------------------------------------------------------------------
    def _others(self) -> list[Lease]:
        folder = restore.read_book(self.folder).folder
        found = layout.leases(self.target, self.names)
        return [lease for lease in found if lease.holder.life != self.order.life and layout.is_held(lease, folder)]

    def _refuse(self, others: list[Lease]) -> None:
        for lease in others:
            raise self._held(lease)

    def _held(self, lease: Lease) -> UsageError:
        until = time.strftime("%H:%M:%S", time.localtime(lease.expires))
        file = self.target / layout.lease_name(lease)
        return UsageError(
            f"{self.target} is in use by tokenmill {lease.holder}; its lease holds until {until} if it is not renewed",
            fix=f"end it there; if that machine is dead, start again after {until}, or at once after: rm {file}",
        )

    def _renew(self, expires: float | None = None) -> Lease:
        until = time.time() + self.order.lease_s if expires is None else expires
        names, folder = layout.listing(self.target), restore.own_id(self.folder)
        lease = layout.write_lease(self.target, names, self.holder, folder, until)
        self._renewed = time.monotonic()
        return lease

    def _sign(self) -> None:
        self._outer_sign()
        if time.monotonic() - self._renewed > self.order.lease_s / 3:
            self._renew()

    def _own(self, newest: Manifest | None) -> Reply | None:
        """Whether the copy is one of this very run folder; restores the folder where it is empty."""
        empty = self.order.visit == "begin" and restore.is_empty(self.folder.data)
        bad = layout.unreadable(self.target, self.names) if empty else []
        if newest is None:
            if bad:
                raise StoreError(
                    f"{self.folder.path} is empty, and of the copy in {self.target} no manifest can be read",
                    fix=f"mv {self.target} {self.target}.old   begins anew",
                )
            return None
        if newest.run != self.order.run:
            raise GuardError(f"{self.target} holds a copy of the run {newest.run}", fix="set another output.copy_to")
        if empty:
            if bad:
                self._warn(f"{self.target / bad[0]} is damaged: the copy before it is used")
            found = restore.restore(self.target, self.names, self.folder, self._warn, self._sign)
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))
            words = f"restored from copy {found.number} of {when}, made by {found.holder}"
            return Reply("restored", f"{words}: {found.size / 1e6:,.1f} MB, verified", time=found.time, size=found.size)
        if not restore.read_book(self.folder).knows(newest):
            raise GuardError(
                f"{self.target} holds a copy that this run folder is not part of: number {newest.number}, "
                f"made by {newest.holder}",
                fix=f"mv {self.folder.path} {self.folder.path}.old   to go on from the copy, or another output.copy_to",
            )
        return None

    def _warn(self, text: str) -> None:
        self._tell(Reply("warn", text))

    # -- a round -------------------------------------------------------------------------------------------------------
    def _round(self) -> tuple[Manifest, int]:
        """Copies what is new; returns the manifest and the bytes that were written for it."""
        book = restore.read_book(self.folder)
        self._refuse_losses(book)
        known = {file.source: file for file in book.files if all(map(self._is_there, file.pieces))}
        self._number = layout.next_round(self.names)
        self._look_closer(known)
        files: dict[str, Copied] = {}
        written = 0
        for copied in self._files(known):
            files[copied.source] = copied
            if copied is not known.get(copied.source):
                written += copied.pieces[-1].size
                # A death or a failure from now on costs none of what is verified.
                restore.write_book(self.folder, replace(book, files=tuple({**known, **files}.values())))
        manifest = Manifest(self._number, self.order.run, book.folder, self.holder, time.time(), tuple(files.values()))
        layout.write_manifest(self.target, manifest, self._sign)
        restore.write_book(self.folder, replace(book, files=manifest.files))
        layout.prune(self.target, layout.listing(self.target), self.order.life)
        return manifest, written

    def _is_there(self, piece: Piece) -> bool:
        try:
            return (self.target / piece.name).stat().st_size == piece.size
        except FileNotFoundError:
            return False

    def _look_closer(self, known: dict[str, Copied]) -> None:
        """Reads one piece a round back: what has rotted is copied anew while the run folder still has it."""
        pieces = [(source, piece) for source, file in known.items() for piece in file.pieces]
        if not pieces:
            return
        source, piece = pieces[self._number % len(pieces)]
        try:
            for _ in layout.get(self.target / piece.name, piece.size, piece.xxh3, self._sign):
                pass
        except layout.DamagedError as error:
            self._warn(f"{error}: {source} is copied anew")
            del known[source]

    def _refuse_losses(self, book: Book) -> None:
        """What was copied and is lost here must not be superseded by a copy without it."""
        for file in book.files:
            path = self.folder.path / file.source
            is_data = file.source.startswith(("data/journal-", "data/part-"))
            if is_data and not path.exists() and not store.part_of(path).exists():
                raise StoreError(
                    f"{path} is gone, and only its copy is left: nothing is copied over that",
                    fix=f"mv {self.folder.path} {self.folder.path}.old   goes on from the copy at the next start",
                )

    def _files(self, known: dict[str, Copied]) -> Iterator[Copied]:
        """Journals are opened before parts are looked for: one that is sealed meanwhile is there either way."""
        opened = list(self._open_journals())
        try:
            parts = store.parts(self.folder.data)
            for part in parts:
                source = f"data/{part.name}"
                old = known.get(source)
                yield old if old and old.size == part.stat().st_size else self._whole(source, part)
            for journal, handle in opened:
                if store.part_of(journal) not in parts:
                    yield from self._lines(f"data/{journal.name}", handle, known)
        finally:
            for _, handle in opened:
                os.close(handle)
        for source in SMALL:
            path = self.folder.path / source
            if path.exists():
                old = known.get(source)
                same = old and xxhash.xxh3_128_hexdigest(path.read_bytes()) == old.xxh3
                yield old if old and same else self._whole(source, path)
        for source in GROWING:
            try:
                handle = os.open(self.folder.path / source, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                yield from self._lines(source, handle, known)
            finally:
                os.close(handle)

    def _open_journals(self) -> Iterator[tuple[Path, int]]:
        for journal in store.journals(self.folder.data):
            try:
                yield journal, os.open(journal, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # sealed since it was listed

    def _whole(self, source: str, path: Path) -> Copied:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            name = layout.stamped(source, self._number, self.order.life)
            content = layout.chunks(handle, 0, os.fstat(handle).st_size)
            size, xxh3 = layout.put(self.target / name, content, self._sign)
        finally:
            os.close(handle)
        return Copied(source, size, xxh3, (Piece(name, 0, size, xxh3),))

    def _lines(self, source: str, handle: int, known: dict[str, Copied]) -> Iterator[Copied]:
        """The whole lines of a file that grows: what is new of it, or all where it is not the file that it was."""
        end = end_of_lines(handle)
        old = known.get(source)
        digest = xxhash.xxh3_128()
        if old is not None:
            if old.size <= end:
                for data in layout.chunks(handle, 0, old.size):
                    self._sign()
                    digest.update(data)
            if digest.hexdigest() != old.xxh3 or (end > old.size and len(old.pieces) >= MOST_PIECES):
                old, digest = None, xxhash.xxh3_128()
        start = old.size if old else 0
        if old is not None and start == end:
            yield old
        elif end:
            name = layout.stamped(source, self._number, self.order.life, start)

            def counted() -> Iterator[bytes]:
                for data in layout.chunks(handle, start, end):
                    digest.update(data)
                    yield data

            size, xxh3 = layout.put(self.target / name, counted(), self._sign)
            pieces = (*(old.pieces if old else ()), Piece(name, start, size, xxh3))
            yield Copied(source, end, digest.hexdigest(), pieces)


def _rank(lease: Lease) -> tuple[int, str]:
    return (lease.number, lease.holder.life)


def end_of_lines(handle: int) -> int:
    """Where the last whole line of an open file ends: what is behind it is being written, or torn."""
    end = os.fstat(handle).st_size
    while end > 0:
        step = min(end, 1 << 16)
        found = os.pread(handle, step, end - step).rfind(b"\n")
        if found >= 0:
            return end - step + found + 1
        end -= step
    return 0


def visit(order: Order, tell: Tell, sign: layout.Sign) -> Reply:
    """A visit whose errors are replies: the run decides what they mean."""
    try:
        return Visit(order, tell, sign).run()
    except TokenmillError as error:
        return Reply(type(error).__name__, str(error), error.fix)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Reply("OSError", f"{where}{error.strerror or error}")


def main(argv: list[str], out: TextIO) -> int:
    """Makes the visit; a line with a JSON object is a reply, the last of them the result; an empty one a sign."""
    processes.die_with_parent()
    os.nice(NICE)
    last = time.monotonic()

    def tell(reply: Reply) -> None:
        out.write(msgspec.json.encode(reply).decode() + "\n")
        out.flush()

    def sign() -> None:
        nonlocal last
        if time.monotonic() - last >= SIGN_S:
            last = time.monotonic()
            out.write("\n")
            out.flush()

    tell(visit(msgspec.json.decode(argv[0], type=Order), tell, sign))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdout))

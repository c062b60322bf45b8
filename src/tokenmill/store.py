"""The journal: every record exactly once on disk, whatever dies. One writer; append-only; a checksum per line.

A line is the record's JSON with its CRC-32 as last field, so that `jq` reads it. An answer is written (write(2)) with
its batch as soon as it comes; fdatasync every second or 64 rows is for power loss only. At `segment` bytes a journal
file is closed and sealed into Parquet by a process of its own (seal.py), which is verified before the file goes.

At start a torn last line is cut to data/torn.bin, and the id it belonged to is simply not done. The first failed write
leaves the file as it was before it: nothing half-written stands in it.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from tokenmill.core.records import Record
from tokenmill.errors import StoreError, VanishedError
from tokenmill.steps import Meter, Tell

SEALER_PATIENCE_S = 60.0
"""A sealer needs 5 s for its 128 MB on an idle machine."""

SYNC_S, SYNC_ROWS = 1.0, 64
"""What a power failure may cost: measured at 2 % of a disk's time even at 100 rows a second."""

_TAIL = re.compile(rb',"crc":"([0-9a-f]{8})"\}\r?\n?')
TAIL_LENGTH = len(b',"crc":"00000000"}')

_encoder = msgspec.json.Encoder()


def line_of(record: Record) -> bytes:
    """A record as its journal line."""
    body = _encoder.encode(record)[:-1]
    return b'%b,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def is_whole(line: bytes) -> bool:
    """Whether a journal line is complete and its checksum right."""
    line = line.rstrip(b"\r\n")
    found = _TAIL.fullmatch(line[-TAIL_LENGTH:])
    return found is not None and zlib.crc32(line[:-TAIL_LENGTH]) == int(found[1], 16)


def plain(line: bytes) -> bytes:
    """A whole journal line as the record's JSON alone."""
    return line.rstrip(b"\r\n")[:-TAIL_LENGTH] + b"}"


class _Place(msgspec.Struct):
    row: int
    sample: int
    turn: int


_place = msgspec.json.Decoder(_Place)


def place_of(line: bytes) -> tuple[int, int, int]:
    """Row, sample and turn of a whole line: the order of a part, and of an export."""
    found = _place.decode(plain(line))
    return (found.row, found.sample, found.turn)


def journals(data: Path) -> list[Path]:
    """The journal files, oldest first."""
    return sorted(data.glob("journal-*.jsonl"))


def parts(data: Path) -> list[Path]:
    """The sealed files, oldest first."""
    return sorted(data.glob("part-*.parquet"))


def number_of(path: Path) -> int:
    return int(path.name.split("-")[1].split(".")[0])


def part_of(journal: Path) -> Path:
    return journal.with_name(f"part-{number_of(journal):06d}.parquet")


def recover(data: Path) -> list[str]:
    """Makes a data folder whole after any death; returns what was done, in words.

    A journal whose sealed part stands is a leftover of a death between the two; a part that was being written is not
    yet one; a journal's torn tail is cut.
    """
    told = []
    for journal in journals(data):
        wait_for_sealer(journal)
    for aside in data.glob(".part-*"):
        aside.unlink()
    for journal in journals(data):
        if part_of(journal).exists():
            journal.unlink()
        elif cut := _cut_tail(journal):
            told.append(f"{journal.name}: cut {cut} bytes of an unfinished line (kept in torn.bin)")
    return told


def wait_for_sealer(journal: Path) -> None:
    """A sealer outlives the tokenmill that started it; its journal is gone afterwards. Raises StoreError."""
    deadline = time.monotonic() + SEALER_PATIENCE_S
    while journal.exists():
        with contextlib.suppress(BlockingIOError, FileNotFoundError), journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            words = f"{journal} is being sealed by a process that has not ended for {SEALER_PATIENCE_S:.0f} s"
            raise StoreError(words, fix=f"fuser -k {journal}   ends it; start again")
        time.sleep(0.1)


def _cut_tail(journal: Path) -> int:
    """Cuts an unfinished last line; a whole one that only lacks its newline is given it."""
    with journal.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = _last_line_start(file.fileno(), size)
        file.seek(start)
        tail = file.read()
        if not tail:
            return 0
        if is_whole(tail):
            if not tail.endswith(b"\n"):
                file.write(b"\n")
            return 0
        if tail.endswith(b"\n"):
            return 0  # a bad line in whole: reading passes over it and says so
        with journal.with_name("torn.bin").open("ab") as torn:
            torn.write(tail + b"\n")
        file.truncate(start)
        return len(tail)


def _last_line_start(handle: int, size: int) -> int:
    """Where the last line begins, found from the end, since a journal may have 128 MB."""
    position = max(size - 1, 0)  # the newline that ends the file ends its last line
    while position > 0:
        step = min(position, 1 << 16)
        block = os.pread(handle, step, position - step)
        found = block.rfind(b"\n")
        if found >= 0:
            return position - step + found + 1
        position -= step
    return 0


class Store:
    """Owns data/ for the time of a run. `append` returns once the rows are written; `close` syncs and seals.

    `tell` takes a message and its level. `unsaved` are records that a failed write left behind; `written` is the Unix
    time of the last write, 0 before any.
    """

    def __init__(self, data: Path, segment: int, tell: Callable[[str, str], None]) -> None:
        self.data = data
        self.unsaved: list[Record] = []
        self.rows = 0
        self.written = 0.0
        self._segment = segment
        self._tell = tell
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        # A disk's flush takes up to a second: the next write must not wait for it.
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="store-sync")
        self._syncing: Future[None] | None = None
        self._handle = -1
        self._path = Path()
        self._size = 0
        self._is_torn = False
        self._unsynced = 0
        self._synced_at = time.monotonic()
        self._sealing: asyncio.Task[None] | None = None
        self._next = self._first_path()

    async def append(self, records: Sequence[Record]) -> None:
        """Writes records, all or (where it raises StoreError) none of them."""
        lines = b"".join(map(line_of, records))
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._write, lines)
        except _GoneError as error:
            self.unsaved.extend(records)
            raise VanishedError(
                f"{self._path} was removed or moved away in mid-run, with the rows in it",
                fix="where you have it still: move it back; its rows are generated anew otherwise",
            ) from error
        except OSError as error:
            self.unsaved.extend(records)
            raise StoreError(f"{self._path}: {error.strerror}", fix=f"df -h {self.data}") from error
        self.rows += len(records)
        self.written = round(time.time(), 3)
        self._unsynced += len(records)
        self._sync_if_due()
        if self._size >= self._segment:
            await self._rotate()

    def _sync_if_due(self) -> None:
        due = self._unsynced >= SYNC_ROWS or time.monotonic() - self._synced_at >= SYNC_S
        if due and (self._syncing is None or self._syncing.done()):
            self._unsynced, self._synced_at = 0, time.monotonic()
            self._syncing = self._syncer.submit(_sync, self._handle)

    def _write(self, lines: bytes) -> None:
        if self._handle < 0:
            self._open()
        elif not _is_at(self._handle, self._path):
            raise _GoneError
        view = memoryview(lines)
        try:
            if self._is_torn:
                self._cut()
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError:
            self._is_torn = True
            with contextlib.suppress(OSError):  # else the next write begins with it, and fails as long as it does
                self._cut()
            raise
        self._size += len(lines)

    def _cut(self) -> None:
        os.ftruncate(self._handle, self._size)
        self._is_torn = False

    def _first_path(self) -> Path:
        """Continues the newest journal if it is not full, else begins the next."""
        newest = max((*journals(self.data), *parts(self.data)), key=number_of, default=None)
        self.written = round(newest.stat().st_mtime, 3) if newest else 0.0
        if newest is not None and newest.suffix == ".jsonl" and newest.stat().st_size < self._segment:
            return newest
        return self.data / f"journal-{number_of(newest) + 1 if newest else 1:06d}.jsonl"

    def _open(self) -> None:
        self._path = self._next
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._handle, self._size = handle, os.fstat(handle).st_size
        # It is in use from here on, whatever fails now: opened again once it is full, its sealer might unlink it.
        self._next = self.data / f"journal-{number_of(self._path) + 1:06d}.jsonl"
        sync_folder(self.data)

    def _shut(self) -> None:
        if self._handle >= 0:
            if self._syncing is not None:
                self._syncing.result()  # it still has the file
            _sync(self._handle)
            os.close(self._handle)
            self._handle = -1

    async def _rotate(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._shut)
        if self._sealing is None or self._sealing.done():
            self._sealing = asyncio.create_task(self._seal_full())

    async def _seal_full(self) -> None:
        for journal in journals(self.data):
            if journal != self._path or self._handle < 0:
                await self._seal(journal)

    async def _seal(self, journal: Path) -> None:
        """By a process of its own at low priority: reading 128 MB back would hold the pump up for seconds."""
        command = [sys.executable, "-m", "tokenmill.seal", str(journal), str(part_of(journal))]
        try:
            with journal.open("rb") as file:
                # Locked before it exists: were we killed now, the next start would write on into what it seals.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                process = await asyncio.create_subprocess_exec(
                    *(*command, str(file.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=(file.fileno(),),
                )
        except OSError as error:
            self._tell(f"{journal.name} could not be sealed and stays as it is, whole: {error.strerror}", "warn")
            return
        try:
            _, errors = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            words = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word why"]
            self._tell(f"{journal.name} could not be sealed and stays as it is, whole: {words[0]}", "warn")

    async def close(self, *, seal: bool, tell: Tell = lambda text: None) -> None:
        """Syncs and closes; with `seal`, what is left in journals becomes Parquet."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._shut)
        self._writer.shutdown()
        self._syncer.shutdown()
        if self._sealing is not None:
            if not seal:
                self._sealing.cancel()
            await asyncio.gather(self._sealing, return_exceptions=True)
        if seal:
            sizes = {journal: journal.stat().st_size for journal in journals(self.data)}
            with Meter(tell, "sealing", total=sum(sizes.values())) as meter:
                for number, journal in enumerate(sizes):
                    meter.at(sum(list(sizes.values())[:number]), journal.name)
                    await self._seal(journal)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last through a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _GoneError(Exception):
    """The journal's file is not in its folder any more: what is written to it is written to nowhere."""


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sync(handle: int) -> None:
    try:
        os.fdatasync(handle)
    except OSError:
        pass  # the next write says what is wrong

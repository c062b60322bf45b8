"""Copies files fast: ranges of several files at once, every stream with descriptors of its own, all read back.

A file has a name with `.partial` behind it until its bytes are proved right. Where a read costs a round trip, 16 of
them at once are 14 times as fast as one; files and ranges together beat ranges alone. So the first streams take a file
each, and the next ones the second half of whatever has most left: every descriptor still reads straight on, which is
what the read-ahead of network mounts follows.
"""

import errno
import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tokenmill.machine import pagecache
from tokenmill.machine.sources import SourceFile
from tokenmill.machine.threads import each

BLOCK = 1 << 20
"""Bytes of one read, and of one hash: it stays in the processor's cache between the read, the hash and the write."""

PAGE = mmap.PAGESIZE

FIRST_STREAMS, MOST_STREAMS = 8, 64
"""A local disk is busy with 8; an object store's mount was seen to gain up to 32 and more."""

PAYS = 1.2
"""Twice the streams must bring this much more, else they are not worth their load on the mount."""

WINDOW_S = 0.1
"""How long a number of streams is measured at least; and until every stream has two blocks."""

SECOND_LOOKS = 1
"""Windows more before a number of streams is found not to pay: one may have been somebody else's fault."""

REST_WINDOWS = 30
"""Windows until a better number is looked for again: a mount's other users come and go."""

TICK_S = 0.02
STALL_S = 120.0
"""No byte for so long: the mount hangs. Longer than any mount's own retries that were seen to succeed."""

READ_ATTEMPTS = 4
READ_PAUSE_S = 0.2
"""A network mount fails a read now and then; the pause doubles."""

END_S = 10.0
"""For streams to notice that it is over; one in a read that never returns is left behind."""

PREALLOCATORS = 4


@dataclass(frozen=True, slots=True)
class Copied:
    """A file that was written: the hash of its blocks' hashes (xxh3)."""

    name: str
    size: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a copy is: bytes written of all, streams at work."""

    done: int
    total: int
    streams: int


Look = Callable[[Moment], None]
"""Called some 50 times a second; raises what is to end the copy."""


class Ramp:
    """How many streams pay: twice as many while the rate grows by a fifth; half as many where the first doubling costs
    (some mounts fan out by themselves); then the best of them stays for a while."""

    def __init__(self, first: int = FIRST_STREAMS, most: int = MOST_STREAMS) -> None:
        self.streams = first
        self._most = most
        self._begin()

    def _begin(self) -> None:
        self._base = self.streams
        self._best = (0.0, self.streams)
        self._up = True
        self._poor = 0
        self._rest = 0

    def seen(self, rate: float) -> int:
        """Takes in the rate of the present number of streams in a window; returns the next number."""
        if self._rest:
            self._rest -= 1
            if self._rest == 0:
                self._begin()
            return self.streams
        if rate >= self._best[0] * PAYS:
            self._best, self._poor = (rate, self.streams), 0
            wanted = self.streams * 2 if self._up else self.streams // 2
        elif self._poor < SECOND_LOOKS:
            self._poor += 1
            wanted = self.streams
        elif self._up and self._best[1] == self._base and rate * PAYS < self._best[0]:
            self._up, self._poor = False, 0
            wanted = self._base // 2
        else:
            wanted = 0
        if not 1 <= wanted <= self._most:
            wanted, self._rest = self._best[1], REST_WINDOWS
        self.streams = wanted
        return wanted


@dataclass
class _Part:
    """One file on its way: the hash of each block, and how many are `left` to copy."""

    file: SourceFile
    target: Path
    hashes: "array[int]" = field(init=False)
    left: int = field(init=False)
    direct: bool = False

    def __post_init__(self) -> None:
        self.blocks = -(-self.file.size // BLOCK)
        self.hashes = array("Q", bytes(8 * self.blocks))
        self.left = self.blocks

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial")


@dataclass(eq=False)
class _Range:
    """Blocks [at, end) of a part, still to copy; one stream is at it."""

    part: _Part
    at: int
    end: int


class Copier:
    """Copies files below a folder; `run` returns when all are there under their names, or raises OSError."""

    def __init__(
        self, files: tuple[SourceFile, ...], target: Path, *, sync: bool, read_back: bool = True, direct: bool = False
    ) -> None:
        """`sync`: the target is a disk. `read_back`: prove what was written. `direct`: the source is a mount that
        answers large requests in the time of small ones; what of it is in the page cache is read from there."""
        self._parts = [_Part(file, target / file.name) for file in files]
        self._direct = direct
        self._sync, self._read_back = sync, read_back
        self._lock = threading.Condition()
        ordered = sorted((part for part in self._parts if part.blocks), key=lambda part: part.file.size)
        self._waiting = [_Range(part, 0, part.blocks) for part in ordered]  # the largest is taken first
        self._active: set[_Range] = set()
        self._left = len(ordered)
        self._failure: OSError | None = None
        self._over = False
        self._wanted = 0
        self._done = 0
        self._total = sum(file.size for file in files)
        self._threads: list[threading.Thread] = []

    def run(self, look: Look) -> list[Copied]:
        """Raises OSError that names the file, and whatever `look` raises."""
        each(self._parts, self._prepare, PREALLOCATORS)  # a pool's threads would be joined at exit, mount or no mount
        try:
            self._watch(look)
        finally:
            self._over = True
            deadline = time.monotonic() + END_S
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return [Copied(part.file.name, part.file.size, _digest(part.hashes)) for part in self._parts]

    def _prepare(self, part: _Part) -> None:
        """Takes the room at once: a full disk or RAM disk shows now, not after minutes."""
        part.direct = self._direct and not pagecache.holds(part.file.path)
        part.target.parent.mkdir(parents=True, exist_ok=True)
        with part.partial.open("wb") as file:
            if part.file.size:
                os.posix_fallocate(file.fileno(), 0, part.file.size)
        if not part.file.size:
            self._finish(part)

    def _watch(self, look: Look) -> None:
        """Adds streams while they pay, until the last file has its name."""
        ramp = Ramp()
        self._employ(ramp.streams)
        began, before = time.monotonic(), 0
        moved, moved_at = 0, began
        while self._left and self._failure is None:
            with self._lock:
                self._lock.wait(TICK_S)
            moment = time.monotonic()
            look(Moment(self._done, self._total, self._wanted))
            copied = self._done - before
            if moment - began >= WINDOW_S and copied >= 2 * BLOCK * ramp.streams:
                self._employ(ramp.seen(copied / (moment - began)))
                began, before = moment, self._done
            if moved != self._done:
                moved, moved_at = self._done, moment
            elif moment - moved_at > STALL_S:
                raise OSError(errno.ETIMEDOUT, f"no byte came for {STALL_S:.0f} s; the mount hangs")
        if self._failure is not None:
            raise self._failure
        look(Moment(self._done, self._total, self._wanted))

    def _employ(self, streams: int) -> None:
        self._wanted = streams
        for number in range(len(self._threads), streams):
            # Daemons: one that hangs in a dead mount must not keep the process from ending.
            thread = threading.Thread(target=self._stream, args=(number,), name=f"stage-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # -- streams -----------------------------------------------------------------------------------------------------
    def _stream(self, number: int) -> None:
        buffer = memoryview(mmap.mmap(-1, BLOCK))  # aligned to pages, as direct reads want it
        try:
            while self._left and not self._stopped(number):
                taken = self._take()
                if taken is None:
                    with self._lock:
                        self._lock.wait(TICK_S)
                else:
                    self._work(taken, buffer, number)
        except OSError as error:
            with self._lock:
                self._failure = self._failure or error
                self._lock.notify_all()

    def _stopped(self, number: int) -> bool:
        return self._over or self._failure is not None or number >= self._wanted

    def _take(self) -> _Range | None:
        """A range that nobody is at, else the second half of the one that has most left; None where that is nothing."""
        with self._lock:
            if self._waiting:
                taken = self._waiting.pop()
            else:
                most = max(self._active, key=lambda one: one.end - one.at, default=None)
                if most is None or most.end - most.at < 2:
                    return None
                middle = (most.at + most.end + 1) // 2
                taken = _Range(most.part, middle, most.end)
                most.end = middle
            self._active.add(taken)
            return taken

    def _next(self, taken: _Range) -> int | None:
        with self._lock:
            if taken.at >= taken.end:
                return None
            taken.at += 1
            return taken.at - 1

    def _work(self, taken: _Range, buffer: memoryview, number: int) -> None:
        part = taken.part
        reader = _Reader(part.file, direct=part.direct)
        target = os.open(part.partial, os.O_RDWR | os.O_CLOEXEC)
        try:
            while not self._stopped(number) and (block := self._next(taken)) is not None:
                size = min(BLOCK, part.file.size - block * BLOCK)
                reader.read(buffer, size, block * BLOCK)
                part.hashes[block] = xxhash.xxh3_64_intdigest(buffer[:size])
                self._write(part, block, buffer[:size], target)
                if self._wrote(part, size):
                    reader.check_unchanged()
                    self._finish(part)
        finally:
            os.close(target)
            reader.close()
            with self._lock:
                self._active.discard(taken)
                if taken.at < taken.end:
                    self._waiting.append(taken)

    def _write(self, part: _Part, block: int, room: memoryview, target: int) -> None:
        """Writes a block and, while it is still in the processor's cache, proves that it reads back alike."""
        offset, written = block * BLOCK, 0
        while written < len(room):
            written += os.pwrite(target, room[written:], offset + written)
        if self._read_back:
            got = _fill(target, room, len(room), offset)
            if got < len(room) or xxhash.xxh3_64_intdigest(room) != part.hashes[block]:
                words = f"{part.target} reads back otherwise than it was written, at byte {offset}"
                raise OSError(errno.EIO, words)

    def _wrote(self, part: _Part, size: int) -> bool:
        """Whether that was the file's last block."""
        with self._lock:
            self._done += size
            part.left -= 1
            return part.left == 0

    def _finish(self, part: _Part) -> None:
        """The bytes are right: the file gets its name, and nobody writes it any more."""
        with part.partial.open("rb") as file:
            if self._sync:
                os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o444)
        part.partial.rename(part.target)
        if part.blocks:
            with self._lock:
                self._left -= 1
                self._lock.notify_all()


class _Reader:
    """One stream's own descriptor on a source; opened anew after a failed read.

    `direct` passes the page cache by: a network mount then gets requests of a whole block instead of its read-ahead's
    128 KiB, and the source's pages do not take the memory that the copy needs. Not every file system can.
    """

    def __init__(self, file: SourceFile, *, direct: bool) -> None:
        self._file, self._direct = file, direct
        self._handle = self._open()

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(self._file.path, flags | os.O_DIRECT)
            except OSError:
                self._direct = False  # not here; if it cannot be opened at all, the next line says so
        handle = os.open(self._file.path, flags)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the read-ahead, as cp does
        return handle

    def read(self, buffer: memoryview, size: int, offset: int) -> None:
        """Fills the first `size` bytes of the buffer, which is aligned; raises OSError that names the file."""
        attempt = 0
        while True:
            try:
                got = _fill(self._handle, buffer[: -(-size // PAGE) * PAGE], size, offset)
                break
            except OSError as error:
                refused = self._direct and error.errno == errno.EINVAL
                if not refused and attempt == READ_ATTEMPTS - 1:
                    raise OSError(error.errno, f"{self._file.path} cannot be read: {error.strerror}") from error
                if not refused:
                    time.sleep(READ_PAUSE_S * 2**attempt)
                    attempt += 1
                self._direct = self._direct and not refused
                self.close()
                self._handle = self._open()
        if got < size:
            raise OSError(errno.EIO, f"{self._file.path} changed while it was copied: it ends at byte {offset + got}")

    def check_unchanged(self) -> None:
        """Raises OSError where the file is another one than when it was listed."""
        now = self._file.path.stat()
        if (now.st_size, now.st_mtime_ns) != (self._file.size, self._file.mtime_ns):
            words = f"{self._file.size} bytes were {now.st_size} at the end" if now.st_size != self._file.size else ""
            detail = f": {words}" if words else ""
            raise OSError(errno.EBUSY, f"{self._file.path} changed while it was copied{detail}")

    def close(self) -> None:
        os.close(self._handle)


def _fill(handle: int, room: memoryview, size: int, offset: int) -> int:
    """Reads until `size` bytes are there or the file ends; returns the bytes that came."""
    got = 0
    while got < size and (more := os.preadv(handle, [room[got:]], offset + got)):
        got += more
    return got


def _digest(hashes: "array[int]") -> str:
    return str(xxhash.xxh3_128_hexdigest(hashes.tobytes()))

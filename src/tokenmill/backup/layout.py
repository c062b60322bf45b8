"""What lies in `<copy_to>/<run>`: files, the manifests that say which of them make a whole state, and leases.

    part-000001.r000017-ab12cd34.parquet                       a sealed part
    journal-000003.from-000000012345.r000018-ab12cd34.jsonl    whole lines of a journal, from a byte on
    copy-000018-ab12cd34.json                                  a manifest, written last
    lease-000042-ab12cd34.json                                 who writes here, and until when

An object store's mount appends, renames and locks nothing, so every write is a new file, read back and compared. A name
holds a round's number and its writer's life, so that two writers never meet in one. The newest whole manifest counts.
"""

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from tokenmill.machine import processes
from tokenmill.machine.processes import ProcessId

CHUNK = 8 << 20
"""Bytes read and written at once: what object stores take as one part of an upload."""

UNSYNCED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""How a mount says that it has no fsync: it stores a file when that is closed."""

KEPT = 2
"""Whole manifests whose files stay: one more than is needed, should the newest turn out to be damaged."""

_STAMPED = re.compile(r".+\.r(\d{6,})-[0-9a-f]{8}(?:\.\w+)?")
_MANIFEST = re.compile(r"copy-(\d{6,})-[0-9a-f]{8}\.json")
_LEASE = re.compile(r"lease-(\d{6,})-[0-9a-f]{8}\.json")

Sign = Callable[[], None]
"""Called between chunks: a sign of life, and where a caller may end it."""


class Holder(msgspec.Struct, frozen=True):
    """A life of tokenmill: `life` is random, 8 hex digits; `process` has the boot id."""

    life: str
    host: str
    process: ProcessId

    def __str__(self) -> str:
        return f"pid {self.process.pid} on {self.host}, boot {self.process.boot[:8]}"


class Lease(msgspec.Struct, frozen=True):
    """Who writes here, from which run folder. `expires` is Unix time, 0 where it was given back."""

    number: int
    holder: Holder
    folder: str
    expires: float


class Piece(msgspec.Struct, frozen=True):
    """One file of the copy: the bytes of its source from `start` on."""

    name: str
    start: int
    size: int
    xxh3: str


class Copied(msgspec.Struct, frozen=True):
    """A file of the run folder, by its path in there; its pieces in order are its content."""

    source: str
    size: int
    xxh3: str
    pieces: tuple[Piece, ...]


class Manifest(msgspec.Struct, frozen=True):
    """A whole state of a run. `folder` is the id of the run folder that it is a copy of."""

    number: int
    run: str
    folder: str
    holder: Holder
    time: float
    files: tuple[Copied, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def names(self) -> set[str]:
        return {piece.name for file in self.files for piece in file.pieces}


class _Sealed(msgspec.Struct, frozen=True):
    """A manifest's file: its own hash, since a flipped bit in it would lose whole files in silence."""

    xxh3: str
    manifest: msgspec.Raw


class DamagedError(OSError):
    """A file of the copy is not what was written."""


def this_process(life: str) -> Holder:
    """This process as a holder."""
    found = processes.identify(os.getpid())
    return Holder(life, socket.gethostname(), found or ProcessId(os.getpid(), 0, ""))


# -- names -------------------------------------------------------------------------------------------------------------
def listing(target: Path) -> frozenset[str]:
    """All names of a copy; none where it was never begun."""
    try:
        return frozenset(os.listdir(target))  # noqa: PTH208  (names are all that is asked of the mount)
    except FileNotFoundError:
        return frozenset()


def next_number(names: frozenset[str], pattern: re.Pattern[str] = _MANIFEST) -> int:
    """One more than any name of that kind has."""
    return 1 + max((int(found[1]) for name in names if (found := pattern.fullmatch(name))), default=0)


def next_round(names: frozenset[str]) -> int:
    """A round's number: more than that of any manifest and of any file that a failed round left."""
    return max(next_number(names), next_number(names, _STAMPED))


def stamped(source: str, number: int, life: str, start: int | None = None) -> str:
    """The name of a new file of the copy; with `start`, of the part of its source that begins there."""
    stem, dot, suffix = source.rpartition("/")[2].partition(".")
    since = "" if start is None else f".from-{start:012d}"
    return f"{stem}{since}.r{number:06d}-{life}{dot}{suffix}"


# -- one file ----------------------------------------------------------------------------------------------------------
def chunks(handle: int, start: int, end: int) -> Iterator[bytes]:
    """The bytes of an open file between two offsets; raises OSError where it ends before."""
    at = start
    while at < end:
        data = os.pread(handle, min(CHUNK, end - at), at)
        if not data:
            raise DamagedError(f"ends at byte {at} of {end}")
        at += len(data)
        yield data


def put(path: Path, content: Iterator[bytes], sign: Sign) -> tuple[int, str]:
    """Writes a new file, reads it back and compares; returns its size and hash. A failed one is taken away again."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            size, digest = 0, xxhash.xxh3_128()
            for data in content:
                sign()
                digest.update(data)
                size += _write(handle, data)
            _sync(handle)
        finally:
            os.close(handle)  # an object store's mount may say only here that it failed
        _compare(path, size, digest.hexdigest(), sign)
    except OSError:
        _remove(path)
        raise
    return size, digest.hexdigest()


def _write(handle: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
    return len(data)


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSYNCED:
            raise


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass  # no manifest names it, so nobody reads it


def _compare(path: Path, size: int, xxh3: str, sign: Sign) -> None:
    for _ in get(path, size, xxh3, sign):
        pass


def get(path: Path, size: int, xxh3: str, sign: Sign) -> Iterator[bytes]:
    """The content of a file of the copy; raises DamagedError at its end where it is not what was written."""
    sign()
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # what is asked is what lies there, not in our memory
        digest = xxhash.xxh3_128()
        found = os.fstat(handle).st_size
        if found != size:
            raise DamagedError(f"{path} has {found} bytes instead of {size}")
        for data in chunks(handle, 0, size):
            sign()
            digest.update(data)
            yield data
        if digest.hexdigest() != xxh3:
            raise DamagedError(f"{path} has other bytes than were written")
    finally:
        os.close(handle)


# -- manifests and leases ----------------------------------------------------------------------------------------------
def write_manifest(target: Path, manifest: Manifest, sign: Sign) -> str:
    """Returns its name."""
    name = f"copy-{manifest.number:06d}-{manifest.holder.life}.json"
    body = msgspec.json.encode(manifest)
    sealed = msgspec.json.encode(_Sealed(xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body)))
    put(target / name, iter([sealed]), sign)
    return name


def manifests(target: Path, names: frozenset[str]) -> Iterator[Manifest]:
    """All that can be read and are what was written, the newest first; their files may be there or not."""
    return (found for _, found in _looked_at(target, names) if found is not None)


def unreadable(target: Path, names: frozenset[str]) -> list[str]:
    """The names of manifests that are damaged, or whose writer died in the middle of them; the newest first."""
    return [name for name, found in _looked_at(target, names) if found is None]


def _looked_at(target: Path, names: frozenset[str]) -> Iterator[tuple[str, Manifest | None]]:
    for _, name in sorted(((int(m[1]), n) for n in names if (m := _MANIFEST.fullmatch(n))), reverse=True):
        try:
            sealed = msgspec.json.decode((target / name).read_bytes(), type=_Sealed)
            right = xxhash.xxh3_128_hexdigest(bytes(sealed.manifest)) == sealed.xxh3
            yield name, msgspec.json.decode(sealed.manifest, type=Manifest) if right else None
        except FileNotFoundError:
            continue  # taken away meanwhile
        except msgspec.DecodeError:
            yield name, None


def whole(target: Path, names: frozenset[str]) -> Iterator[Manifest]:
    """The manifests of which every file is there, the newest first."""
    return (manifest for manifest in manifests(target, names) if manifest.names <= names)


def prune(target: Path, names: frozenset[str], life: str) -> None:
    """Takes away what the last whole manifests do not need, and leases that are over. What cannot go stays."""
    kept = [manifest for manifest, _ in zip(whole(target, names), range(KEPT), strict=False)]
    if len(kept) == KEPT:
        needed = set().union(*(manifest.names for manifest in kept))
        for name in sorted(names):  # a manifest goes before its files
            manifest, file = _MANIFEST.fullmatch(name), _STAMPED.fullmatch(name)
            old = manifest and int(manifest[1]) < kept[-1].number
            if old or (file and int(file[1]) < kept[0].number and name not in needed):
                _remove(target / name)
    newest = leases(target, names)
    standing = {lease_name(lease) for lease in newest if lease.expires > time.time() or lease.holder.life == life}
    for name in names - standing:
        if _LEASE.fullmatch(name):
            _remove(target / name)


def leases(target: Path, names: frozenset[str]) -> list[Lease]:
    """The newest lease of every life, the oldest first."""
    found: dict[str, Lease] = {}
    for name in sorted(name for name in names if _LEASE.fullmatch(name)):
        try:
            lease = msgspec.json.decode((target / name).read_bytes(), type=Lease)
        except (FileNotFoundError, msgspec.DecodeError):
            continue
        found.pop(lease.holder.life, None)
        found[lease.holder.life] = lease
    return list(found.values())


def write_lease(target: Path, names: frozenset[str], holder: Holder, folder: str, expires: float) -> Lease:
    """Takes, renews or (with 0) gives back; the one before it stays until a round prunes."""
    lease = Lease(next_number(names, _LEASE), holder, folder, expires)
    put(target / lease_name(lease), iter([msgspec.json.encode(lease)]), lambda: None)
    return lease


def lease_name(lease: Lease) -> str:
    return f"lease-{lease.number:06d}-{lease.holder.life}.json"


def is_held(lease: Lease, folder: str) -> bool:
    """Whether its holder may still write. By the clock; on this machine by what is known better: whether its process
    lives, and after a reboot, whether it was one of this very run folder, whose lock says that it is gone."""
    holder = lease.holder
    if lease.expires <= time.time():
        return False
    if holder.host != socket.gethostname():
        return True
    if holder.process.boot == processes.boot_id():
        return processes.alive(holder.process)
    return lease.folder != folder

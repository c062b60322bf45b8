"""Copies of models below a root folder: who makes one, who uses one, which one makes room.

    ROOT/NAME/                 a whole copy: its files, and last of all its manifest
    ROOT/.NAME.staging/        one being made; nobody reads it, and whoever has the lock may remove it
    ROOT/.NAME.download/       one that comes from the hub, which resumes what is there
    ROOT/.NAME.removing/       one on its way out
    ROOT/.NAME.lock            an flock of whoever makes, holding how far that is
    ROOT/.NAME.lease           a shared flock of whoever uses it

Locks are the kernel's, so they end with their holder however it dies. Servers inherit the lease's descriptor: a copy
stays in use while any server lives, whatever became of the tokenmill that started it.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.errors import PreflightError, UsageError
from tokenmill.machine import processes
from tokenmill.machine.processes import ProcessId

MANIFEST = "tokenmill-manifest.json"
_ASIDE = re.compile(r"\.(.+-[0-9a-f]{12})\.(staging|removing|download)")
"""Our own names only: a folder that the user chose may hold other things."""

POLL_S = 0.1
REMOVAL_S = 60.0
"""A RAM disk gives 54 GB back in seconds, a disk within the minute."""

PATIENCE_S = 300.0
"""How long a lock's holder may write nothing new before a waiter gives up: it is alive, yet stopped or hanging."""


class FileEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """`xxh3` is the hash of the hashes of its blocks (machine/copying.py), `hash` the whole file's where it was taken:
    "sha256:…" or "git:…"."""

    name: str
    size: int
    xxh3: str = ""
    hash: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """What a copy holds, and of what. `source` is the real path or "hub:ID@REVISION"; `made` is Unix time."""

    source: str
    files: tuple[FileEntry, ...]
    verify: str
    made: float


class Progress(msgspec.Struct, frozen=True):
    """What the holder of a lock tells those who wait: who it is, bytes done of all, and since when."""

    process: ProcessId
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A whole copy in a root."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def size(self) -> int:
        return sum(file.size for file in self.manifest.files)

    @property
    def last_used(self) -> float:
        """Unix time."""
        try:
            return _lease_file(self.path).stat().st_mtime
        except OSError:
            return self.manifest.made

    @property
    def users(self) -> list[int]:
        """The processes that hold its lease."""
        return _holders(_lease_file(self.path)) if _is_held(_lease_file(self.path)) else []


def own(root: Path) -> None:
    """Makes the root folder; raises PreflightError where it is not ours alone: weights and code are loaded from it."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise PreflightError(
            f"{root} cannot be made: {error.strerror}", fix="set stage.to to another folder"
        ) from error
    if status.st_uid != os.getuid():
        words = f"{root} belongs to user {status.st_uid}, not to us ({os.getuid()}): its files cannot be trusted"
        raise PreflightError(words, fix="set stage.to to a folder of your own")


# -- whole copies ------------------------------------------------------------------------------------------------------
def missing(path: Path) -> str:
    """What is wrong with a copy by its manifest, names and sizes; empty where it is whole."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        return f"{path / MANIFEST} cannot be read: {error}" if path.exists() else f"{path} is gone"
    for file in manifest.files:
        try:
            size = (path / file.name).stat().st_size
        except OSError:
            return f"{path / file.name} is gone"
        if size != file.size:
            return f"{path / file.name} has {size} bytes of {file.size}"
    return ""


def find(root: Path, name: str) -> Copy | None:
    """The copy of that name; None where there is none, or a broken one."""
    path = root / name
    if missing(path):
        return None
    return Copy(path, msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest))


def listing(root: Path) -> list[Copy]:
    """The whole copies in a root, the one that was not used for longest first."""
    try:
        names = [path.name for path in root.iterdir() if (path / MANIFEST).exists()]
    except OSError:
        return []
    found = [copy for name in names if (copy := find(root, name)) is not None]
    return sorted(found, key=lambda copy: copy.last_used)


def publish(aside: Path, root: Path, name: str, manifest: Manifest, *, sync: bool) -> Copy:
    """The last step: the manifest, then the folder's name. A broken copy that has the name is removed."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    draft = aside / f"{MANIFEST}.partial"
    draft.write_bytes(data)
    if sync:
        _sync(draft)
    draft.rename(aside / MANIFEST)
    if sync:
        for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
            _sync(folder)
    if (root / name).exists():
        _discard(root / name)
    aside.rename(root / name)
    if sync:
        _sync(root)
    return Copy(root / name, manifest)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- who makes one -----------------------------------------------------------------------------------------------------
class Lock:
    """Held by whoever makes a copy; `note` tells those who wait how far it is."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._process = processes.identify(os.getpid()) or ProcessId(os.getpid(), 0, "")

    def note(self, done: int, total: int) -> None:
        """Bytes done of all, for those who wait."""
        data = msgspec.json.encode(Progress(self._process, done, total)) + b"\n"
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, data, 0)


@contextmanager
def lock(
    root: Path, name: str, waits: Callable[[Progress | None], None], patience_s: float = PATIENCE_S
) -> Iterator[Lock]:
    """Takes the right to make a copy. `waits` is called ten times a second while another process has it.

    Raises PreflightError where that one gets no further for `patience_s`; whatever `waits` raises.
    """
    path = root / f".{name}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        last, deadline = b"", time.monotonic() + patience_s
        while not _take(handle, fcntl.LOCK_EX):
            data = os.pread(handle, 4096, 0)
            if data != last:
                last, deadline = data, time.monotonic() + patience_s
            progress = _progress(data)
            if time.monotonic() > deadline:
                who = processes.describe(progress.process.pid) if progress else "another process"
                words = f"{who} makes {root / name} and has got no further for {patience_s:.0f} s"
                raise PreflightError(words, fix="end that process, or set stage.to to another folder")
            waits(progress)
            time.sleep(POLL_S)
        yield Lock(handle)
    finally:
        os.close(handle)


def _progress(data: bytes) -> Progress | None:
    try:
        return msgspec.json.decode(data, type=Progress)
    except msgspec.DecodeError:
        return None  # it has only just begun, or is writing it now


def _take(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- who uses one ------------------------------------------------------------------------------------------------------
class Lease:
    """A copy's use: as long as this descriptor is open in any process, nobody removes the copy."""

    def __init__(self, copy: Path, patience_s: float = REMOVAL_S) -> None:
        """Waits while the copy is being removed; whether it is there is to be asked afterwards.

        Raises PreflightError where that takes too long."""
        self.descriptor = os.open(_lease_file(copy), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience_s
        while not _take(self.descriptor, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                os.close(self.descriptor)
                raise PreflightError(f"{copy} is being removed by another process", fix="start again")
            time.sleep(POLL_S)
        os.utime(self.descriptor)

    def close(self) -> None:
        """Ends our own use; servers that inherited it go on with theirs."""
        os.close(self.descriptor)


def _lease_file(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.lease")


def _is_held(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _take(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)


def _holders(path: Path) -> list[int]:
    found = []
    for pid in processes.pids():
        try:
            opened = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH115, PTH208
        except OSError:
            continue  # another user's, or gone
        if str(path) in opened:
            found.append(pid)
    return found


# -- making room -------------------------------------------------------------------------------------------------------
def make_room(root: Path, room: Callable[[], int], need: int, keep: str) -> list[Copy]:
    """Removes our copies that nobody uses, the longest unused first, until there is room; returns what it removed.

    Unfinished downloads that nobody is at go first."""
    removed: list[Copy] = []
    if room() < need:
        _clear(root, ("download",))
    for copy in listing(root):
        if room() >= need:
            break
        if copy.name != keep and _remove(copy):
            removed.append(copy)
    return removed


def evictable(root: Path, keep: str) -> int:
    """Bytes of our copies that nobody uses."""
    return sum(copy.size for copy in listing(root) if copy.name != keep and not _is_held(_lease_file(copy.path)))


def remove(copy: Copy) -> None:
    """Raises UsageError where somebody uses it."""
    if not _remove(copy):
        who = ", ".join(map(processes.describe, copy.users)) or "another process"
        raise UsageError(f"{copy.path} is in use by {who}", fix="tokenmill down RUN   ends a run's servers")


def _remove(copy: Copy) -> bool:
    """Whether it is gone. The lease is held meanwhile, so that nobody begins to use what is half gone."""
    handle = os.open(_lease_file(copy.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _take(handle, fcntl.LOCK_EX):
            return False
        _discard(copy.path)
    finally:
        os.close(handle)
    return True


def _discard(path: Path) -> None:
    """Out of the way by one rename, so that a death in the middle leaves nothing that looks whole."""
    out = path.with_name(f".{path.name}.removing")
    shutil.rmtree(out, ignore_errors=True)
    path.rename(out)
    shutil.rmtree(out)


def sweep(root: Path, keep: str) -> None:
    """Removes what the dead left half done; what is being made is locked, but for `keep`, which is ours. Downloads
    stay: the hub resumes them."""
    _clear(root, ("staging", "removing"), keep)


def _clear(root: Path, kinds: tuple[str, ...], keep: str = "") -> None:
    for path in list(root.iterdir()):
        found = _ASIDE.fullmatch(path.name)
        if not found or found[2] not in kinds:
            continue
        handle = os.open(root / f".{found[1]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if found[1] == keep or _take(handle, fcntl.LOCK_EX):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)

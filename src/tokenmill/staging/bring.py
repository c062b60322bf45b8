"""One model on its way into one place: the lock, the room, the copy, the proof, the name."""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import PreflightError, StoppedError
from tokenmill.machine import copies, filesystems, sources
from tokenmill.machine.copies import FileEntry, Lease, Manifest
from tokenmill.machine.copying import Copied, Copier, Moment
from tokenmill.machine.sources import SourceFile
from tokenmill.plain import gigabytes
from tokenmill.staging import placement
from tokenmill.staging.placement import Place
from tokenmill.staging.staged import Halted, Staged, changed
from tokenmill.steps import Meter, Tell

LOOK_S = 1.0
"""How often room is looked at, and how far the copy is written down for those who wait."""

FLOOR = 0.5
"""Share of the reserve at which a copy is stopped: something else takes the room at the same time."""


def named(source: Path) -> tuple[tuple[SourceFile, ...], str]:
    """The files of a model, and the name of its copy."""
    try:
        files = sources.listing(source)
        return files, sources.copy_name(source, files)
    except OSError as error:
        raise PreflightError(f"{source} cannot be read: {error}", fix="finish the download of the model") from error


@dataclass(frozen=True, slots=True)
class Copying:
    """One model on its way into one place."""

    source: Path
    files: tuple[SourceFile, ...]
    name: str
    place: Place
    verify: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def target(self) -> Path:
        return self.place.root / self.name

    @property
    def final(self) -> Path:
        """What servers load: the folder, or the one file in it."""
        return self.target / self.source.name if self.source.is_file() else self.target


def bring(job: Copying, tell: Tell, halted: Halted) -> Staged:
    """The copy, made here or by another process meanwhile, in use. Raises PreflightError, StoppedError."""
    try:
        return _bring(job, tell, halted)
    except OSError as error:
        fix = 'set stage.to to a folder that can be written, or to "off"'
        raise PreflightError(f"{job.source} could not be staged to {job.place.root}: {error}", fix=fix) from error


def _bring(job: Copying, tell: Tell, halted: Halted) -> Staged:
    root = job.place.root
    copies.own(root)

    def again(tell: Tell, halted: Halted) -> Staged:
        files, name = named(job.source)
        if name != job.name:
            raise changed(root / name, job.target)
        return bring(Copying(job.source, files, name, placement.asked(root, name), job.verify), tell, halted)

    with copies.lock(root, job.name, _waits(job, tell, halted)) as lock:
        lease = Lease(job.target)  # first: from now on nobody removes what we find
        with ExitStack() as undo:
            undo.callback(lease.close)
            found = copies.find(root, job.name)
            if found is None:
                _make(job, lock, tell, halted)
            elif job.verify == "sha256" != found.manifest.verify:
                _prove(job, lock, tell, halted)
            undo.pop_all()
        return Staged(job.final, job.target, lease, again)


def _prove(job: Copying, lock: copies.Lock, tell: Tell, halted: Halted) -> None:
    """A copy that was made with a weaker check than is asked for now."""
    try:
        _checked(job, lock, job.target, [], tell, halted)
    except OSError as error:
        fix = f"download that file again, then: tokenmill stage --remove {job.name}"
        raise PreflightError(f"the copy {job.target} is not to be trusted: {error}", fix=fix) from error


def _waits(job: Copying, tell: Tell, halted: Halted) -> Callable[[copies.Progress | None], None]:
    meter = Meter(tell, "another tokenmill stages it:", total=job.size)

    def wait(progress: copies.Progress | None) -> None:
        if halted():
            raise StoppedError(f"stopped while another tokenmill staged {job.source}")
        meter.at(progress.done if progress else 0)

    return wait


def _make(job: Copying, lock: copies.Lock, tell: Tell, halted: Halted) -> None:
    """Under the lock: room, copy, proof, name."""
    root, place = job.place.root, job.place
    if problems := sources.problems(job.source):
        words = f"{job.source} is not whole: {problems[0]}"
        raise PreflightError(words, fix="tokenmill stage CONFIG --wait   follows a download and stages it then")
    copies.sweep(root, job.name)
    for copy in copies.make_room(root, lambda: placement.free(root) - place.reserve, job.size, job.name):
        tell(f"removed {copy.path}, {gigabytes(copy.size)}, which nobody uses, to make room")
    if (room := placement.free(root) - place.reserve) < job.size:
        words = f"{gigabytes(job.size)} are needed in {root}, and {gigabytes(max(0, room))} are to be had"
        raise PreflightError(words, fix='free some, or set stage.to = "off"')
    aside = root / f".{job.name}.staging"
    sync = not filesystems.mount_of(root).is_ram
    try:
        began = time.monotonic()
        direct = any(filesystems.mount_of(file.path).is_network for file in job.files)
        copier = Copier(job.files, aside, sync=sync, read_back=job.verify != "size", direct=direct)
        copied = copier.run(_look(job, lock, tell, halted))
        if sources.listing(job.source) != job.files:
            raise OSError(f"{job.source} changed while it was copied")
        entries = _checked(job, lock, aside, copied, tell, halted)
        manifest = Manifest(os.path.realpath(job.source), entries, job.verify, time.time())
        copies.publish(aside, root, job.name, manifest, sync=sync)
    except OSError as error:
        fix = 'stage again once it is at rest, or set stage.to = "off"'
        raise PreflightError(f"{job.source} could not be staged to {root}: {error}", fix=fix) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    took = max(time.monotonic() - began, 1e-9)
    tell(f"staged {gigabytes(job.size)} in {took:.1f} s, {job.size / 1e9 / took:.2f} GB/s, verified ({job.verify})")


def _look(job: Copying, lock: copies.Lock, tell: Tell, halted: Halted) -> Callable[[Moment], None]:
    """What goes on beside a copy: its progress is told, its lock says how far it is, room and a stop are watched."""
    meter = Meter(tell, "staged", total=job.size)
    looked_at = 0.0

    def look(moment: Moment) -> None:
        nonlocal looked_at
        if halted():
            raise StoppedError(f"stopped while {job.source} was staged")
        meter.at(moment.done, f"{moment.streams} streams", total=moment.total)
        now = time.monotonic()
        if now - looked_at >= LOOK_S:
            looked_at = now
            lock.note(moment.done, moment.total)
            if (room := placement.free(job.place.root)) < job.place.reserve * FLOOR:
                raise OSError(f"only {gigabytes(room)} are left in {job.place.root}: something else fills it")

    return look


def _checked(
    job: Copying, lock: copies.Lock, aside: Path, copied: list[Copied], tell: Tell, halted: Halted
) -> tuple[FileEntry, ...]:
    """The copy's headers against its sizes and, with verify = "sha256", its hashes against what the hub knows."""
    model = aside / job.source.name if job.source.is_file() else aside
    if problems := sources.problems(model):
        raise OSError(f"the copy is not whole: {problems[0]}")
    found = dict.fromkeys((file.name for file in job.files), "")
    if job.verify == "sha256":
        hashed = 0
        tell(f"checks the SHA-256 of {len(job.files)} files")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hashes = pool.map(lambda file: _hash(aside, file, halted), job.files)
            for file, value in zip(job.files, hashes, strict=True):
                found[file.name] = value
                hashed += file.size
                lock.note(hashed, job.size)
                if file.known and value != file.known:
                    raise OSError(f"{file.path} is damaged: its hash is {value}, the hub says {file.known}")
        if unknown := sum(not file.known for file in job.files):
            tell(f"no hash is known of {unknown} of them: theirs are written into the manifest")
    return tuple(FileEntry(one.name, one.size, one.xxh3, found[one.name]) for one in copied)


def _hash(aside: Path, file: SourceFile, halted: Halted) -> str:
    if halted():
        raise StoppedError("stopped while hashes were checked")
    return sources.digest(aside / file.name, file.known)

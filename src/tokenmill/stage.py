"""Brings the model near: a hub id, a network mount → RAM or a local disk, verified. Servers start from what it returns.

A folder under a copy's name is always right: it got that name after all its bytes were read back (machine/copying.py).
Two runs that stage the same model copy once. A copy in use is never removed (machine/copies.py).
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill import download, placement
from tokenmill.arrival import follow
from tokenmill.config import Config
from tokenmill.download import Hub, HuggingFace
from tokenmill.errors import PreflightError, StoppedError, UsageError
from tokenmill.machine import copies, filesystems, gpus, sources
from tokenmill.machine.copies import Copy, FileEntry, Lease, Manifest
from tokenmill.machine.copying import Copied, Copier, Moment
from tokenmill.machine.probe import probe
from tokenmill.machine.sources import SourceFile
from tokenmill.pace import Pace, Tell, gigabytes
from tokenmill.placement import Place, Plan, Source
from tokenmill.view import duration

HALVED = 2
"""The watch during a copy stops it at half the reserve: something else is taking the room at the same time."""

LOOK_S = 1.0
PROBE_S = 3.0

Halted = Callable[[], bool]


@dataclass
class Staged:
    """The model as servers load it; `path` None where there is nothing to load. Where it is a copy of ours, `lease`
    keeps it from being removed, and `renew` brings it back after somebody else did."""

    path: Path | None
    copy: Path | None = None
    lease: Lease | None = None
    again: Callable[[Tell, Halted], "Staged"] | None = None
    _renewing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What servers inherit, so that the copy is in use as long as one of them lives."""
        return (self.lease.descriptor,) if self.lease else ()

    def missing(self) -> str:
        """What of the copy is gone; empty where it is whole, and where the model lies where it always did."""
        return copies.missing(self.copy) if self.copy else ""

    def renew(self, tell: Tell, halted: Halted) -> None:
        """Stages again, to the same place, unless another server's restart has done so meanwhile.

        Raises PreflightError where the source is another model by now; StoppedError."""
        while not self._renewing.acquire(timeout=LOOK_S):
            if halted():
                raise StoppedError("stopped while the model was staged again")
        try:
            if self.missing():
                self._renew(tell, halted)
        finally:
            self._renewing.release()

    def _renew(self, tell: Tell, halted: Halted) -> None:
        assert self.again is not None
        fresh = self.again(tell, halted)
        if fresh.path != self.path:
            fresh.close()
            raise _changed(fresh.path, self.path)
        old, self.lease = self.lease, fresh.lease
        if old is not None:
            old.close()

    def close(self) -> None:
        """Ends our own use of the copy; living servers keep theirs."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None


def _changed(new: Path | None, old: Path | None) -> PreflightError:
    words = f"the model has changed since this run began: {new} is not {old}"
    return PreflightError(words, fix="start the run again")


def stage(
    config: Config,
    tell: Tell = lambda text: None,
    halted: Halted = lambda: False,
    *,
    wait: bool = False,
    hub: Hub | None = None,
) -> Staged:
    """Raises PreflightError, and StoppedError soon after `halted` says so. `wait`: first until a download has ended."""
    named = Path(config.model.path)
    if not config.model.path or config.engine.kind == "openai" or (config.engine.kind == "fake" and not named.exists()):
        return Staged(named if config.model.path else None)
    if wait and (named.exists() or named.is_absolute()):
        follow(named, tell, halted)
    source = resolve(config, tell, halted, hub=hub)
    if (source / copies.MANIFEST).exists():
        return _in_use(source, lambda tell, halted: stage(config, tell, halted, hub=hub))
    if not source.exists():
        raise PreflightError(f"model.path = {source} does not exist", fix="correct model.path")
    files, name = _named(source)
    found = _existing(config, name)
    if found is not None:
        tell(f"{source} is staged already: {found}")
        plan = Plan(placement.asked(found.parent, name), "")
    else:
        plan = _decide(config, source, files, name)
    if plan.place is None:
        if config.stage.to == "auto":
            tell(f"{source} is used where it lies: {plan.why}")
        return Staged(source)
    job = _Copying(source, files, name, plan.place, config.stage.verify)
    if found is None:
        tell(f"staging {source}, {gigabytes(job.size)}, to {job.final}: {plan.why}")
    return _bring(job, tell, halted)


def resolve(
    config: Config, tell: Tell = lambda text: None, halted: Halted = lambda: False, *, hub: Hub | None = None
) -> Path:
    """Where the model's files are on this machine; a hub id is fetched. Raises PreflightError, StoppedError."""
    path = Path(config.model.path)
    if path.exists() or path.is_absolute():
        return path
    verify, revision = config.stage.verify, config.model.revision
    order = download.Order(config.model.path, revision, verify, lambda name: _places(config, name), tell, halted)
    return download.bring(order, hub or HuggingFace())


def _in_use(copy: Path, again: Callable[[Tell, Halted], Staged]) -> Staged:
    """A copy that model.path itself is, or one from the hub."""
    lease = Lease(copy)
    if gone := copies.missing(copy):
        lease.close()
        raise PreflightError(f"{gone}: it was removed just now", fix="start again")
    return Staged(copy, copy, lease, again)


def _named(source: Path) -> tuple[tuple[SourceFile, ...], str]:
    """The files of a model, and the name of its copy."""
    try:
        files = sources.listing(source)
        return files, sources.copy_name(source, files)
    except OSError as error:
        raise PreflightError(f"{source} cannot be read: {error}", fix="finish the download of the model") from error


# -- where to ----------------------------------------------------------------------------------------------------------
def _places(config: Config, name: str) -> tuple[Place, ...]:
    if config.stage.to not in ("auto", "off"):
        return (placement.asked(Path(config.stage.to), name),)
    return placement.places(config.fleet.servers or _cards(config), name)


def _cards(config: Config) -> int:
    """Servers come one a card, where nothing else is said."""
    if config.fleet.gpus == "none":
        return 1
    try:
        return len(gpus.choose(gpus.read(), config.fleet.gpus)) // config.fleet.gpus_per_server
    except PreflightError:
        return 0  # `stage` may run where no card is; doctor says so where it matters


def roots(config: Config | None) -> tuple[Path, ...]:
    """Every folder that may hold copies."""
    named = (Path(config.stage.to),) if config and config.stage.to not in ("auto", "off") else ()
    return (*named, *placement.roots())


def _existing(config: Config, name: str) -> Path | None:
    if config.stage.to == "off":
        return None
    places = roots(config) if config.stage.to == "auto" else (Path(config.stage.to),)
    return next((root / name for root in places if copies.find(root, name) is not None), None)


def _decide(config: Config, source: Path, files: tuple[SourceFile, ...], name: str) -> Plan:
    size = sum(file.size for file in files)
    match config.stage.to:
        case "off":
            return Plan(None, "staging is off")
        case "auto":
            # The real file's mount: a folder of links, such as the hub's cache, may point to another one.
            largest = max(files, key=lambda file: file.size, default=None)
            mount = filesystems.mount_of(largest.path if largest else source)
            measured = probe(largest.path, PROBE_S) if largest and mount.is_network else None
            return placement.decide(Source(mount, size, measured), _places(config, name))
        case _:
            places = _places(config, name)
            if placement.roomy(size, places) is None:
                raise PreflightError(f"no room to stage {source}: {placement.rooms(size, places)}", fix="free some")
            return Plan(places[0], "asked for")


# -- what is there -----------------------------------------------------------------------------------------------------
def command(config: Config | None, tell: Tell, *, wait: bool, show: bool, remove: str) -> Iterator[str]:
    """`tokenmill stage`: the lines that it prints."""
    if remove:
        yield f"removed {remove_copy(config, remove)}"
    elif show:
        yield from lines(config)
    elif config is None:
        raise UsageError("a CONFIG is needed to stage its model", fix="tokenmill stage CONFIG")
    else:
        yield str(stage(config, tell, wait=wait).path)


def lines(config: Config | None) -> Iterator[str]:
    """The copies there are, a line each."""
    for root in roots(config):
        for copy in copies.listing(root):
            users = copy.users
            used = f"in use by {', '.join(map(str, users))}" if users else f"unused for {duration(_age(copy))}"
            yield f"{copy.name}  {gigabytes(copy.size)}  {used}  {copy.path}  of {copy.manifest.source}"


def _age(copy: Copy) -> float:
    return max(0.0, time.time() - copy.last_used)


def remove_copy(config: Config | None, name: str) -> Path:
    """Removes a copy and returns where it was; raises UsageError where there is none, or where it is in use."""
    found = [copy for root in roots(config) for copy in copies.listing(root) if copy.name == name]
    if not found:
        raise UsageError(f"there is no copy {name}", fix="tokenmill stage --list")
    for copy in found:
        copies.remove(copy)
    return found[0].path


# -- the copy ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Copying:
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


def _bring(job: _Copying, tell: Tell, halted: Halted) -> Staged:
    root = job.place.root
    copies.own(root)

    def again(tell: Tell, halted: Halted) -> Staged:
        files, name = _named(job.source)
        if name != job.name:
            raise _changed(root / name, job.target)
        return _bring(_Copying(job.source, files, name, placement.asked(root, name), job.verify), tell, halted)

    with copies.lock(root, job.name, _waits(job, tell, halted)) as lock:
        lease = Lease(job.target)  # first: from now on nobody removes what we find
        with ExitStack() as undo:
            undo.callback(lease.close)
            if copies.find(root, job.name) is None:
                _make(job, lock, tell, halted)
            undo.pop_all()
        return Staged(job.final, job.target, lease, again)


def _waits(job: _Copying, tell: Tell, halted: Halted) -> Callable[[copies.Progress | None], None]:
    pace = Pace("another tokenmill stages it:", tell)

    def wait(progress: copies.Progress | None) -> None:
        if halted():
            raise StoppedError(f"stopped while another tokenmill staged {job.source}")
        pace.seen(progress.done if progress else 0, job.size)

    return wait


def _make(job: _Copying, lock: copies.Lock, tell: Tell, halted: Halted) -> None:
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
        entries = _checked(job, aside, copied, tell, halted)
        manifest = Manifest(os.path.realpath(job.source), entries, job.verify, time.time())
        copies.publish(aside, root, job.name, manifest, sync=sync)
    except OSError as error:
        fix = 'stage again once it is at rest, or set stage.to = "off"'
        raise PreflightError(f"{job.source} could not be staged to {root}: {error}", fix=fix) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    took = max(time.monotonic() - began, 1e-9)
    tell(f"staged {gigabytes(job.size)} in {took:.1f} s, {job.size / 1e9 / took:.2f} GB/s, verified ({job.verify})")


def _look(job: _Copying, lock: copies.Lock, tell: Tell, halted: Halted) -> Callable[[Moment], None]:
    """What goes on beside a copy: its progress is told, its lock says how far it is, room and a stop are watched."""
    pace = Pace("staged", tell)
    looked_at = 0.0

    def look(moment: Moment) -> None:
        nonlocal looked_at
        if halted():
            raise StoppedError(f"stopped while {job.source} was staged")
        pace.seen(moment.done, moment.total, f"{moment.streams} streams")
        now = time.monotonic()
        if now - looked_at >= LOOK_S:
            looked_at = now
            lock.note(moment.done, moment.total)
            if (room := placement.free(job.place.root)) < job.place.reserve // HALVED:
                raise OSError(f"only {gigabytes(room)} are left in {job.place.root}: something else fills it")

    return look


def _checked(job: _Copying, aside: Path, copied: list[Copied], tell: Tell, halted: Halted) -> tuple[FileEntry, ...]:
    """The copy's headers against its sizes and, with verify = "sha256", its hashes against what the hub knows."""
    model = aside / job.source.name if job.source.is_file() else aside
    if problems := sources.problems(model):
        raise OSError(f"the copy is not whole: {problems[0]}")
    found = dict.fromkeys((file.name for file in job.files), "")
    if job.verify == "sha256":
        tell(f"checks the SHA-256 of {len(job.files)} files")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hashes = pool.map(lambda file: _hash(aside, file, halted), job.files)
            for file, value in zip(job.files, hashes, strict=True):
                found[file.name] = value
                if file.known and value != file.known:
                    raise OSError(f"{file.path} is damaged: its hash is {value}, the hub says {file.known}")
        if unknown := sum(not file.known for file in job.files):
            tell(f"no hash is known of {unknown} of them: theirs are written into the manifest")
    return tuple(FileEntry(one.name, one.size, one.xxh3, found[one.name]) for one in copied)


def _hash(aside: Path, file: SourceFile, halted: Halted) -> str:
    if halted():
        raise StoppedError("stopped while hashes were checked")
    return sources.digest(aside / file.name, file.known)

"""A hub id as model.path: fetched by huggingface_hub straight to where the servers load it from.

What the hub's own cache holds whole is used instead, and so is what an earlier run fetched: the hub is asked only where
there is neither, so that a restart does not depend on it.
"""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenmill.errors import PluginError, PreflightError, StoppedError, boundary
from tokenmill.machine import copies, filesystems, sources
from tokenmill.machine.copies import FileEntry, Manifest
from tokenmill.plain import gigabytes
from tokenmill.staging import placement
from tokenmill.staging.arrival import arrived
from tokenmill.staging.placement import Place
from tokenmill.steps import Meter, Tell

LOOK_S = 0.5
PATIENCE_S = 600.0
"""No new byte for so long: the connection hangs, and huggingface_hub's own retries (5 of them) are over."""

KEY_DIGITS = 12


@dataclass(frozen=True, slots=True)
class HubFile:
    """`known` as in machine/sources: "sha256:…" or "git:…"."""

    name: str
    size: int
    known: str


class Hub(Protocol):
    """What is asked of the hub; tests hand in a local one."""

    def cached(self, name: str, revision: str) -> Path | None:
        """The snapshot in the hub's own cache."""

    def listing(self, name: str, revision: str) -> tuple[str, tuple[HubFile, ...]]:
        """The commit, and its files."""

    def fetch(self, name: str, commit: str, folder: Path) -> None:
        """Downloads into a folder, going on with what is there."""


class HuggingFace:
    """The real one."""

    def cached(self, name: str, revision: str) -> Path | None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            with boundary(f"the hub's cache of {name}"):
                try:
                    return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
                except LocalEntryNotFoundError:
                    return None
        except PluginError as error:
            raise PreflightError(f"model.path = {name} is no folder, and no hub id: {error}") from error

    def listing(self, name: str, revision: str) -> tuple[str, tuple[HubFile, ...]]:
        from huggingface_hub import HfApi

        with boundary(f"asking the hub for {name}"):
            info = HfApi().model_info(name, revision=revision or None, files_metadata=True)
        files = tuple(
            HubFile(file.rfilename, file.size or 0, f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}")
            for file in info.siblings or ()
        )
        return info.sha or "", files

    def fetch(self, name: str, commit: str, folder: Path) -> None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # they would be drawn over the run's own view
        with boundary(f"fetching {name}"):
            snapshot_download(name, revision=commit, local_dir=folder)


@dataclass(frozen=True, slots=True)
class Order:
    """What to fetch, how it is checked, where it may go, who hears of it, and whether it is over."""

    name: str
    revision: str
    verify: str
    places: Callable[[str], tuple[Place, ...]]
    tell: Tell
    halted: Callable[[], bool]

    @property
    def source(self) -> str:
        return f"hub:{self.name}@{self.revision or 'main'}"


def bring(order: Order, hub: Hub) -> Path:
    """The model's folder: a copy of ours, or the hub's own cache. Raises PreflightError, StoppedError."""
    here = (copy for place in order.places("") for copy in copies.listing(place.root))
    fetched = next((copy for copy in here if copy.manifest.source == order.source), None)
    if fetched is not None:
        return fetched.path
    cached = hub.cached(order.name, order.revision)
    if cached is not None and not sources.problems(cached):
        return cached
    try:
        commit, files = hub.listing(order.name, order.revision)
    except PluginError as error:
        words = f"model.path = {order.name} is no folder and cannot be fetched: {error}"
        raise PreflightError(words, fix="set model.path to the model's folder") from error
    size = sum(file.size for file in files)
    name = f"{order.name.replace('/', '--')}-{commit[:KEY_DIGITS]}"
    # A download is kept where it outlives a reboot, if it can be: RAM is the second choice here.
    places = tuple(reversed(order.places(name)))
    place = placement.roomy(size, places)
    if place is None:
        raise PreflightError(f"{order.name} cannot be fetched: {placement.rooms(size, places)}", fix="free some room")
    order.tell(f"fetching {order.name}, {gigabytes(size)}, to {place.root / name}")
    copies.own(place.root)
    with copies.lock(place.root, name, _waits(order)) as lock:
        copy = copies.find(place.root, name)
        if copy is None:
            copies.sweep(place.root, name)
            copies.make_room(place.root, lambda: placement.free(place.root) - place.reserve, size, name)
            aside = place.root / f".{name}.download"
            aside.mkdir(exist_ok=True)
            _fetch(order, hub, commit, aside, size, lock)
            entries = _checked(order, aside, files)
            shutil.rmtree(aside / ".cache", ignore_errors=True)
            manifest = Manifest(order.source, entries, order.verify, time.time())
            on_disk = not filesystems.mount_of(place.root).is_ram
            copy = copies.publish(aside, place.root, name, manifest, sync=on_disk)
    return copy.path


def _waits(order: Order) -> Callable[[copies.Progress | None], None]:
    meter = Meter(order.tell, "another tokenmill fetches it:")

    def wait(progress: copies.Progress | None) -> None:
        if order.halted():
            raise StoppedError(f"stopped while another tokenmill fetched {order.name}")
        meter.at(progress.done if progress else 0, total=progress.total if progress else 0)

    return wait


def _fetch(order: Order, hub: Hub, commit: str, aside: Path, size: int, lock: copies.Lock) -> None:
    """The download in a thread of its own, watched from outside: it has no deadline of its own."""
    trouble: list[PluginError] = []

    def fetch() -> None:
        try:
            hub.fetch(order.name, commit, aside)
        except PluginError as error:
            trouble.append(error)

    thread = threading.Thread(target=fetch, name="download", daemon=True)
    here, moved_at = arrived(aside), time.monotonic()
    meter = Meter(order.tell, "fetched", total=size, start=here)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        if order.halted():
            raise StoppedError(f"stopped while {order.name} was fetched; the next start goes on with it")
        before, here = here, arrived(aside)
        if here != before:
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > PATIENCE_S:
            raise PreflightError(f"{order.name}: no byte came from the hub for {PATIENCE_S:.0f} s", fix="start again")
        lock.note(here, size)
        meter.at(here)
    if trouble:
        words = f"{order.name} could not be fetched: {trouble[0]}"
        raise PreflightError(words, fix="start again: it goes on with what is there")


def _checked(order: Order, aside: Path, files: tuple[HubFile, ...]) -> tuple[FileEntry, ...]:
    """Names and sizes against the hub's own list, headers, and with verify = "sha256" every hash."""
    entries = []
    for file in files:
        path = aside / file.name
        size = path.stat().st_size if path.is_file() else -1
        if size != file.size:
            words = f"{path} has {size} bytes, the hub says {file.size}" if size >= 0 else f"{path} did not come"
            raise PreflightError(words, fix="start again: it goes on with what is there")
        found = sources.digest(path, file.known) if order.verify == "sha256" else ""
        if found and found != file.known:
            path.unlink()  # else the next start would take it for done
            raise PreflightError(f"{path} has {found}, the hub says {file.known}", fix="start again")
        entries.append(FileEntry(file.name, size, hash=found))
    if problems := sources.problems(aside):
        raise PreflightError(f"{order.name} came, but is not whole: {problems[0]}", fix="see the repository's files")
    return tuple(entries)

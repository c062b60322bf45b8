"""Brings the model near: a hub id, a network mount → RAM or a local disk, verified. Servers start from what it returns.

A folder under a copy's name is always right: it got that name after all its bytes were read back (machine/copying.py).
Two runs that stage the same model copy once. A copy in use is never removed (machine/copies.py).
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenmill.config import Config
from tokenmill.errors import PreflightError, UsageError
from tokenmill.machine import copies, filesystems, gpus, nvml
from tokenmill.machine.copies import Copy, Lease
from tokenmill.machine.probe import probe
from tokenmill.machine.sources import SourceFile
from tokenmill.plain import duration, gigabytes
from tokenmill.staging import download, placement
from tokenmill.staging.arrival import follow
from tokenmill.staging.bring import Copying, bring, named
from tokenmill.staging.download import Hub, HuggingFace
from tokenmill.staging.placement import Place, Plan, Source
from tokenmill.staging.staged import Halted, Staged
from tokenmill.steps import Tell

PROBE_S = 3.0
"""What a start may wait for to learn whether a mount is slow."""


def stage(
    config: Config,
    tell: Tell = lambda text: None,
    halted: Halted = lambda: False,
    *,
    wait: bool = False,
    hub: Hub | None = None,
) -> Staged:
    """Raises PreflightError, and StoppedError soon after `halted` says so. `wait`: first until a download has ended."""
    path = Path(config.model.path)
    if not config.model.path or config.engine.kind == "openai" or (config.engine.kind == "fake" and not path.exists()):
        return Staged(path if config.model.path else None)
    if wait and (path.exists() or path.is_absolute()):
        follow(path, tell, halted)
    source = resolve(config, tell, halted, hub=hub)
    if source.parent in roots(config) and (source / copies.MANIFEST).exists():
        return _in_use(source, lambda tell, halted: stage(config, tell, halted, hub=hub))
    if not source.exists():
        raise PreflightError(f"model.path = {source} does not exist", fix="correct model.path")
    if config.stage.to not in ("auto", "off") and Path(config.stage.to).resolve().is_relative_to(source.resolve()):
        raise PreflightError(f"stage.to = {config.stage.to} lies in the model itself", fix="name a folder beside it")
    files, name = named(source)
    found = _existing(config, name)
    if found is not None:
        tell(f"{source} is staged already: {found}")
        plan = Plan(placement.asked(found.parent, name), "")
    else:
        plan = decide(config, source, files, name)
    if plan.place is None:
        if config.stage.to == "auto":
            tell(f"{source} is used where it lies: {plan.why}")
        return Staged(source)
    job = Copying(source, files, name, plan.place, config.stage.verify)
    if found is None:
        tell(f"staging {source}, {gigabytes(job.size)}, to {job.final}: {plan.why}")
    return bring(job, tell, halted)


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
        return len(gpus.choose(nvml.read(), config.fleet.gpus)) // config.fleet.gpus_per_server
    except PreflightError:
        return 0  # `stage` may run where no card is; doctor says so where it matters


def roots(config: Config | None) -> tuple[Path, ...]:
    """Every folder that may hold copies."""
    asked = (Path(config.stage.to),) if config and config.stage.to not in ("auto", "off") else ()
    return (*asked, *placement.roots())


def _existing(config: Config, name: str) -> Path | None:
    if config.stage.to == "off":
        return None
    places = roots(config) if config.stage.to == "auto" else (Path(config.stage.to),)
    return next((root / name for root in places if copies.find(root, name) is not None), None)


def decide(config: Config, source: Path, files: tuple[SourceFile, ...], name: str) -> Plan:
    """Whether and where to a source is copied under this config; `files` and `name` are bring.named's."""
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

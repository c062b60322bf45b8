"""The file systems of all that a run reads and writes: local, or far away behind a mount that looks like a disk?

By the real path, links resolved. The reference run lost its first hours to two of these: the environment on a network
mount (imports hung for 15 s and more) and the weights on it (28 s a shard, seven servers at once).
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill import caches
from tokenmill.checks.base import Context, Finding
from tokenmill.errors import PreflightError
from tokenmill.launch import python_of
from tokenmill.machine import filesystems, fusecache, statfs
from tokenmill.machine.filesystems import Mount
from tokenmill.machine.probe import Probe

SLOW_STAT_MS = 1.0
"""A disk answers in 3 µs from memory and in 0.1 ms from the device; what takes longer is asked for over a wire."""

SLOW_METADATA_S = 5.0
"""Reading the metadata of a few distributions takes 0.1 s; where it takes this, importing torch takes minutes."""

SMALL_MODEL = 64 << 20
"""Bytes below which several streams and a second reading measure nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """A path that matters: what it is to the run, what happens where it is slow, what to do about it."""

    what: str
    path: Path
    harm: str
    fix: str


def check_places(context: Context) -> Iterator[Finding]:
    """Nothing that is read by every server lies behind a network, and what is temporary may be run from."""
    told: set[tuple[str, Path]] = set()
    for place in _places(context):
        real = Path(os.path.realpath(filesystems.existing(place.path)))
        mount = _mount(context, real)
        if (place.what, real) in told:
            continue
        told.add((place.what, real))
        if mount.is_network:
            yield Finding(
                "places", "warn", str(place.path), _words(place, real, mount), place.fix, {"type": mount.kind}
            )
    yield from _model_speed(context)
    yield from _environment_speed(context)
    yield from _temporary(context)


def _mount(context: Context, path: Path) -> Mount:
    """By mountinfo; where that is vague, by what the file system says of itself."""
    mount = context.mount_of(path)
    if mount.kind in ("unknown", "autofs"):
        return Mount(mount.point, statfs.kind_of(path) or mount.kind, mount.source, mount.options)
    return mount


def _words(place: Place, real: Path, mount: Mount) -> str:
    by = f" (really {real})" if real != place.path and not real.is_relative_to(place.path.parent) else ""
    return f"{place.what} {place.path}{by} lies on {mount.kind}, mounted at {mount.point}: {place.harm}"


def _places(context: Context) -> Iterator[Place]:
    config = context.config
    model = Path(config.model.path)
    if model.is_absolute() and context.engine.loads:
        harm = "every server reads all of it at every start"
        yield Place("the model", model, harm, 'tokenmill stage CONFIG   and stage.to = "auto" or a local folder')
    yield Place("the prompt set", Path(config.prompts.path), "it is read three times", "copy it to a local disk")
    yield from _environments(context)
    home = os.environ.get("HF_HOME")
    if home or not model.is_absolute():
        path = Path(home) if home else Path.home() / ".cache" / "huggingface"
        yield Place("HF_HOME", path, "what is fetched goes over the network twice", "export HF_HOME=/a/local/disk")
    if context.engine.cache_variables:
        harm = "locks on it do not hold, and every kernel is looked up over the network"
        yield Place("the compile cache", caches.root(), harm, "export XDG_CACHE_HOME=/a/local/disk")
        for name in context.engine.cache_variables:
            if own := config.engine.env.get(name):
                yield Place(f"engine.env.{name}", Path(own.partition("{")[0]), harm, "leave it out")
    yield Place("TMPDIR", Path("/tmp"), "sockets and locks of every server are made there", "mount a local /tmp")


def _environments(context: Context) -> Iterator[Place]:
    """tokenmill's own and the engine's: thousands of small files, looked up anew by every server that starts."""
    servers = context.config.fleet.servers or len(context.cards) or 1
    fix = "python3 -m venv on a local disk, and engine.python = its python"
    yield Place("tokenmill's environment", Path(sys.prefix), "every command takes seconds to begin", fix)
    if context.engine.package and not context.config.engine.command:
        harm = f"{servers} servers look up thousands of files on it while they import, at once"
        yield Place("the engine's python", Path(python_of(context.config)), harm, fix)
        try:
            if prefix := context.package.prefix:
                yield Place("the engine's environment", Path(prefix), harm, fix)
        except PreflightError:
            pass  # the engine's own check tells


def _model_speed(context: Context) -> Iterator[Finding]:
    """Measured: a type tells what a file system is, and not how fast."""
    model = Path(context.config.model.path)
    if not model.is_absolute() or not model.exists() or not context.engine.loads:
        return
    mount = _mount(context, Path(os.path.realpath(model)))
    if mount.is_ram:
        return
    speed = context.read_speed(model)
    values = {"stat_ms": speed.stat_ms, "read_mb_s": speed.read_mb_s, "parallel_mb_s": speed.parallel_mb_s}
    values |= {"cached": float(speed.cached)}
    words = f"{model} on {mount.kind}: {_measured(speed, filesystems.size_of(model))}"
    if not mount.is_network and SLOW_STAT_MS < speed.stat_ms < float("inf"):
        harm = f"{words}: it is far away, whatever its type says, and every server reads all of it at every start"
        yield Finding("places", "warn", str(model), harm, 'stage.to = "/dev/shm" or a local folder', values)
    elif speed.stat_ms == float("inf"):
        yield Finding("places", "unknown", str(model), f"{words}: it may hang", f"ls {model}")
    else:
        yield Finding("places", "ok", str(model), words, values=values)
    if mount.is_network:
        yield from _hidden_cache(mount, model)


def _measured(speed: Probe, size: int) -> str:
    if speed.stat_ms == float("inf"):
        return "no answer in time"
    words = f"{speed.stat_ms:.2g} ms a look-up, {speed.read_mb_s:.0f} MB/s in one stream"
    if size < SMALL_MODEL:
        return words
    kept = "kept" if speed.cached else "not kept"
    return f"{words}, {speed.parallel_mb_s:.0f} in several, {kept} in memory when opened again"


def _hidden_cache(mount: Mount, model: Path) -> Iterator[Finding]:
    """A FUSE mount that keeps what was read on a local disk may fill it."""
    cache = fusecache.cache_of(mount.point)
    if cache is None:
        return
    room, size = filesystems.free_bytes(cache), filesystems.size_of(model)
    if room < size:
        words = f"{mount.point} keeps what is read in {cache}, which has {room / 1e9:.0f} GB free; the model has"
        words += f" {size / 1e9:.0f} GB"
        yield Finding("places", "warn", str(cache), words, f"df -h {cache}", {"room": room, "size": size})


def _environment_speed(context: Context) -> Iterator[Finding]:
    if not context.engine.package or context.config.engine.command:
        return
    try:
        package = context.package
    except PreflightError:
        return
    if package.seconds > SLOW_METADATA_S:
        words = f"reading a few packages' metadata in {package.prefix} took {package.seconds:.0f} s: imports will take"
        words += " minutes, in every server"
        fix = "python3 -m venv on a local disk, and engine.python = its python"
        yield Finding("places", "warn", package.prefix, words, fix, {"seconds": package.seconds})


def _temporary(context: Context) -> Iterator[Finding]:
    """Engines write wrappers and libraries to their TMPDIR and run them from there (cases C01)."""
    if context.config.engine.addresses:
        return
    mount = context.mount_of(Path("/tmp"))
    if "noexec" in mount.options:
        words = f"/tmp lies on {mount.kind} at {mount.point}, mounted noexec: what an engine compiles or wraps there"
        yield Finding("places", "warn", "/tmp", f"{words} cannot run", f"mount -o remount,exec {mount.point}")

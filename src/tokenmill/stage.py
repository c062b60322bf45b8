"""Brings the model near: downloads a hub id, copies from a slow file system to RAM or a local disk, verified.

Servers start from what `stage` returns. A copy is written under another name and renamed when it is whole, so a folder
under the final name is always right. Two runs that stage the same model copy once: the second waits for the lock.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import xxhash

from tokenmill.config import Config
from tokenmill.errors import PreflightError
from tokenmill.machine import filesystems, memory, modelfiles

RAM_DISK = Path("/dev/shm")
RAM_RESERVE = 16 * 10**9
"""Bytes of memory left for the servers' host side, which takes 5 to 10 GB each while they load."""

DISK_RESERVE = 10 * 10**9
STREAMS = 8
"""Files copied at once: on a mount with 4 ms a read, 4 files in parallel were 14 times as fast as one."""

BLOCK = 16 << 20

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the model is read from and where it goes: `target` None means that it is used where it lies."""

    source: Path
    target: Path | None
    why: str


def stage(config: Config, tell: Tell = lambda text: None) -> Path | None:
    """The model's path on this machine, ready to load; None where there is nothing to stage. Raises PreflightError."""
    if not config.model.path or config.engine.kind in ("openai", "fake"):
        return Path(config.model.path) if config.model.path else None
    source = resolve(config, tell)
    plan = decide(source, config.stage.to)
    if plan.target is None:
        return source
    tell(f"staging {source} to {plan.target}: {plan.why}")
    return copy(source, plan.target, config.stage.verify, tell)


def resolve(config: Config, tell: Tell = lambda text: None) -> Path:
    """The model's folder or file; a hub id is fetched into the hub's own cache."""
    path = Path(config.model.path)
    if path.exists() or path.is_absolute():
        return path
    from huggingface_hub import snapshot_download

    tell(f"fetching {config.model.path} from the hub")
    try:
        return Path(snapshot_download(config.model.path, revision=config.model.revision or None))
    except (OSError, ValueError) as error:
        raise PreflightError(f"model.path = {config.model.path} is no folder and cannot be fetched: {error}") from error


def decide(source: Path, to: str) -> Plan:
    """auto: only from a network file system, to the RAM disk where there is room, else to the local cache."""
    if to == "off":
        return Plan(source, None, "staging is off")
    if to != "auto":
        return Plan(source, Path(to), "asked for")
    mount = filesystems.mount_of(source)
    if not mount.is_network:
        return Plan(source, None, f"{mount.kind} is local")
    size = filesystems.size_of(source)
    if RAM_DISK.is_dir() and min(filesystems.free_bytes(RAM_DISK), memory.available()) >= size + RAM_RESERVE:
        return Plan(source, RAM_DISK / "tokenmill", f"{mount.kind} is a network file system, and RAM has room")
    disk = platformdirs.user_cache_path("tokenmill") / "models"
    if filesystems.free_bytes(disk) >= size + DISK_RESERVE and not filesystems.mount_of(disk).is_network:
        return Plan(source, disk, f"{mount.kind} is a network file system, and the local disk has room")
    return Plan(
        source, None, f"{mount.kind} is slow, but neither RAM nor the local disk has room for {size / 1e9:.0f} GB"
    )


def copy(source: Path, root: Path, verify: str, tell: Tell = lambda text: None) -> Path:
    """Copies a model's file or folder below `root`, links followed; returns the copy. A whole copy is used again."""
    key = modelfiles.fingerprint(source)
    target = root / f"{source.name}-{key}"
    final = target / source.name if source.is_file() else target
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            tell(f"{final} is there already")
            return final
        aside = root / f".{target.name}.{os.getpid()}"
        for leftover in root.glob(f".{target.name}.[0-9]*"):
            shutil.rmtree(leftover, ignore_errors=True)  # we hold the lock: whoever wrote it is dead
        try:
            _copy_all(source, aside, verify)
            aside.rename(target)
        except OSError as error:
            raise PreflightError(
                f"{source} could not be copied to {root}: {error}", fix='set stage.to = "off"'
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return final


def _copy_all(source: Path, aside: Path, verify: str) -> None:
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    base = source.parent if source.is_file() else source
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="stage") as pool:
        list(pool.map(lambda file: _copy_one(file, aside / file.relative_to(base), verify), files))


def _copy_one(source: Path, target: Path, verify: str) -> None:
    before = source.stat()
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_128()
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while block := reader.read(BLOCK):
            digest.update(block)
            writer.write(block)
    after = source.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise OSError(f"{source} changed while it was copied")
    if target.stat().st_size != after.st_size:
        raise OSError(f"{target} has {target.stat().st_size} bytes of {after.st_size}")
    if verify != "size" and _digest(target) != digest.digest():
        raise OSError(f"{target} reads back otherwise than it was written")


def _digest(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as reader:
        while block := reader.read(BLOCK):
            digest.update(block)
    return digest.digest()

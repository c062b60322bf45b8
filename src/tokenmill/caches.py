"""Folders for compiled kernels (Triton, inductor, flashinfer …): one per server slot, persistent, on a local disk.

Shared by several servers that start together they race or lock up (cases C07); thrown away they cost minutes a start.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
import psutil

LIMIT = 20 * 10**9
"""Bytes kept over all engines and flags: one SGLang set is 0.2 to 2 GB."""


def root() -> Path:
    return platformdirs.user_cache_path("tokenmill") / "compile"


def folder_for(engine: str, version: str, gpu_name: str, index: int, args: Mapping[str, Any]) -> Path:
    """A server's own folder for compiled kernels: they depend on version, card and flags, and race when shared."""
    key = hashlib.sha256(f"{version}\0{gpu_name}\0{sorted(map(str, args.items()))}".encode()).hexdigest()[:12]
    return root() / f"{engine}-{version or 'unknown'}-{key}" / str(index)


def seed(folder: Path) -> bool:
    """Fills an empty cache from the first server's, so that less is left to compile; True where it did.

    That server may compile meanwhile: a copy that trips over a file that comes or goes is thrown away.
    """
    first, aside = folder.with_name("0"), folder.with_name(f".{folder.name}.{os.getpid()}")
    if folder == first or folder.exists() or not first.is_dir():
        return False
    try:
        shutil.copytree(first, aside, ignore=shutil.ignore_patterns("*.lock", "*.tmp*", "tmp.*"))
        aside.rename(folder)
    except OSError:
        return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def prune(place: Path, limit: int = LIMIT) -> None:
    """Removes the least recently used sets of compiled kernels beyond the limit, never the newest, and what a `seed`
    left that died with its process."""
    for aside in place.glob("*/.*.*"):
        if (pid := aside.name.rpartition(".")[2]).isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(aside, ignore_errors=True)
    folders = [path for path in place.glob("*") if path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for position, folder in enumerate(folders):
        with contextlib.suppress(FileNotFoundError):  # another run prunes or compiles at the same time
            total += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if position and total > limit:
            shutil.rmtree(folder, ignore_errors=True)

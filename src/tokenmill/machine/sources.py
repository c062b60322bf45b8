"""A model's files as they lie: real paths, sizes, times, and the hashes that a download left beside them.

Links are followed: what is copied are bytes, never a link of somebody's cache.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill.machine import wholeness
from tokenmill.machine.threads import each

_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_BLOCK = 1 << 20

HEAD = 1 << 16
"""Bytes that tell a file from another of its size: all of most text files, the names and shapes of most weights."""

READERS = 16
"""A model has some 25 files; on a slow mount each costs its round trips."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file: `name` relative to the model's folder, `path` the real file. `known` is the hub's own hash, as
    "sha256:…" or "git:…" (a blob's id), empty where none is known."""

    name: str
    path: Path
    size: int
    mtime_ns: int
    known: str = ""


def listing(source: Path) -> tuple[SourceFile, ...]:
    """The files of a model, in order; hidden ones are left out. Raises OSError, for a dangling link for one.

    A .gguf file in parts brings its other parts along.
    """
    if source.is_dir():
        return tuple(sorted(_walk(source, source, set()), key=lambda file: file.name))
    found = _SPLIT.fullmatch(source.name)
    pattern = f"{found[1]}-[0-9][0-9][0-9][0-9][0-9]-of-{found[2]}.gguf" if found else ""
    parts = sorted(source.parent.glob(pattern)) if pattern else [source]
    return tuple(_file(part, part.name) for part in parts)


def _walk(base: Path, folder: Path, seen: set[tuple[int, int]]) -> Iterator[SourceFile]:
    status = folder.stat()
    if (status.st_dev, status.st_ino) in seen:
        return  # a link that leads back up
    seen.add((status.st_dev, status.st_ino))
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(base, path, seen)
        elif path.is_symlink() or path.is_file():
            yield _file(path, str(path.relative_to(base)))


def _file(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return SourceFile(name, Path(os.path.realpath(path)), status.st_size, status.st_mtime_ns, _known(path, name))


def _known(path: Path, name: str) -> str:
    """From the hub's cache, where a file is a link to its hash, or from the metadata beside a --local-dir download."""
    if path.is_symlink() and (found := _named(path.readlink().name)):
        return found
    base = path
    for _ in Path(name).parts:
        base = base.parent
    try:
        lines = (base / ".cache/huggingface/download" / f"{name}.metadata").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return ""
    return _named(lines[1].strip()) if len(lines) > 1 else ""


def _named(text: str) -> str:
    if _SHA256.fullmatch(text):
        return f"sha256:{text}"
    return f"git:{text}" if _SHA1.fullmatch(text) else ""


def problems(model: Path) -> list[str]:
    """What is missing or broken in a model's files, so that it cannot be used; empty where it is whole."""
    return [str(fault) for fault in wholeness.faults(model) if fault.grave]


def digest(path: Path, known: str) -> str:
    """A file's hash of the kind that is known of it; its SHA-256 where none is."""
    git = known.startswith("git:")
    algorithm = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
    if git:
        algorithm.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            algorithm.update(block)
    return f"{'git' if git else 'sha256'}:{algorithm.hexdigest()}"


def _head(file: SourceFile) -> bytes:
    with file.path.open("rb", buffering=0) as stream:
        return stream.read(HEAD)


def copy_name(source: Path, files: tuple[SourceFile, ...]) -> str:
    """The name of a model's copy: readable, and another one for every other content.

    Names, sizes, times and hashes tell; how each file begins as well, since some mounts keep no times.
    """
    told = hashlib.sha256(os.fsencode(os.path.realpath(source)))
    for file, head in zip(files, each(files, _head, READERS), strict=True):
        told.update(
            f"\0{file.name}\0{file.size}\0{file.mtime_ns}\0{file.known}\0".encode("utf-8", "surrogateescape") + head
        )
    key = told.hexdigest()[:12]
    snapshot = source.parent.name == "snapshots"
    return f"{source.parent.parent.name.removeprefix('models--') if snapshot else source.name}-{key}"

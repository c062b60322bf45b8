"""A copy → a run folder again; and the book that a run folder keeps of its copy.

What is fetched is verified, put together aside and renamed into place at once: a death in the middle leaves the folder
as empty as it was. An older copy is taken, and said, where the newest is damaged; an empty run is begun on none.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash
from msgspec.structs import replace

from tokenmill import store
from tokenmill.backup import layout
from tokenmill.backup.layout import Copied, DamagedError, Manifest, Sign
from tokenmill.errors import StoreError
from tokenmill.folder import RunFolder, write_aside

TOLD = ("events.jsonl", "history.jsonl", "environment.jsonl", "notified.json")
"""What tells of the run's past. This start has begun some of them anew: the old comes before the new, but for the last,
of which the new one stays."""

_DATA = r"data/(?:journal-\d+\.jsonl|part-\d+\.parquet|settings\.jsonl|prompts\.json)"
_WANTED = re.compile(rf"{'|'.join(map(re.escape, TOLD))}|{_DATA}")
"""What comes back. The config is the one that `run` was given, and a report is written anew."""


class Book(msgspec.Struct, frozen=True):
    """What a run folder knows of its copy, in copy.json.

    `folder` is its own id, new at every restore; `restored` the newest copy that was there then, by folder and number;
    `apart` the copy's folder, where that lay on another disk; `files` are the pieces that were verified, whether a
    manifest names them yet or not.
    """

    folder: str = ""
    restored: tuple[str, int] = ("", 0)
    files: tuple[Copied, ...] = ()
    apart: str = ""

    def knows(self, manifest: Manifest) -> bool:
        """Whether the manifest tells a past of this folder."""
        return manifest.folder == self.folder or (manifest.folder, manifest.number) == self.restored


def read_book(folder: RunFolder) -> Book:
    """Empty where there is none: a folder that was never copied."""
    try:
        return msgspec.json.decode(_book(folder).read_bytes(), type=Book)
    except (FileNotFoundError, msgspec.DecodeError):
        return Book()


def write_book(folder: RunFolder, book: Book) -> None:
    write_aside(_book(folder), msgspec.json.encode(book))


def check_mount(folder: RunFolder, target: Path) -> None:
    """Raises OSError where the copy's mount is gone: what is written there now would fill the run folder's disk."""
    book = read_book(folder)
    apart = str(target) if target.parent.stat().st_dev != folder.path.stat().st_dev else ""
    if book.apart == str(target) and not apart:
        raise OSError(errno.ENODEV, "its mount is gone: the disk of the run folder is there now", str(target.parent))
    if book.apart != apart:
        write_book(folder, replace(book, apart=apart))


def own_id(folder: RunFolder) -> str:
    """The run folder's id, given to it the first time."""
    book = read_book(folder)
    if not book.folder:
        book = replace(book, folder=secrets.token_hex(8))
        write_book(folder, book)
    return book.folder


def _book(folder: RunFolder) -> Path:
    return folder.path / "copy.json"


def is_empty(data: Path) -> bool:
    """Whether no record is stored here."""
    return not store.parts(data) and not any(journal.stat().st_size for journal in store.journals(data))


def restore(
    target: Path, names: frozenset[str], folder: RunFolder, warn: Callable[[str], None], sign: Sign
) -> Manifest:
    """Fills an empty run folder from the newest copy that is whole; raises StoreError where there is none."""
    aside = folder.path / ".restore"
    shutil.rmtree(aside, ignore_errors=True)
    newest: Manifest | None = None
    for manifest in layout.manifests(target, names):
        newest = newest or manifest
        try:
            for file in manifest.files:
                if _WANTED.fullmatch(file.source):
                    _fetch(target, file, aside / file.source, sign)
        except (DamagedError, FileNotFoundError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            warn(f"copy {manifest.number} cannot be restored: {error}")
            continue
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk is not left full
            raise
        (aside / "data").mkdir(parents=True, exist_ok=True)
        _place(aside, folder, manifest, newest)
        return manifest
    raise StoreError(
        f"{folder.path} is empty, and no copy in {target} is whole", fix=f"mv {target} {target}.old   begins anew"
    )


def _fetch(target: Path, file: Copied, path: Path, sign: Sign) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_128()
    with path.open("xb") as out:
        for piece in file.pieces:
            if piece.start != out.tell():
                raise DamagedError(f"{piece.name} begins at byte {piece.start} of {file.source}, not at {out.tell()}")
            for data in layout.get(target / piece.name, piece.size, piece.xxh3, sign):
                digest.update(data)
                out.write(data)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != file.xxh3:
        raise DamagedError(f"{file.source} has other bytes than were copied")


def _tell_past(old: bytes, path: Path) -> None:
    new = path.read_bytes() if path.exists() else b""
    if not new.startswith(old) and (not new or path.suffix == ".jsonl"):
        write_aside(path, old + new)


def _place(aside: Path, folder: RunFolder, manifest: Manifest, newest: Manifest) -> None:
    """The book first: a death before `data` is in place restores again, one after it knows what it has."""
    book = Book(secrets.token_hex(8), (newest.folder, newest.number), manifest.files, read_book(folder).apart)
    write_book(folder, book)
    for name in TOLD:
        if (aside / name).exists():
            _tell_past((aside / name).read_bytes(), folder.path / name)
    shutil.rmtree(folder.data, ignore_errors=True)  # it holds no record
    (aside / "data").rename(folder.data)
    handle = os.open(folder.path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    shutil.rmtree(aside, ignore_errors=True)

"""A new folder that is there whole or not at all: made aside, beside its place, synced, renamed.

Two who make the same one at once do not meet: the first to be done has it, and the other is told so.
"""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.errors import StoreError, UsageError
from tokenmill.store import sync_folder

NAME_CHARS = 32
"""Of the folder's name in the name aside: with the host's and four bytes a character it stays below 255 bytes."""


@contextmanager
def made(out: Path) -> Iterator[Path]:
    """The folder to write into, for the block; at its end it becomes `out`, after an error it is gone.

    Raises UsageError where there is such a thing already, StoreError where the disk will not have it.
    """
    if os.path.lexists(out):
        raise _taken(out)
    aside = out.with_name(f"{_aside(out)}{os.getpid()}")
    try:
        _clear(out)
        aside.mkdir(parents=True)
        yield aside
        _sync(aside)
        _rename(aside, out)
        sync_folder(out.parent)
    except OSError as error:
        raise StoreError(f"{out} could not be written: {error.strerror or error}", fix=f"df -h {out.parent}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _taken(out: Path) -> UsageError:
    return UsageError(f"{out} exists already", fix="name a new folder, or remove it")


def _rename(aside: Path, out: Path) -> None:
    try:
        aside.rename(out)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _taken(out) from error
        raise


def _clear(out: Path) -> None:
    """Removes what was left aside for the same place by processes of this machine that were killed."""
    for left in out.parent.iterdir() if out.parent.is_dir() else ():
        pid = left.name.removeprefix(_aside(out))
        if left.name != pid and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _aside(out: Path) -> str:
    """The name under which this machine writes aside, less the process: others may share the mount."""
    return f".{out.name[:NAME_CHARS]}.{socket.gethostname()}-"


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)

"""A new folder that is there whole or not at all: written aside, synced, renamed."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.errors import StoreError, UsageError
from tokenmill.store import sync_folder


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """The folder to write to for the scope, at whose end it is `out`; nothing is left where the scope raises.

    Raises UsageError where `out` is there already, StoreError for what the system refuses.
    """
    if out.exists():
        raise UsageError(f"{out} exists already", fix="name a new folder, or remove it")
    aside = out.with_name(f"{_prefix(out)}{os.getpid()}")
    try:
        _clear(out)
        aside.mkdir(parents=True)
        yield aside
        _sync(aside)
        aside.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise StoreError(f"{out} could not be written: {error.strerror or error}", fix=f"df -h {out.parent}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _clear(out: Path) -> None:
    """Removes what this machine left behind on its way to the same place, when it was killed."""
    for left in out.parent.iterdir() if out.parent.is_dir() else ():
        pid = left.name.removeprefix(_prefix(out))
        if left.name != pid and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _prefix(out: Path) -> str:
    """The name under which this machine writes aside, less the process: others may share the mount."""
    return f".{out.name}.{socket.gethostname()}-"


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)

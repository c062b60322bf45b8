"""Whether files can be read at this moment: a mount that is away fails, or hangs, in every process alike."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenmill.machine import threads

DEADLINE_S = 5.0
"""An object store's first byte takes a second at the worst; what takes longer is as good as away."""


def unreadable(paths: Iterable[Path], deadline_s: float = DEADLINE_S) -> str:
    """The first of the paths that cannot be read, and why; empty where all can. Returns within the deadline."""
    return next((f"{path} cannot be read: {why}" for path in paths if (why := _why(path, deadline_s))), "")


def _why(path: Path, deadline_s: float) -> str:
    try:
        threads.ask(lambda: _touch(path)).result(deadline_s)
    except TimeoutError:
        return f"no answer within {deadline_s:.0f} s"
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _touch(path: Path) -> None:
    files = islice((entry for entry in path.iterdir() if entry.is_file()), 1) if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as opened:
            opened.read(1)

"""Waits for a model that is still coming: a download by another program, into a folder or the hub's cache.

The reference run was launched on 52 of 54 GB. Here "whole" is what machine/sources finds no fault in, and no byte came
between two looks: the last shard of some tools has its name and size before its content.
"""

import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.errors import PreflightError, StoppedError
from tokenmill.machine import modelfiles, sources
from tokenmill.plain import gigabytes
from tokenmill.steps import Meter, Tell

LOOK_S = 2.0
HOLE = 1 << 16
"""Bytes that a file may lack on its disk: small files, tails and the like are packed by some file systems."""

PATIENCE_S = 600.0
"""No new byte for so long: whoever downloads has ended or hangs."""


def follow(
    source: Path,
    tell: Tell,
    halted: Callable[[], bool] = lambda: False,
    *,
    look_s: float = LOOK_S,
    patience_s: float = PATIENCE_S,
) -> None:
    """Returns once the model is whole; raises PreflightError where nothing comes any more, StoppedError."""
    problems, before = _problems(source), arrived(source)
    waited, quiet_since = False, time.monotonic()
    meter = Meter(tell, "waiting:", start=before, every_s=5 * look_s)
    while True:
        time.sleep(look_s)
        if halted():
            raise StoppedError(f"stopped while {source} was still coming")
        now, problems = arrived(source), _problems(source)
        if now != before:
            before, quiet_since = now, time.monotonic()
        elif not problems:
            if waited:
                tell(f"{source} is whole: {gigabytes(now)}")
            return
        elif time.monotonic() - quiet_since >= patience_s:
            words = f"{source} is not whole, and no byte came for {patience_s:.0f} s: {_first(problems)}"
            raise PreflightError(words, fix="start its download again")
        waited = True
        meter.at(now, _first(problems), total=expected(source))


def _problems(source: Path) -> list[str]:
    try:
        return sources.problems(source) or _holes(source)
    except (OSError, PreflightError) as error:
        return [str(error)]  # a config.json of which only half is there


def _holes(source: Path) -> list[str]:
    """Files whose room is reserved and not written yet; a file system that does not count blocks has none."""
    found = []
    for file in sources.listing(source):
        written = file.path.stat().st_blocks * 512
        if 0 < written < file.size - HOLE:
            found.append(f"{file.path} has {written} bytes of {file.size}: the rest is a hole")
    return found


def _first(problems: list[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "") if problems else ""


def arrived(source: Path) -> int:
    """Bytes that are there, unfinished files of the hub's downloads included; room that is only reserved is not."""
    folders = [source, source / ".cache" / "huggingface" / "download"]
    if source.parent.name == "snapshots":
        folders.append(source.parent.parent / "blobs")
    seen: set[tuple[int, int]] = set()
    total = 0
    for path in (path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*"))):
        try:
            status = path.stat()
        except OSError:
            continue  # renamed just now, or a link to what is still to come
        if path.is_file() and (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += min(status.st_size, status.st_blocks * 512) if status.st_blocks else status.st_size
    return total


def expected(source: Path) -> int:
    """Bytes of all weights, as the index says; 0 where there is none yet."""
    try:
        size = modelfiles.read_json(source / "model.safetensors.index.json").get("metadata", {}).get("total_size", 0)
    except PreflightError:
        return 0
    return size if isinstance(size, int) else 0

"""The local folder that a FUSE file system caches in: hidden, on some disk of this machine, and filled by reading.

Told by the command line of the process that serves the mount; in a container that process is mostly out of sight.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenmill.machine import processes

_OPTION = re.compile(r"--?(?:vfs-)?cache(?:-dir)?|(?:.*,)?(?:use_cache|cache_dir|cachedir)")
"""rclone, gcsfuse, juicefs and goofys: --cache-dir; mount-s3: --cache; s3fs: -o use_cache=…"""


def cache_of(point: str, commands: Iterable[Sequence[str]] | None = None) -> Path | None:
    """Where the server of a mount point caches; None where it does not, or where that cannot be told."""
    for words in _commands() if commands is None else commands:
        if point in words[1:]:
            for place, word in enumerate(words):
                name, separator, value = word.partition("=")
                found = value.split(",")[0] if separator else next(iter(words[place + 1 : place + 2]), "")
                if _OPTION.fullmatch(name) and found.startswith("/"):
                    return Path(found)
    return None


def _commands() -> Iterable[list[str]]:
    for pid in processes.pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        yield [word.decode("utf-8", "replace") for word in words.split(b"\0")]

"""A process that outlives its node: ends servers that nobody has come back for.

Ray ends an actor with its raylet, and nobody asks it first. The servers live on, to be adopted by the machine's next
node; where none comes within `fleet.wait_for_head`, nothing else would end them. A pipe says when the node is gone.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 1.0
"""Between two looks at whether a node has come: a look reads /proc once."""


class Sentry:
    """The node's end of the pipe: the kernel closes it however the node dies."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        quiet = subprocess.DEVNULL
        words = [sys.executable, "-m", "tokenmill.sentry", str(folder), str(patience_s)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def dismiss(self) -> None:
        """Another has its place."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b".")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already


def watch(path: Path, patience_s: float) -> None:
    """Until another node has the servers of a node's folder, or none is left; they are ended after `patience_s`."""
    # Only now: one that waits for its node's end, as nearly all of them do for ever, is to cost nothing.
    from tokenmill.errors import PreflightError, UsageError
    from tokenmill.events import EventLog
    from tokenmill.folder import RunFolder
    from tokenmill.leftovers import end, kill, survivors

    folder = RunFolder(path)
    deadline = time.monotonic() + patience_s
    while not folder.state().keep and (left := survivors(folder)):
        if folder.owner() is not None:
            return
        if time.monotonic() >= deadline:
            try:
                with folder.own("sentry"):
                    log = EventLog(folder.events)
                    log.say("node", f"it was killed, and no other has come for {patience_s:.0f} s", "warn")
                    asyncio.run(end(folder, survivors(folder), log))
            except UsageError:
                pass  # a node has come
            except PreflightError:
                kill(left)  # a full disk
            return
        time.sleep(min(LOOK_S, patience_s / 5))


if __name__ == "__main__":
    if not sys.stdin.buffer.read(1):
        watch(Path(sys.argv[1]), float(sys.argv[2]))

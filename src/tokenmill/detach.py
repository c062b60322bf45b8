"""A run in a session of its own: started, and left alone once it generates."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tokenmill.folder import RunFolder

LOOK_S = 0.2
"""Between two looks at whether it generates."""

SHOWN_LINES = 15
"""Of run.log, where the start failed: the message and its fix."""

UNDER_WAY = ("generating", "sealing", "done")


def detach(folder: RunFolder, config: Path, words: Sequence[str]) -> tuple[int, list[str]]:
    """Starts `tokenmill run CONFIG WORDS…` and waits until it generates, or has ended; returns the exit code to leave
    with, and what to say."""
    folder.create()
    command = [sys.executable, "-m", "tokenmill", "run", str(config), "--detached", *words]
    started = time.time()
    with folder.run_log.open("ab") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    while (code := child.poll()) is None:
        found = folder.status()
        if found is not None and found.updated >= started and found.state in UNDER_WAY:
            return 0, [f"running as pid {child.pid}; follow it with: tokenmill watch {folder.path}"]
        time.sleep(LOOK_S)
    if not code:
        return 0, []
    last = folder.run_log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    told = f"the run ended with exit code {code}; the last lines of {folder.run_log}:"
    return code, [told, *(f"  {line}" for line in last)]

"""A short calibration: the run itself, for a minute and a half. What it generates is kept, and so are its servers."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tokenmill.errors import PreflightError
from tokenmill.folder import RunFolder

GENERATE_S = 90.0
"""Of generating: half a minute for batches to fill, a minute to be measured (measured.RATE_FROM_S)."""

LOOK_S = 0.2
"""Between two looks at how far it is."""

STDERR = 2
"""Its descriptor: stdout is the plan's."""

DONE, INTERRUPTED = 0, 130


def calibrate(folder: RunFolder, config: Path, settings: Sequence[str]) -> None:
    """Runs a config until it has generated for so long, and stops it; its output goes to stderr.

    Servers stay up for the next `run`. Raises PreflightError where the run ends for another reason.
    """
    own = ("--set=fleet.drain='1s'", "--set=fleet.keep_servers='stopped'")
    words = [sys.executable, "-m", "tokenmill", "run", str(config), *(f"--set={text}" for text in settings), *own]
    began = time.time()
    run = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=STDERR)
    try:
        while run.poll() is None:
            status = folder.status()
            if status is not None and status.updated >= began and status.seconds >= GENERATE_S:
                run.send_signal(signal.SIGINT)
                run.wait()
            time.sleep(LOOK_S)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.wait()
    if run.returncode not in (DONE, INTERRUPTED):
        raise PreflightError(f"the calibration's run ended with exit code {run.returncode}; its words are above")

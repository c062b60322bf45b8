"""The command's first moments, before it can say anything itself."""

import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import builtins, os, signal
real = builtins.__import__
def watched(name, *rest):
    if "{module}" in (name, *(rest[2] or () if len(rest) > 2 else ())):
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = watched
{before}
from tokenmill.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["cli", "typer", "tokenmill.plan"])
def test_ctrl_c_while_the_command_is_loaded_shows_no_traceback(module: str) -> None:
    code = INTERRUPTED.format(module=module, before="")
    done = subprocess.run([sys.executable, "-c", code, "plan", "absent.toml"], capture_output=True, text=True)
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert done.stderr == ""


def test_a_command_that_was_begun_without_ctrl_c_keeps_ignoring_it() -> None:
    code = INTERRUPTED.format(module="cli", before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

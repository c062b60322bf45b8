"""Whether files can be read now: there, gone, and on a real mount that hangs."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.slowfs import server_of
from tokenmill.machine import reach


def test_what_is_there_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert reach.unreadable([tmp_path, tmp_path / "file"]) == ""


def test_what_is_gone_is_named(tmp_path: Path) -> None:
    assert reach.unreadable([tmp_path, tmp_path / "no"]) == f"{tmp_path}/no cannot be read: No such file or directory"


def test_a_mount_that_hangs_is_away(tmp_path: Path, slow: Callable[..., Path]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    mount = slow(tmp_path / "model")
    server = server_of(mount)
    os.kill(server, signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert reach.unreadable([mount], 0.2) == f"{mount} cannot be read: no answer within 0 s"
        assert time.monotonic() - began < 2.0
    finally:
        os.kill(server, signal.SIGCONT)

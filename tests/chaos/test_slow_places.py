"""doctor on a real slow mount: a FUSE file system of ours, whose answers take 4 ms and may never come."""

import os
import signal
from pathlib import Path

from tests import models
from tests.conftest import Slow
from tests.doctoring import context
from tests.slowfs import server_of
from tokenmill import doctor
from tokenmill.checks.base import Context
from tokenmill.checks.places import check_places


def test_a_model_on_a_slow_mount_is_told_with_what_was_measured(tmp_path: Path, slow: Slow) -> None:
    models.usual(tmp_path / "model")
    mount = slow(tmp_path / "model", "--latency-ms", "4")
    canned = context(tmp_path, model={"path": str(mount)})
    found = Context(canned.config, canned.folder, [])
    told, measured = (finding for finding in check_places(found) if finding.subject == str(mount))
    assert (told.level, measured.level) == ("warn", "ok")
    assert f"the model {mount} lies on fuse" in told.message
    assert "tokenmill stage" in told.fix
    assert measured.values["read_mb_s"] < 1000


def test_a_mount_whose_server_is_gone_is_named_and_not_waited_for(tmp_path: Path, slow: Slow) -> None:
    models.usual(tmp_path / "model")
    mount = slow(tmp_path / "model")
    server = server_of(mount)
    found = context(tmp_path, model={"path": str(mount)})
    os.kill(server, signal.SIGSTOP)
    try:
        findings = doctor.examine(found, deadline_s=1.0)
    finally:
        os.kill(server, signal.SIGCONT)
    slow_ones = {finding.check for finding in findings if "is slow" in finding.message}
    assert {"places", "model"} <= slow_ones
    assert "ports" not in slow_ones, "one that hangs hides no other"

"""A file system's speed, measured on the model's own files, in time even where the mount hangs."""

import random
import time
from pathlib import Path

from tests.conftest import Slow
from tokenmill.machine.probe import Probe, probe


def test_a_slow_mount_is_measured_and_seen_to_gain_by_parallel_reads(tmp_path: Path, slow: Slow) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(random.Random(1).randbytes(48 << 20))
    (tmp_path / "source" / "config.json").write_text("{}")
    found = probe(slow(tmp_path / "source", "--latency-ms", "10"))
    assert 0.0 < found.read_mb_s < 300.0
    assert found.parallel_mb_s > found.read_mb_s
    assert found.stat_ms < float("inf")
    assert not found.cached, "it forgets a file when it is opened again"


def test_a_mount_that_hangs_costs_the_deadline_and_is_not_called_fast(tmp_path: Path, slow: Slow) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(bytes(1 << 20))
    mount = slow(tmp_path / "source", "--latency-ms", "5000")
    began = time.monotonic()
    found = probe(mount, 0.3)
    assert time.monotonic() - began < 4.0, "the deadline, and not the mount, ended it"
    assert (found.read_mb_s, found.cached) == (0.0, False)


def test_where_nothing_can_be_read_nothing_is_claimed(tmp_path: Path) -> None:
    assert probe(tmp_path / "none") == Probe()
    assert probe(tmp_path) == Probe()

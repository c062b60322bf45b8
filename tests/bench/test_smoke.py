"""The benchmark's code still runs, in small: no figure is asserted, but that nothing is lost, doubled or misplaced."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.measure import ROOT


@pytest.mark.timeout(180)
def test_every_figure_is_measured_in_small(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    words = [sys.executable, "-m", "bench", "--smoke", "--scratch", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mine.exists()  # only what is bench's own is cleared
    for what in (
        "300 B",
        "30,000 B",
        "in flight, 30 KB: ",
        "MB are sealed: ",
        "slots busy",
        "peak memory",
        "to the first new request",
        "not kept",
        "staging",
        "one head",
        "end of a set",
        "the page of",
        "side by side",
        "every count: all right",
    ):
        assert what in done.stdout
    assert "rows after kill and resume: doubled 0, lost 0, wrong row 0" in done.stdout

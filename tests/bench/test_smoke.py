"""The benchmark's code still runs, in small: no figure is asserted, but that nothing is lost, doubled or misplaced."""

import subprocess
import sys

import pytest
from bench.measure import ROOT


@pytest.mark.timeout(180)
def test_every_figure_is_measured_in_small() -> None:
    done = subprocess.run([sys.executable, "-m", "bench", "--smoke"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
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

"""The benchmark's code still runs, in small: no figure is asserted, but that nothing is lost, doubled or misplaced."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.measure import ROOT

QUICK = {
    "kept": ("not kept", "rows after kill and resume: doubled 0, lost 0, wrong row 0"),
    "stage": ("staging",),
    "head": ("one head", "end of a set"),
    "reference": ("every count: all right",),
}
SLOW = {
    "peers": ("side by side",),
    "cost": ("300 B", "30,000 B"),
    "lag": ("in flight, 30 KB: ", "MB are sealed: "),
    "slots": ("slots busy",),
    "memory": ("peak memory",),
    "resume": ("to the first new request",),
    "page": ("the page of",),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("figures", [QUICK, pytest.param(SLOW, marks=pytest.mark.long)], ids=["quick", "slow"])
def test_every_figure_is_measured_in_small(tmp_path: Path, figures: dict[str, tuple[str, ...]]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    words = [sys.executable, "-m", "bench", *figures, "--smoke", "--scratch", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mine.exists()  # only what is bench's own is cleared
    for what in (words for found in figures.values() for words in found):
        assert what in done.stdout

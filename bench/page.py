"""The page of a large run: how soon it opens, how soon all is found, what the process has in memory."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import data
from bench.measure import ROOT
from tokenmill.core.status import PromptCounts, RunStatus
from tokenmill.folder import RunFolder, State

PATIENCE_S = 120.0
"""For a machine that others use, too."""


def measure_all(scratch: Path, records: int) -> list[tuple[str, str, str]]:
    """Rows of what, goal, here; without a browser, which takes half a second more for its charts."""
    folder = RunFolder(scratch / "page")
    folder.create()
    data.write_records(folder.data, range(records), "bench")
    folder.write_state(State())
    folder.write_status(RunStatus("page", "done", PromptCounts(records, records, 0, 0, 0), (), 0.0, None, None))
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder.path), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            address = process.stdout.readline().split()[-1]
            began = time.monotonic()
            _get(f"{address}app.js")
            _begin(address)
            newest = len(json.loads(_get(f"{address}api/records")))
            opened = time.monotonic() - began
            while (catalog := _begin(address)["catalog"])["left"] or catalog["rows"] < records:
                assert time.monotonic() - began < PATIENCE_S, catalog
                time.sleep(0.1)
            taken_in = time.monotonic() - began
            key = f"ROW{records // 2:08d}"
            asked = time.monotonic()
            found = json.loads(_get(f"{address}api/records?order=key&key={key}"))
            search = time.monotonic() - asked
            peak_mb = _peak_mb(process.pid)
        finally:
            process.terminate()
            process.wait()
    assert ([one["key"] for one in found], newest) == ([key], 10)
    return [
        (f"the page of {records:,} records opens, s", "< 2", f"{opened:.2f}"),
        ("all of them can be found, s; a key is, s", "", f"{taken_in:.1f}; {search:.2f}"),
        ("memory of serve at the peak, MB", "< 300", f"{peak_mb:.0f}"),
    ]


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        found: bytes = answer.read()
    return found


def _begin(address: str) -> dict[str, Any]:
    """What a page begins with: the stream's first message."""
    with urllib.request.urlopen(f"{address}api/stream", timeout=PATIENCE_S) as answer:
        answer.readline()
        found: dict[str, Any] = json.loads(answer.readline().removeprefix(b"data: "))
    return found


def _peak_mb(pid: int) -> float:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024

"""What is known of the peers, for the table: measured here where setup.sh made their environments, else recorded."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENV, RECORDED = HERE / "env", HERE / "recorded.json"
RESULTS = ENV / "results.json"
OWN = "tokenmill"

BESIDE = {
    "per 1,000 completions of 300 B": "cpu_300",
    "per 1,000 completions of 30,000 B": "cpu_30k",
    "slots busy: lognormal 2 s, σ = 1": "busy",
    "peak memory MB, ": "whole_mb",
    "CPU s to the first new request": "resume_s",
    "answers served but not kept": "not_kept",
    "rows after kill and resume": "lost",
}
"""Which of their figures stands beside a row of the table: one whose text begins or goes on like this."""


def beside(what: str) -> str:
    """The peers' figures for a row of the table; empty where they have none."""
    key = next((key for words, key in BESIDE.items() if words in what), "")
    return shown(key) if key else ""


def shown(key: str) -> str:
    """All peers' values, each with the day of its measuring, such as `openai 2.66, ray 1.3 (2026-11-29)`."""
    sources = [json.loads(path.read_bytes()) for path in (RESULTS, RECORDED) if path.exists()]
    told: set[str] = set()
    parts = []
    for source in sources:
        clients: dict[str, dict[str, Any]] = source["clients"]
        here = {
            name: found[key]
            for name, found in clients.items()
            if name not in {*told, OWN} and found.get(key) is not None
        }
        told |= set(here)
        if here:
            words = (f"{name} {value:{'.3g' if value < 100 else ',.0f'}}" for name, value in here.items())
            parts.append(f"{', '.join(words)} ({source['date']})")
    return "; ".join(parts)

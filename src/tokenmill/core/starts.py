"""How long a start takes, phase by phase: what the last one took tells when this one will be ready. Pure."""

import re
from collections.abc import Sequence

Phases = Sequence[tuple[str, float]]
"""Names in their order, and seconds; the first, "begin", is the process's own beginning until its first phase."""

BEGIN = "begin"

SHORT_S = 1.0
"""Phases that took less are not worth a word."""


def left_s(last: Phases, phase: str, elapsed_s: float) -> float | None:
    """Seconds until ready, if this start goes as the last one did; None where that one had no such phase."""
    names = [name for name, _ in last]
    now_in = phase or BEGIN
    if now_in not in names:
        return None
    place = names.index(now_in)
    return max(0.0, last[place][1] - elapsed_s) + sum(seconds for _, seconds in last[place + 1 :])


def words(phases: Phases) -> str:
    """For a person: "begin 21 s, weights 30 s, canary 4 s"; repeated phases are added up."""
    total: dict[str, float] = {}
    for name, seconds in phases:
        total[name] = total.get(name, 0.0) + seconds
    return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in total.items() if seconds >= SHORT_S)


_READY = re.compile(r"ready after (\d+) s \((.+?)\): it takes ")
_PHASE = re.compile(r"(.+?) (\d+) s(?:, |$)")


def told(text: str) -> tuple[float, list[tuple[str, float]]] | None:
    """A start's seconds and phases by the words of its event, "ready after 55 s (weights 30 s): it takes …"."""
    ready = _READY.match(text)
    if ready is None:
        return None
    return float(ready[1]), [(name, float(seconds)) for name, seconds in _PHASE.findall(ready[2])]

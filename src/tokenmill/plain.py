"""Words for people, the same on the terminal, on the page and in the report: times, sizes, rates, shares. Pure."""

from collections.abc import Iterable, Iterator

from tokenmill.core.eta import is_steady
from tokenmill.core.status import GateShare, RunStatus, ServerStatus

NEAR = 0.7
"""Of what the gate allows: from here on a share is a warning."""

BAD = {"rejected": "rejected", "failed": "failed", "truncated": "cut off"}
"""What the gate counts, in words."""


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 42 s, 5 min, 3 h 20 min, 4 d 2 h."""
    if seconds is None:
        return "–"
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def span(low_s: float, high_s: float | None) -> str:
    """A range of times: 3 h 05 min to 3 h 50 min; at least 3 h 05 min; one time where both ends are said alike."""
    low, high = duration(low_s), duration(high_s)
    if high_s is None:
        return f"at least {low}"
    return high if low == high else f"{low} to {high}"


def gigabytes(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def speed(rate: float) -> str:
    """Bytes a second for a person."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


def left(status: RunStatus) -> str:
    """How long a run still takes: a range until it is steady; nothing where nobody knows."""
    low, high = status.eta_low_s, status.eta_high_s
    if status.eta_s is None:
        return ""
    if low is None or is_steady(low, high):
        return duration(status.eta_s)
    return span(low, high)


def to_go(status: RunStatus) -> str:
    """The same where nothing else says what it is."""
    return f"{words} to go" if (words := left(status)) else ""


def start_of(server: ServerStatus) -> str:
    """Where a start is or where it failed, and when it should be ready; nothing where the state says it all."""
    words = [f"{server.phase} {server.percent:.0f}%"] if server.phase not in ("", server.state) else []
    if server.eta_s and server.eta_s >= 1:
        words.append(f"ready in {duration(server.eta_s)}")
    return ", ".join(words)


def against_gate(shares: Iterable[GateShare]) -> Iterator[tuple[str, bool]]:
    """Each share beside what the gate allows, and whether it is near that."""
    for number, share in enumerate(shares):
        near = share.worst > 0 and share.worst >= NEAR * share.allowed
        words = f"{BAD.get(share.what, share.what)} {share.share:.1%} of {share.allowed:.0%}"
        words += "" if number else " allowed"
        yield f"{words} (worst cohort {share.worst:.1%})" if near else words, near

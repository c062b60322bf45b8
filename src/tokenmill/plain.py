"""Words for people: times as they say them, and texts of others made harmless for a terminal.

What an engine logs ends in causes, events and errors, and whoever wrote it may be anybody: an escape in it could
recolour a screen, move its cursor, or set its title.
"""

import re

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links, clipboards
    r"|\x1b[PX^_][^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # strings for a device
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursors
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Controls of both sets, marks that turn the direction of writing, half surrogate pairs."""


def harmless(text: str, *, lines: bool = False) -> str:
    """A text without anything that a terminal obeys, in one line unless `lines` are to stay."""
    if text.isascii() and text.isprintable():
        return text

    def shown(found: re.Match[str]) -> str:
        if found[0] in "\n\t\r":
            return "\n" if lines and found[0] == "\n" else " "
        return "�"

    return _CONTROLS.sub(shown, _ESCAPES.sub("", text.replace("\r\n", "\n")))


def escaped(json: str) -> str:
    """A JSON text in which no character is one that a terminal obeys: JSON's own escapes stand for them."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json)


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

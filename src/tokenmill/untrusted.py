"""Texts of others, as a person may safely see them: on a terminal, in JSON, on the page, in the report. Pure.

What a model wrote and what an engine logged may hide, turn other text round, or be obeyed by a terminal: recolour it,
move its cursor, set its title. One table says what; each place shows it in its own way.
"""

import re
import unicodedata

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links, clipboards
    r"|\x1b[PX^_][^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # strings for a device
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursors
    r"|\x1b[ -/]*[0-~]?"
)

_COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls of both sets, but for tab and new line
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # marks of direction, no width
    "\ud800-\udfff\ue000-\uf8ff"  # halves of surrogate pairs, private use
    "\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"  # tags and more private use
)
"""Joiners (U+200C, U+200D) and the selectors of emoji are left: several scripts and emoji are written with them."""

_PICTURES = 0x2400
"""Unicode's pictures of the control characters begin here, in their order."""


def harmless(text: str, *, lines: bool = False) -> str:
    """For a terminal: without anything that it obeys, in one line unless `lines` are to stay."""
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPES.sub("", text.replace("\r\n", "\n")).replace("\r", " ").replace("\t", " ")
    return _HIDDEN.sub("�", text if lines else text.replace("\n", " "))


def coloured(line: str) -> str:
    """For a terminal, a line that may keep its colours: they end with it."""
    parts = _COLOURS.split(line)
    shown = "".join(part if place % 2 else harmless(part) for place, part in enumerate(parts))
    return f"{shown}\x1b[0m" if len(parts) > 1 else shown


def escaped(json: str) -> str:
    """A JSON text in which no character is one that a terminal obeys: JSON's own escapes stand for them."""
    return _HIDDEN.sub(lambda found: "".join(f"\\u{unit:04x}" for unit in _utf16(found[0])), json)


def _utf16(sign: str) -> list[int]:
    data = sign.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[at : at + 2]) for at in range(0, len(data), 2)]


def visible(text: str) -> str:
    """For a page: what cannot be seen is written out; lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return _HIDDEN.sub(lambda found: _written(ord(found[0])), text)


def _written(code: int) -> str:
    if code < 32:
        return chr(_PICTURES + code)
    return "␡" if code == 127 else f"⟨U+{code:04X}⟩"


def log_line(line: str, most: int) -> str:
    """For a page, a line of a log: without what was meant for a terminal, and not longer than `most`."""
    return visible(cut(_ESCAPES.sub("", line), most))


def pieces(text: str) -> list[tuple[str, str]]:
    """For the report: (plain, "") and (code point, its name) in turn; the second kind is to be marked as no text."""
    found: list[tuple[str, str]] = []
    at = 0
    for match in _HIDDEN.finditer(text):
        if match.start() > at:
            found.append((text[at : match.start()], ""))
        sign = match[0]
        found.append((f"U+{ord(sign):04X}", unicodedata.name(sign, "control or private character")))
        at = match.end()
    if at < len(text):
        found.append((text[at:], ""))
    return found


def cut(text: str, most: int) -> str:
    """Two thirds of `most` characters from the beginning of a long text, a third from its end, and how many lie
    between: loops, cuts and lost end tokens stand at the end."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    gap = "\n\n" if "\n" in text else " "
    tail = most // 3
    return f"{text[: most - tail]}{gap}[… {left_out:,} characters …]{gap}{text[len(text) - tail :]}"

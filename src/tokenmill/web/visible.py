"""Texts of models and logs as a person may safely see them: what would hide or turn other text round is shown.

A completion is untrusted input. The page only ever sets text, never HTML; here goes what plain text can still do.
"""

import re

PICTURES = 0x2400
"""Unicode's pictures of the control characters begin here, in their order."""

_TURNING = (0x061C, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF)
"""Marks of direction, and what has no width: a text may look like another with them. Joiners (U+200C, U+200D) stay:
emoji and several scripts are written with them."""

_TABLE: dict[int, str] = {code: chr(PICTURES + code) for code in range(32) if code not in (9, 10)}
_TABLE |= {127: "␡"} | {code: f"⟨U+{code:04X}⟩" for code in (*range(128, 160), *_TURNING, 0x2028, 0x2029)}
_TABLE |= {code: f"⟨U+{code:04X}⟩" for code in range(0xE0000, 0xE0080)}

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def visible(text: str) -> str:
    """The text, with what cannot be seen written out; lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_TABLE).encode("utf-8", "replace").decode()


def cut(text: str, most: int) -> str:
    """The first `most` characters, and how many there are."""
    return visible(text) if len(text) <= most else f"{visible(text[:most])} … ({len(text):,} characters)"


def log_line(line: str, most: int) -> str:
    """A line of a log, without the colours that were meant for a terminal."""
    return cut(_COLOURS.sub("", line), most)

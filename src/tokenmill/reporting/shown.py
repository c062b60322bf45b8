"""A completion's text is untrusted: what a reader would not see, or would see wrongly, is written out."""

import re
import unicodedata

HEAD, TAIL = 1500, 700
"""Characters that are shown of a long text: loops, cuts and lost end tokens stand at its end."""

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and new line
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # marks of direction, no width
    "\ud800-\udfff\ue000-\uf8ff"  # halves of surrogate pairs, private use
    "\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"  # tags and more private use
)
"""Joiners (U+200C, U+200D) and variation selectors are left: writing and emoji need them."""


def pieces(text: str) -> list[tuple[str, str]]:
    """The text as (plain, "") and (code point, its name) in turn: the second kind is to be marked as no text."""
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


def cut(text: str) -> str:
    """The beginning and the end of a long text, and how much lies between."""
    left_out = len(text) - HEAD - TAIL
    if left_out <= 0:
        return text
    return f"{text[:HEAD]}\n\n[… {left_out:,} characters …]\n\n{text[-TAIL:]}"

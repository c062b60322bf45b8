"""Does a text go round in circles? The zlib ratio of its stretches, the highest one: loops compress 10 to 90 times.

Loops mostly stand at the end, of the thought or of the answer: a thought that loops and a short answer behind it must
not pass for the answer alone. So both ends are measured. Elsewhere, and for loops whose round is longer than that, only
what comes again is measured: a few bytes are looked for again in what follows them, which costs next to nothing.
"""

import zlib

from tokenmill.core.records import Parts

TAIL_CHARS = 2000
"""Measured at each end, whatever stands there: a loop whose rounds differ, such as by a number, shows only so. With
4,000 it finds no more of them, rejects no less of sound text, and costs twice as much."""

ROUNDS_CHARS = 4000
"""In which the last rounds of an even loop are looked for, and measured from the first one on."""

FAST = 1
"""zlib's level: 6 tells loops from text no better, and takes a third longer (a tenth of all work on a completion)."""

SMALL, SMALL_BYTES, LARGE = (12, 5), 4096, (15, 8)
"""zlib's window and memory: 40 KB where the text is no longer than the window, else 270 KB. Taking and clearing so much
for each answer costs as much as packing it."""

MIN_RATIO_BYTES = 200
"""Below this, zlib's header and a single ruled line decide the ratio, not a loop."""

STEP, PROBE = 2000, 24
"""Every so many bytes, so many are looked for again. Shorter ones come again in sound text, which is then measured in
vain; with a shorter step it would cost as much as measuring the ends."""

SPAN, ROUNDS = 6000, 3
"""A loop's round of up to 2,000 bytes, a paragraph of 300 words, comes three times in that."""

REACH = 24_000
"""Measured, of what comes again: three rounds of a long paragraph have a ratio of 5, ten of them 16. zlib itself sees
32,768."""

LEAST_BYTES = 2000
"""Of such a stretch: a list or a table of a few lines, all alike, is no loop."""

LEAST_AT_END = 1000
"""The same at an end, where loops are; some text before a loop must not hide it."""


def repetition(text: str, raw: bytes, parts: Parts) -> float:
    """The highest ratio; 0 where the text is too short to say. `raw` is the text in UTF-8."""
    found = _again(raw)
    for start, end in (parts[:2], parts[2:]):
        middle = max(start, end - TAIL_CHARS)
        tail = text[middle:end].encode("utf-8", "replace")
        found.append(tail)
        found += _last_rounds(text[max(start, end - ROUNDS_CHARS) : middle].encode("utf-8", "replace") + tail)
    return round(max(map(_ratio, found)), 2)


def _ratio(data: bytes) -> float:
    if len(data) < MIN_RATIO_BYTES:
        return 0.0
    packer = zlib.compressobj(FAST, zlib.DEFLATED, *(SMALL if len(data) <= SMALL_BYTES else LARGE))
    return len(data) / (len(packer.compress(data)) + len(packer.flush()))


def _last_rounds(end: bytes) -> list[bytes]:
    """From where its last bytes are there for the first time, if they come again and again."""
    probe = end[-PROBE:]
    if end.count(probe) < ROUNDS:
        return []
    stretch = end[end.find(probe) :]
    return [stretch] if len(stretch) >= LEAST_AT_END else []


def _again(raw: bytes) -> list[bytes]:
    """Stretches whose beginning comes again and again in them."""
    found = []
    at = 0
    while at < len(raw) - LEAST_BYTES:
        probe, step = raw[at : at + PROBE], STEP
        # Sound text has it once: then half of the span is enough to know that no even loop begins here.
        if raw.find(probe, at + 1, at + SPAN // 2 + PROBE) >= 0 and raw.count(probe, at, at + SPAN) >= ROUNDS:
            last = raw.rfind(probe, at, at + REACH)
            if last - at >= LEAST_BYTES:
                found.append(raw[at:last])
                step = max(STEP, last - at)
        at += step
    return found

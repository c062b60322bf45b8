"""One .gguf file: how many bytes its header says it has, and the values in it. Reads the header, never the tensors.

The format (ggml/docs/gguf.md): magic, version, counts, then metadata, then each tensor's name, shape, type and offset;
the data follow, aligned. llama.cpp refuses a file that is shorter than its last tensor, after it was launched.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SIZES = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
}
"""Values in a block and its bytes, by tensor type (ggml.h)."""

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value, by type."""

_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The same types as struct reads them."""

_STRING, _ARRAY = 8, 9
_ALIGNMENT = b"general.alignment"


def problem(file: Path) -> str:
    """What is wrong with a .gguf file's size or header; empty where it is whole or of a kind that is not known here."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            expected = _expected(stream)
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        return f"is cut off in its header, or has none: {error}"
    return f"has {size} bytes, its header says {expected}" if expected is not None and size < expected else ""


def values(file: Path, prefix: str) -> dict[str, Any]:
    """The header's values whose names begin so; raises ValueError where the header cannot be read."""
    found = {}
    try:
        with file.open("rb") as stream:
            _, version, _, entries = _read(stream, "<4sIQQ")
            if version not in (2, 3):
                raise ValueError(f"version {version} of the format is not known")
            for _ in range(entries):
                name = _string(stream).decode()
                (kind,) = _read(stream, "<I")
                if name.startswith(prefix):
                    found[name] = _value(stream, kind)
                else:
                    _pass_over(stream, kind)
    except struct.error as error:
        raise ValueError(f"it is cut off in its header, or has none: {error}") from error
    return found


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream).decode("utf-8", "replace")
    if kind == _ARRAY:
        inner, count = _read(stream, "<IQ")
        if inner in _FORMS:
            return list(_read(stream, f"<{count}{_FORMS[inner]}"))
        return [_value(stream, inner) for _ in range(count)]
    if kind not in _FORMS:
        raise ValueError(f"a value of type {kind}")
    return _read(stream, f"<{_FORMS[kind]}")[0]


def _expected(stream: BinaryIO) -> int | None:
    """Where the last tensor ends; None where a tensor's type is newer than this table."""
    _, version, tensors, entries = _read(stream, "<4sIQQ")
    if version not in (2, 3):
        return None  # the first form, and those to come
    alignment = 32
    for _ in range(entries):
        name = _string(stream)
        (kind,) = _read(stream, "<I")
        if name == _ALIGNMENT and kind == 4:
            (alignment,) = _read(stream, "<I")
        else:
            _pass_over(stream, kind)
    ends = list(_ends(stream, tensors))
    known = [end for end in ends if end is not None]
    if len(known) < len(ends):
        return None
    start = -(-stream.tell() // alignment) * alignment
    return start + max(known) if known else stream.tell()  # the first file of a set may hold metadata alone


def _ends(stream: BinaryIO, count: int) -> Iterator[int | None]:
    """Each tensor's end, from the beginning of the data."""
    for _ in range(count):
        _string(stream)
        (dimensions,) = _read(stream, "<I")
        values = 1
        for length in _read(stream, f"<{dimensions}Q"):
            values *= length
        kind, offset = _read(stream, "<IQ")
        block = SIZES.get(kind)
        yield offset + values // block[0] * block[1] if block else None


def _pass_over(stream: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _string(stream)
    elif kind == _ARRAY:
        inner, count = _read(stream, "<IQ")
        if inner in _SCALARS:
            stream.seek(_SCALARS[inner] * count, 1)
        else:
            for _ in range(count):
                _pass_over(stream, inner)
    elif kind in _SCALARS:
        stream.seek(_SCALARS[kind], 1)
    else:
        raise ValueError(f"a value of type {kind}")


def _string(stream: BinaryIO) -> bytes:
    (length,) = _read(stream, "<Q")
    if length > 1 << 24:
        raise ValueError(f"a text of {length} bytes")
    text = stream.read(length)
    if len(text) < length:
        raise ValueError("it ends within a text")
    return text


def _read(stream: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, stream.read(struct.calcsize(form)))

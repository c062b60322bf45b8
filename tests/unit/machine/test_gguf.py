"""A .gguf file against its own header: whole, cut by a byte, cut in its header, of types that are not known here."""

import os
import struct
from pathlib import Path

import pytest

from tokenmill import quickstart
from tokenmill.machine import gguf, wholeness


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ENTRIES = [
    entry("general.architecture", 8, text("llama")),
    entry("general.alignment", 4, struct.pack("<I", 64)),
    entry("llama.rope", 6, struct.pack("<f", 1.0)),
    entry("tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("")),
    entry("scores", 9, struct.pack("<IQ", 6, 3) + bytes(12)),
    entry("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 5, 2) + bytes(8)),
]


def write(path: Path, kind: int = 8, size: int = 34 * 4) -> Path:
    """Two tensors, the second of a type with so many bytes for 128 values."""
    tensors = text("a") + struct.pack("<I2Q", 2, 4, 8) + struct.pack("<IQ", 0, 0)
    tensors += text("b") + struct.pack("<IQ", 1, 128) + struct.pack("<IQ", kind, 128)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, len(ENTRIES)) + b"".join(ENTRIES) + tensors
    path.write_bytes(head + b"\x01" * (-len(head) % 64) + b"\x01" * (128 + size))
    return path


@pytest.mark.parametrize(("kind", "size"), [(8, 136), (0, 512), (30, 256), (2, 72)])
def test_a_whole_file_fits_its_header_and_a_cut_one_does_not(tmp_path: Path, kind: int, size: int) -> None:
    file = write(tmp_path / "m.gguf", kind, size)
    assert gguf.problem(file) == ""
    whole = file.stat().st_size
    os.truncate(file, whole - 1)
    assert gguf.problem(file) == f"has {whole - 1} bytes, its header says {whole}"
    assert [str(fault) for fault in wholeness.faults(file)] == [f"{file} {gguf.problem(file)}"]


def test_a_file_cut_anywhere_is_never_taken_for_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    data = file.read_bytes()
    for length in range(4, len(data)):
        file.write_bytes(data[:length])
        assert gguf.problem(file), length


def test_a_type_that_is_newer_than_the_table_is_not_judged(tmp_path: Path) -> None:
    assert gguf.problem(write(tmp_path / "m.gguf", kind=99, size=1)) == ""


def test_a_real_file_is_whole_to_the_byte() -> None:
    real = quickstart.find_model(print)
    assert gguf.problem(real) == ""
    with real.open("rb") as stream:
        assert gguf._expected(stream) == real.stat().st_size

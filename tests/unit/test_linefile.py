"""Files of lines: appended whole, read whole, forwards and backwards, whatever tore the last one."""

import random
from pathlib import Path

import msgspec

from tokenmill import linefile
from tokenmill.linefile import BLOCK

ROWS: "msgspec.json.Decoder[dict[str, int]]" = msgspec.json.Decoder(dict[str, int])


def test_half_a_line_is_not_glued_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    linefile.append(path, b'{"a":1}')
    with path.open("ab") as out:
        out.write(b'{"a":')
    linefile.append(path, b'{"a":2}')
    assert path.read_bytes() == b'{"a":1}\n{"a":\n{"a":2}\n'
    assert [row for row, _ in linefile.read(path, ROWS)] == [{"a": 1}, {"a": 2}]


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert list(linefile.read(path, ROWS)) == []
    path.write_bytes(b'{"a":1}\n{"a":2}')
    ((row, end),) = linefile.read(path, ROWS)
    assert (row, end) == ({"a": 1}, 8)
    with path.open("ab") as out:
        out.write(b"\n")
    assert [row for row, _ in linefile.read(path, ROWS, end)] == [{"a": 2}]


def test_backwards_is_forwards_turned_round(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(60):
        lengths = rng.choices((0, 1, 7, BLOCK // 3, BLOCK - 1, BLOCK, 2 * BLOCK), (9, 9, 9, 3, 1, 1, 1), k=12)
        text = b"\n".join(rng.randbytes(1).hex()[:1].encode() * length for length in lengths)
        text = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text
        path = tmp_path / str(number)
        path.write_bytes(text)
        end = rng.choice((None, rng.randrange(len(text) + 1)))
        lines = text[:end].splitlines(keepends=True)
        with path.open("rb") as file:
            found = [(line, number()) for line, number in linefile.backwards(file, end)]
        assert found == [(line, number) for number, line in reversed(list(enumerate(lines, 1)))]


def test_a_file_that_is_cut_while_it_is_read_ends(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 100 + b"\n" + (b"y" * 99 + b"\n") * 10_000)
    with path.open("rb") as file:
        lines = linefile.backwards(file)
        next(lines)
        with path.open("r+b") as other:
            other.truncate(50)
        assert len(list(lines)) < 10_000

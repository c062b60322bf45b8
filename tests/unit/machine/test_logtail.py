"""A server's log as it grows: whole lines once, progress bars, half lines, truncation."""

from pathlib import Path

from tokenmill.machine.logtail import KEPT_LINES, LONGEST, MAX_READ, LogTail, head, size


def test_whole_lines_come_once_and_half_ones_when_they_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert (tail.read(), size(path), head(path, 0)) == ([], 0, "")
    with path.open("ab", buffering=0) as log:
        log.write(b"one\ntw")
        assert tail.read() == ["one"]
        assert tail.tail() == ["one", "tw"]
        log.write(b"o\r\n\nload 1%\rload 2%\rload")
        assert tail.read() == ["two", "load 1%", "load 2%"]
        log.write(b" \xff\n")
        assert tail.read() == ["load \ufffd"]
    assert tail.read() == []


def test_an_earlier_life_is_left_out_and_a_truncated_log_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"earlier\nnow\n")
    tail = LogTail(path, 8)
    assert tail.read() == ["now"]
    assert head(path, 8) == "now\n"
    path.write_bytes(b"new\n")
    assert tail.read() == ["new"]


def test_a_flood_is_read_from_its_end_and_little_of_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%09d\n" % n for n in range(300_000)))
    tail = LogTail(path)
    lines = tail.read()
    assert len(lines) <= MAX_READ // 10 + 1
    assert lines[-1] == tail.tail()[-1] == "000299999"
    assert len(tail.tail()) == KEPT_LINES


def test_a_line_without_an_end_takes_little_memory_and_the_next_one_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    with path.open("ab", buffering=0) as log:
        for _ in range(4):
            log.write(bytes(MAX_READ))
            assert tail.read() == []
            assert sum(map(len, tail.tail())) <= LONGEST
        log.write(b"\nnext\n")
        assert [len(line) for line in tail.read()] == [LONGEST, 4]
        log.write((b"x" * (LONGEST + 1) + b"\n") * 3)
        assert [len(line) for line in tail.read()] == [LONGEST] * 3

"""Servers' logs for a person: last lines, what comes, files that are cut or replaced meanwhile."""

import io
import os
import random
from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.folder import RunFolder
from tokenmill.logs import BLOCK, Log, logs, reader_gone, shown


def _folder(path: Path, **texts: str) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    for name, text in texts.items():
        folder.log(int(name[1:])).write_text(text)
    return folder


def test_the_last_lines_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        lines = ["x" * rng.choice((1, 80, 3 * BLOCK)) + str(n) for n in range(rng.randrange(0, 60))]
        end = rng.choice("\r\n")
        (tmp_path / "log").write_text("".join(line + end for line in lines), newline="")
        count = rng.randrange(1, 80)
        log = Log(tmp_path / "log")
        assert log.last(count) == lines[-count:]
        assert log.new() == []
        log.close()


def test_what_comes_is_told_once_through_truncation_and_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("zero\none")
    log = Log(path)
    assert log.last(10) == ["zero"]
    path.write_text("zero\none\ntwo\n")
    assert log.new() == ["one", "two"]
    path.write_text("cut\n")
    assert log.new() == ["cut"]
    with path.open("a") as old:
        path.rename(tmp_path / "log.1")
        old.write("last words")
    path.write_text("fresh\n")
    assert log.new() + log.new() == ["last words", "fresh"]
    log.close()


def test_a_number_that_no_server_has_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    folder = _folder(tmp_path, s0="a\n", s1="b\nhalf")
    assert list(logs(folder, None, follow=False, lines=1)) == [("0", "a"), ("1", "b"), ("1", "half")]
    with pytest.raises(UsageError, match="no log of server 7: the run has 0, 1"):
        list(logs(folder, "7", follow=False))


def test_following_ends_when_nobody_reads_any_more(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        gone = reader_gone(stream)
        assert not gone()
        os.close(reader)
        assert gone()
    assert list(logs(_folder(tmp_path, s0="a\n"), "0", follow=True, ended=lambda: True)) == [("0", "a")]


def test_a_pipe_gets_a_log_as_it_is_and_a_terminal_its_colours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown("3", "line \033[2J", io.StringIO()) == "[3] line \033[2J"
    near, far = os.openpty()
    with os.fdopen(near, "rb"), os.fdopen(far, "w") as terminal:
        assert shown("3", "\033[1mline\033[2J", terminal) == "\033[32m[3]\033[0m \033[1mline\033[0m"

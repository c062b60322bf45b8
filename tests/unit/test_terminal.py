"""The view in a real terminal, as an emulator of one sees it: resized, without colours, dumb, and after its end."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyte
import pytest

PROGRAM = """
import sys, time, warnings
from tests.unit.test_screen import EVENTS, STATUS
from tokenmill.view import View
with View(None) as view:
    for event in EVENTS:
        view.event(event)
    view.say("evil \\033]0;owned\\007\\033[2J text")
    print("a stray word", file=sys.stderr)
    for _ in range(int(sys.argv[1])):
        view.show(STATUS)
        time.sleep(0.05)
print("the end")
"""


class Terminal:
    """A pseudo-terminal of a size, with an emulator behind it and a command in front."""

    def __init__(self, env: Mapping[str, str], command: Sequence[str], columns: int, lines: int) -> None:
        self.near, far = pty.openpty()
        self._columns, self._lines = columns, lines
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._size(columns, lines)
        self.process = subprocess.Popen(command, stdin=far, stdout=far, stderr=far, env={**os.environ, **env})
        os.close(far)

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.near, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self._size(columns, lines)
        self.screen.resize(lines, columns)

    def read(self) -> bool:
        """Takes in what is there; False once the other end is closed."""
        try:
            data = os.read(self.near, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, *words: str) -> list[str]:
        """The screen, once it shows all of these."""
        deadline = time.monotonic() + 30
        while not all(any(word in line for line in self.screen.display) for word in words):
            assert time.monotonic() < deadline, "\n".join(self.screen.display)
            assert self.read(), "\n".join(self.screen.display)
        return list(self.screen.display)

    def types(self, keys: str, *, until: bytes, again_s: float = 60.0) -> bytes:
        """What comes after these keys, up to and with some bytes; they are typed again where it takes too long."""
        at, deadline, again = len(self.raw), time.monotonic() + 30, 0.0
        while until not in self.raw[at:]:
            if time.monotonic() >= again:
                again = time.monotonic() + again_s
                os.write(self.near, keys.encode())
            assert time.monotonic() < deadline, self.raw[at:]
            assert self.read(), self.raw[at:]
        return self.raw[at:]


@contextmanager
def terminal(
    env: Mapping[str, str], looks: int = 400, size: tuple[int, int] = (80, 24), command: Sequence[str] = ()
) -> Iterator[Terminal]:
    command = command or (sys.executable, "-c", PROGRAM, str(looks))
    made = Terminal({"TERM": "xterm-256color", "COLUMNS": "33", "LINES": "7", **env}, command, *size)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.near)


def test_the_screen_follows_the_terminals_size_and_nothing_stays_of_the_old_one() -> None:
    with terminal({}) as made:
        small = made.until("qwen36-regen", "last events", "evil  text", "a stray word")
        assert "accept" in "".join(small)
        made.resize(200, 50)
        made.until("last problem")
        made.resize(60, 15)
        deadline = time.monotonic() + 30
        while True:  # a picture of this size, whole
            made.read()
            lines = [line.rstrip() for line in made.screen.display]
            if sum("qwen36-regen" in line for line in lines) == 1 and "last problem" not in "".join(lines):
                break
            assert time.monotonic() < deadline, "\n".join(lines)
        assert lines[0].startswith("qwen36-regen  generating")
        assert b"owned" not in made.raw


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"NO_COLOR": "1", "LC_ALL": "C"}])
def test_without_colours_the_same_is_shown(env: dict[str, str]) -> None:
    with terminal(env) as made:
        made.until("qwen36-regen", "████", "12/16", "suspect")
        assert b"[33m" not in made.raw
        assert b"[32m" not in made.raw


def test_the_terminal_is_given_back_with_what_was_said() -> None:
    with terminal({}, looks=3) as made:
        while made.read():
            pass
        text = made.raw.decode()
        after = text[text.rindex("\033[?1049l") :]
        assert made.process.wait(20) == 0
    for words in ("server 3: it was killed by SIGKILL; started again in 5 s", "evil  text", "a stray word", "the end"):
        assert words in after
    assert "\033[?25h" in text, "the cursor is there again"


SHELL = ("setsid", "--ctty", "bash", "--norc", "--noprofile", "-i")


def test_a_run_that_is_stopped_by_hand_gives_the_terminal_back_and_takes_it_again_in_front() -> None:
    env = {"PYTHON": sys.executable, "PROGRAM": PROGRAM, "PS1": "ready> "}
    with terminal(env, command=SHELL) as made:
        made.types('"$PYTHON" -c "$PROGRAM" 4000\n', until=b"902,087 prompts done")
        stopped = made.types("\x1a", until=b"Stopped")
        assert b"\x1b[?1049l" in stopped
        assert b"\x1b[?25h" in stopped
        made.types("bg\n", until=b"ready> ")
        assert b"\x1b[?1049h" not in made.types("sleep 0.3; echo o''k\n", until=b"ok")
        made.types("fg\n", until=b"902,087 prompts done")
        assert b"\x1b[?1049h" in made.raw[made.raw.rindex(b"Stopped") :]
        ended = made.types("\x03", until=b"ready> ", again_s=60.0)
        assert b"\x1b[?1049l" in ended
        made.types("exit\n", until=b"exit")
        assert made.process.wait(20) == 130


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_dumb_terminal_gets_lines(env: dict[str, str]) -> None:
    with terminal(env, looks=3) as made:
        while made.read():
            pass
    text = made.raw.decode()
    assert "\033" not in text
    assert "generating: 501,290/902,087 done" in text


def test_a_pipe_gets_lines_whatever_the_environment_forces() -> None:
    env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "3"], capture_output=True, text=True, env=env, timeout=50, check=True
    )
    assert "\033" not in done.stderr
    assert sum("generating:" in line for line in done.stderr.splitlines()) == 1, "one every 10 s"

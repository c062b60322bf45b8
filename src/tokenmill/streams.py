"""Streams that may go away: a lost terminal ends no run, and one that is asked back is given back as it was."""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console


class SafeStream:
    """A text stream that stops existing when it can no longer be written (closed terminal, broken pipe)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = False

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                return self._stream.write(text)
            except (OSError, ValueError):
                self.lose()
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self.lose()

    def lose(self) -> None:
        """Also puts /dev/null under the descriptor: Python flushes its streams at exit and would report them broken."""
        self.lost = True
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(stream: TextIO | None = None) -> Console:
    """A console on a stream that may go away; stderr by default, since stdout is for results."""
    stream = stream or sys.stderr
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal that knows no UTF-8 gets question marks
    terminal = stream.isatty()  # and nothing else: FORCE_COLOR in a pipe makes it none
    return Console(file=SafeStream(stream), highlight=False, soft_wrap=False, force_terminal=terminal)  # type: ignore[arg-type]


def live(out: Console) -> bool:
    """Whether a picture can be drawn there, again and again."""
    return out.is_terminal and not out.is_dumb_terminal


def in_front(out: Console) -> bool:
    """Whether the terminal is ours: a job that goes on in the background must not draw on the shell's lines."""
    try:
        return os.tcgetpgrp(out.file.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True


@contextmanager
def stoppable(leave: Callable[[], None], come_back: Callable[[], None]) -> Iterator[None]:
    """For the scope, Ctrl-Z first lets go of the terminal (`leave`) and then stops; `fg` and `bg` `come_back`."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: object) -> None:
        leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # to this thread: what follows comes after SIGCONT
        signal.signal(signal.SIGTSTP, stop)
        come_back()

    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)

"""Every error a user can meet: what happened, with values, and the fix.

    TokenmillError
    ├── UsageError           2  a wrong argument, a run folder that is someone else's
    ├── ConfigError          2  every mistake of a config at once
    ├── GuardError           2  continuing would mix two datasets in one run folder
    ├── PreflightError       3  the run could not start, or would store wrong data
    ├── NoServerError        4  no server could be kept
    ├── GateError            5  the gate stopped the run
    ├── NodeLostError        4  a machine of the cluster is gone: the others get its prompts
    ├── UnreachedError          a cluster, or a machine of it, does not answer for the moment
    ├── StoppedError       130  told to stop before it was done; starting again goes on
    ├── StoreError           6  results could not be stored
    │   └── VanishedError       what was stored is gone: removed or moved in mid-run
    ├── FullError               as many browsers look at a page as may
    ├── BadPromptError          one prompt row cannot be used: becomes a failed record
    ├── PluginError             code that is not ours (a tokenizer, a plug-in) raised
    └── RequestError            one request failed; the subclass says whose fault it is
        ├── GoneError           the server is not there: the prompt is not charged
        ├── BusyError           the server is full for the moment: the prompt is not charged
        ├── LocalLimitError     this process is out of file descriptors: the prompt is not charged
        ├── RefusedError        the server will never accept this request (HTTP 4xx)
        ├── BrokenError         the server failed on this request (HTTP 5xx, an unreadable answer)
        └── LateError           no answer within the time limit

The number is the exit code. Nothing here does I/O.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class TokenmillError(Exception):
    """The root. `fix` says what to do, in a line; a command to paste where there is one."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class UsageError(TokenmillError):
    exit_code = 2


class ConfigError(TokenmillError):
    exit_code = 2


class GuardError(TokenmillError):
    exit_code = 2


class PreflightError(TokenmillError):
    exit_code = 3


class NoServerError(TokenmillError):
    exit_code = 4


class NodeLostError(TokenmillError):
    exit_code = 4


class UnreachedError(TokenmillError):
    pass


class GateError(TokenmillError):
    exit_code = 5


class StoppedError(TokenmillError):
    exit_code = 130


class StoreError(TokenmillError):
    exit_code = 6


class VanishedError(StoreError):
    pass


class FullError(TokenmillError):
    """Of `serve` alone: the browser tries again."""


class BadPromptError(TokenmillError):
    """`label` is the failed record's label: bad_prompt or prompt_too_long."""

    def __init__(self, message: str, *, label: str = "bad_prompt") -> None:
        super().__init__(message)
        self.label = label


class PluginError(TokenmillError):
    pass


class RequestError(TokenmillError):
    pass


class GoneError(RequestError):
    pass


class BusyError(RequestError):
    pass


class LocalLimitError(RequestError):
    pass


class RefusedError(RequestError):
    pass


class BrokenError(RequestError):
    """`body` is the server's own text: an engine reads from it whether the whole server is lost."""

    def __init__(self, message: str, *, body: str = "") -> None:
        super().__init__(message)
        self.body = body


class LateError(RequestError):
    pass


@contextmanager
def boundary(what: str) -> Iterator[None]:
    """Turns whatever code that is not ours raises into a PluginError, once, at the seam; a typed error passes through.

    One of the two places that catch `Exception`; the other is the top of cli.py.
    """
    try:
        yield
    except TokenmillError:
        raise
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):  # of tasks: the first that failed says what it was
            cause = cause.exceptions[0]
        raise PluginError(f"{what}: {type(cause).__name__}: {cause}") from error

"""What an engine's log tells: on the way up phases, at the end a cause. Pure: lines in, values out.

Target and draft model print the same lines, so a phase depends on what was reached before; percent never falls. Of the
causes in a log the first one decides, and the words of those who only noticed come last.
"""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from tokenmill.core.server import Failure, FailureKind

LINES = 3
"""So many of a log's lines are shown with a failure: the cause, the exception that it opens, one more."""

LINE_CHARS = 400
"""A line that is shown is cut here: argument lists and dumps run to kilobytes."""

CAUSE_CHARS = 160
"""Of an exception that is the cause; the line itself is shown below it."""

SEARCHED_CHARS = 1000
"""So much of a line is looked at: what it is about stands at its beginning, and 600 long lines take seconds else."""


# -- phases ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Phase:
    """What a starting server is at, and the percent of its start that lies behind it."""

    name: str
    percent: float


class PhaseRow(NamedTuple):
    """A line → a phase. `end`: the line carries a percent of its own (or dots, one each), from `start` to there.
    `since`: the row holds only once that percent is reached, so that a second pass is told from the first."""

    pattern: str
    name: str
    start: float
    end: float | None = None
    since: float = 0.0


class PhaseTable:
    """Rows from the last phase to the first: the first row that a line matches tells."""

    def __init__(self, rows: Sequence[PhaseRow]) -> None:
        self.rows = tuple(rows)
        self._patterns = [re.compile(row.pattern) for row in rows]

    def match(self, line: str, reached: float = 0.0) -> Phase | None:
        """The phase that a line tells, None for most lines. `reached`: this life's percent so far; it never falls."""
        for row, pattern in zip(self.rows, self._patterns, strict=True):
            if reached >= row.since and (found := pattern.search(line)):
                own = 0.0 if row.end is None else (row.end - row.start) * _own_percent(found[1]) / 100
                return Phase(row.name, max(row.start + own, reached))
        return None

    def last(self, lines: Sequence[str]) -> str:
        """The name of the phase that these lines lead to; empty where none of them tells."""
        name, reached = "", 0.0
        for line in lines:
            if phase := self.match(line, reached):
                name, reached = phase.name, phase.percent
        return name


def _own_percent(text: str) -> float:
    return min(100.0, float(text) if text.isdecimal() else len(text))


# -- causes ------------------------------------------------------------------------------------------------------------
class Cause(NamedTuple):
    """What became of a server: its class, a sentence, and the fix as a command or a key of the config."""

    kind: FailureKind
    cause: str
    fix: str = ""


class Rule(NamedTuple):
    """A line → a cause. `at`: the cause where the line comes in a certain phase of the start. `signal`: an end by that
    signal means the same, where no line says more."""

    pattern: str
    kind: FailureKind
    cause: str
    fix: str = ""
    at: Mapping[str, Cause] | None = None
    signal: int = 0

    def told(self, phase: str) -> Cause:
        """The cause, given the phase in which the line came."""
        return (self.at or {}).get(phase) or Cause(self.kind, self.cause, self.fix)


Tiers = Sequence[Sequence[Rule]]
"""Rules by what their lines are worth: causes, then what may be one, then the words of those who noticed a death."""

NO_PHASES = PhaseTable(())
"""Of an engine whose log is unknown."""

DOCTOR = "tokenmill doctor CONFIG"
WHO_HOLDS = "nvidia-smi   shows who holds the GPU's memory"
WHO_LISTENS = "ss -ltnp   shows who listens; fleet.port moves all of them"
KERNEL_LOG = "dmesg -T | grep -iE 'oom|killed process'   shows whether it was the kernel"
CARD_LOG = "dmesg -T | grep -i xid; nvidia-smi -q -d ECC   show what the card reported"
PACKAGES = "PYTHON -m pip check   names what does not fit, PYTHON being engine.python"
"""Fixes that several engines share."""

_CANNOT_READ = (
    r"Transport endpoint is not connected|Input/output error|Stale (?:NFS )?file handle|\bESTALE\b|Host is down|"
    r"Remote I/O error|\[Errno (?:5|107|112|116|121)\]|\(os error (?:5|107|112|116|121)\)|"
    r"Connection timed out(?: \(os error 110\)|: ['\"]?/)"
)
"""What a mount answers that is away: errno 5, 107, 112, 116, 121, and 110 where it names a file, not an address."""

MOUNT_AWAY = Cause(
    FailureKind.STORAGE,
    "files that it needs cannot be read now: the mount they lie on is away",
    'df; ls on the path in the line   shows whether the mount is back; stage.to = "auto" copies the model off it',
)

COMMON_ROOTS: tuple[Rule, ...] = (
    Rule(
        r"error: unrecognized arguments|error: argument .*: (?:invalid|expected|not allowed)|"
        r"error: (?:the following arguments|ambiguous option)",
        FailureKind.FLAG,
        "it does not know a flag, or not its value",
        f"{DOCTOR}   names the flag, and its successor where there is one; see engine.args",
    ),
    Rule(
        r"server socket has failed to (?:listen|bind)|ZMQError: Address already in use|dist_init_port=\d|"
        r"bootstrap_port \d+ is already in use",
        FailureKind.PORT,
        "an internal port was taken by another process",
        WHO_LISTENS,
    ),
    Rule(
        r"address already in use|EADDRINUSE|couldn't bind HTTP server socket|Errno 98\b",
        FailureKind.PORT,
        "its HTTP port was taken by another process",
        WHO_LISTENS,
    ),
    Rule(
        r"No space left on device.*(?:\bshm\b|shared memory)|(?:\bshm\b|shared memory).*No space left on device|"
        r"insufficient shared memory|creating shared memory segment",
        FailureKind.SHM,
        "shared memory (/dev/shm) is full",
        "df -h /dev/shm; ls -l /dev/shm",
    ),
    Rule(
        r"No space left on device|Disk quota exceeded|\[Errno 28\]|\(os error 28\)",
        FailureKind.DISK,
        "a disk is full",
        "df -h; df -i   show which; TMPDIR and compile caches of servers are written, too",
    ),
    Rule(_CANNOT_READ, *MOUNT_AWAY),
    Rule(
        r"\bSIGBUS\b|Bus error|exit code:? -7\b",
        FailureKind.SHM,
        "a mapped page could not be had (SIGBUS): shared memory (/dev/shm) is full",
        "df -h /dev/shm; ls -l /dev/shm",
        at=dict.fromkeys(("weights", "draft weights"), MOUNT_AWAY),  # they are mapped from the model's files
        signal=signal.SIGBUS,
    ),
    Rule(
        r"driver on your system is too old|driver version is insufficient|unsupported toolchain",
        FailureKind.VERSION,
        "the GPU's driver is too old for the installed CUDA packages",
        "nvidia-smi   shows the driver; install a newer one, or packages for its CUDA version",
    ),
    Rule(
        r"CUDA-capable devices are busy or unavailable|Some GPUs may be occupied by other processes",
        FailureKind.OCCUPIED,
        "another process holds the GPU",
        WHO_HOLDS,
    ),
    Rule(
        r"illegal memory access|uncorrectable ECC|NVLink error|CUBLAS_STATUS_(?!ALLOC)|CUDNN_STATUS|"
        r"CUDA error: (?:unspecified launch failure|unknown error|misaligned address)|fallen off the bus|\bXid\b",
        FailureKind.DEVICE,
        "the GPU reported a fault",
        CARD_LOG,
    ),
)
"""Causes that any program can die of."""

COMMON_WEAK: tuple[Rule, ...] = (
    Rule(
        r"ModuleNotFoundError|No module named|ImportError:|undefined symbol:",
        FailureKind.VERSION,
        "the engine's environment lacks a package or holds one that does not fit",
        PACKAGES,
    ),
    Rule(
        r"Permission denied",
        FailureKind.CONFIG,
        "a file may not be read or run",
        "id; ls -l on the path in the line",
    ),
)
"""Mostly causes, now and then a warning: they decide where nothing better does."""

COMMON_NOTICED: tuple[Rule, ...] = (
    Rule(
        r"^Fatal Python error|terminate called after throwing|Segmentation fault|core dumped",
        FailureKind.CRASH,
        "a process of it crashed in native code",
    ),
)

TRACEBACK = "Traceback (most recent call last):"

_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
"""Between the tracebacks of one exception and of the one that it led to."""

_PREFIX = re.compile(
    r"^(?:\([\w .-]+ pid=\d+\) )?(?:(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\]|\[[\d-]+ [\d:.]+[^\]]*\])(?: |$))?"
)
"""vLLM's process, level, time and place, and SGLang's time."""

_SIGNALS: Mapping[int, Cause] = {
    signal.SIGINT: Cause(FailureKind.CRASH, "it was interrupted from outside (SIGINT)"),
    signal.SIGILL: Cause(
        FailureKind.CRASH, "it died of an illegal instruction (SIGILL)", "use a build for this processor: lscpu"
    ),
    signal.SIGABRT: Cause(FailureKind.CRASH, "it aborted (SIGABRT)"),
    signal.SIGFPE: Cause(FailureKind.CRASH, "it died of an arithmetic error (SIGFPE)"),
    signal.SIGKILL: Cause(
        FailureKind.CRASH,
        "it was killed (SIGKILL): by the kernel, short of memory, or by somebody's kill -9",
        KERNEL_LOG,
    ),
    signal.SIGSEGV: Cause(FailureKind.CRASH, "it crashed in native code (segmentation fault)"),
    signal.SIGTERM: Cause(FailureKind.CRASH, "it was ended from outside (SIGTERM)"),
}


def explain(tiers: Tiers, tail: Sequence[str], exit_code: int | None, phases: PhaseTable = NO_PHASES) -> Failure:
    """Why a server ended: by the best tier that any line of its log matches, the first such line; else by its exit
    code or its last exception, and else nothing is known."""
    tail = [line[:SEARCHED_CHARS] for line in tail]
    for tier in tiers:
        patterns = [(rule, re.compile(rule.pattern, re.IGNORECASE)) for rule in tier]
        for place, line in enumerate(tail):
            for rule, pattern in patterns:
                if pattern.search(line):
                    told = rule.told(phases.last(tail[:place]))
                    return Failure(*told, tuple(_decisive(pattern, tail, place)), exit_code)
    return _unexplained(tiers, tail, exit_code, phases)


def meant(tail: Sequence[str], harmless: re.Pattern[str], dump: tuple[str, str] | None = None) -> list[str]:
    """The lines that may tell a cause; a harmless one takes along the traceback that it opens. `dump`: the words in
    the first and in the last line of what an engine prints whole and survives."""
    kept: list[str] = []
    in_traceback = in_dump = False
    for line in tail:
        if dump and (in_dump or dump[0] in line):
            in_dump = dump[1] not in line
        elif harmless.search(line):
            in_traceback = line.rstrip().endswith(TRACEBACK)
        elif in_traceback:
            bare = _bare(line)
            in_traceback = bare.startswith(" ") or not bare  # the first line that is not indented names the exception
        else:
            kept.append(line)
    return kept


def _bare(line: str) -> str:
    """A line without what the engine's logger puts before it."""
    return line[match.end() :] if (match := _PREFIX.match(line)) else line


def _decisive(pattern: re.Pattern[str], tail: Sequence[str], place: int) -> list[str]:
    """The line that decides, the exception at the end of the traceback that it opens, and others like it."""
    opened = islice(tail, place, place + 2)
    found = [tail[place]]
    if any(line.rstrip().endswith(TRACEBACK) for line in opened):
        found += islice(_exceptions(tail[place:]), 1)
    found += (line for line in tail[place + 1 :] if pattern.search(line))
    once = {_bare(line).strip(): line.strip()[:LINE_CHARS] for line in reversed(found)}
    return list(reversed(once.values()))[:LINES]


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """The line at the end of each traceback, which names the exception."""
    in_traceback = False
    for line in lines:
        bare = _bare(line)
        if bare.rstrip().endswith(TRACEBACK):
            in_traceback = True
        elif in_traceback and bare.strip() and not bare.startswith(" "):
            in_traceback = False
            yield line


def _last_exception(tail: Sequence[str]) -> str:
    """The exception that began the last chain of tracebacks; empty where there is none."""
    begins = [place for place, line in enumerate(tail) if line.rstrip().endswith(TRACEBACK)]
    while len(begins) > 1 and any(_bare(line).startswith(_CHAINED) for line in tail[begins[-1] - 3 : begins[-1]]):
        begins.pop()
    return next(_exceptions(tail[begins[-1] :]), "") if begins else ""


def _unexplained(tiers: Tiers, tail: Sequence[str], exit_code: int | None, phases: PhaseTable) -> Failure:
    """No line tells: the signal that ended it may, or an exception that no rule knows."""
    words = tuple(line.strip()[:LINE_CHARS] for line in tail if line.strip())[-LINES:]
    if number := _signal(exit_code):
        rule = next((rule for rule in chain.from_iterable(tiers) if rule.signal == number), None)
        if told := rule.told(phases.last(tail)) if rule else _SIGNALS.get(number):
            return Failure(*told, words, exit_code)
    if exit_code == 0:
        return Failure(FailureKind.UNKNOWN, "it ended by itself", "", words, exit_code)
    if exception := _last_exception(tail):
        line = exception.strip()[:LINE_CHARS]
        return Failure(FailureKind.CRASH, f"it died of {_bare(line)[:CAUSE_CHARS]}", "", (line,), exit_code)
    cause = "it died, and its log does not say why" if words else "it died without a word in its log"
    return Failure(FailureKind.UNKNOWN, cause, "", words, exit_code)


def _signal(exit_code: int | None) -> int:
    """The signal that ended it, 0 for none: Python says -9, a shell 137."""
    code = exit_code or 0
    return -code if code < 0 else max(0, code - 128)

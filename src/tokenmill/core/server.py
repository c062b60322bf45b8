"""One server: its states, what can happen to it, what can be done to it. `lifecycle.step` ties them together.

PENDING → STARTING → ANSWERING → CANARY → READY ⇄ SUSPECT → STOPPING → STOPPED
BACKOFF (a restart is scheduled) · FAILED (restarting cannot help) · QUARANTINED (failed too often; tried hourly)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    PENDING = "pending"  # known, not started
    STARTING = "starting"  # its process runs; nothing of ours answers yet
    ANSWERING = "answering"  # the right server answers; it does not generate yet
    CANARY = "canary"  # real completions are on their way through the production path
    READY = "ready"  # takes prompts
    SUSPECT = "suspect"  # has work and shows no progress, or failed the pump; a small generation decides
    STOPPING = "stopping"  # being ended on request
    STOPPED = "stopped"  # gone, as asked
    BACKOFF = "backoff"  # a restart is scheduled
    FAILED = "failed"  # a restart cannot help
    QUARANTINED = "quarantined"  # failed too often; tried again after an hour


LIVE = frozenset({State.STARTING, State.ANSWERING, State.CANARY, State.READY, State.SUSPECT})
SERVING = frozenset({State.READY, State.SUSPECT})
FINAL = frozenset({State.STOPPED, State.FAILED})
WAITING = frozenset({State.BACKOFF, State.QUARANTINED})


class FailureKind(StrEnum):
    """What became of a server. `RESTARTS` says what may be done about it."""

    FLAG = "bad_flag"  # the engine does not know a flag, or not its value
    VERSION = "version_mismatch"  # the environment's packages do not fit each other
    GPU_UNSUPPORTED = "unsupported_gpu"  # the kernels were not built for this card
    MODEL = "model"  # files of the model are missing, broken, or of a kind that this version does not know
    CONFIG = "config"  # anything else that is set wrongly
    WRONG_MODE = "wrong_mode"  # answers, but not in this run's thinking mode
    MEMORY_WEIGHTS = "out_of_memory_weights"
    MEMORY_KV = "out_of_memory_kv"  # the weights leave too little: raise the fraction, or shorten the context
    MEMORY_GRAPHS = "out_of_memory_graphs"  # the fraction leaves too little: lower it
    MEMORY = "out_of_memory"  # while it generated
    OCCUPIED = "gpu_occupied"  # somebody else holds the card's memory
    PORT = "port_taken"
    CHILD = "child_died"  # a process of it died in the start, and its own words do not say why
    DEVICE = "device_fault"
    WATCHDOG = "watchdog"  # its own watchdog ended it
    CRASH = "crash"
    HANG = "hang"
    DRIFT = "went_bad"  # it works, and what it writes is bad where the other servers' is not (core/audit, core/drift)
    SHM = "shm_full"
    DISK = "disk_full"
    STORAGE = "storage"  # the files it needs cannot be read now: a mount that is away
    UNREACHABLE = "unreachable"  # a server of someone else's
    UNKNOWN = "unknown"


class Restart(StrEnum):
    """What may be done about a failure."""

    NEVER = "never"  # a restart would end alike
    OTHER_PORTS = "other_ports"  # at once
    LESS_MEMORY = "less_memory"  # once, with a lower fraction for all servers alike
    ONCE = "once"  # once in 30 good minutes, with back-off; then out of memory is final, anything else quarantined
    BACKOFF = "backoff"  # with back-off, within the budget
    WAIT = "wait"  # the surroundings' fault: with back-off, never charged


BY_A_PROMPT = frozenset(
    {
        *(FailureKind.CRASH, FailureKind.UNKNOWN, FailureKind.CHILD, FailureKind.WATCHDOG, FailureKind.HANG),
        *(FailureKind.DEVICE, FailureKind.MEMORY),
    }
)
"""What a prompt can do to a server that serves."""

RESTARTS: Mapping[FailureKind, Restart] = {
    FailureKind.FLAG: Restart.NEVER,
    FailureKind.VERSION: Restart.NEVER,
    FailureKind.GPU_UNSUPPORTED: Restart.NEVER,
    FailureKind.MODEL: Restart.NEVER,
    FailureKind.CONFIG: Restart.NEVER,
    FailureKind.WRONG_MODE: Restart.NEVER,
    FailureKind.MEMORY_WEIGHTS: Restart.ONCE,  # a leftover may have held the memory, and it is reaped
    FailureKind.MEMORY_KV: Restart.NEVER,
    FailureKind.MEMORY_GRAPHS: Restart.LESS_MEMORY,
    FailureKind.MEMORY: Restart.ONCE,
    FailureKind.OCCUPIED: Restart.WAIT,  # whoever holds the card may end in an hour
    FailureKind.PORT: Restart.OTHER_PORTS,
    FailureKind.CHILD: Restart.BACKOFF,
    FailureKind.DEVICE: Restart.ONCE,  # a card that faults twice is not to be trusted
    FailureKind.WATCHDOG: Restart.BACKOFF,
    FailureKind.CRASH: Restart.BACKOFF,
    FailureKind.HANG: Restart.BACKOFF,
    FailureKind.DRIFT: Restart.ONCE,  # a second time says that it is no chance
    FailureKind.SHM: Restart.BACKOFF,
    FailureKind.DISK: Restart.WAIT,
    FailureKind.STORAGE: Restart.WAIT,
    FailureKind.UNREACHABLE: Restart.WAIT,
    FailureKind.UNKNOWN: Restart.BACKOFF,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of a server: cause in a sentence, the fix in a line, the log's decisive lines."""

    kind: FailureKind
    cause: str
    fix: str = ""
    lines: tuple[str, ...] = ()
    exit_code: int | None = None

    @property
    def restart(self) -> Restart:
        return RESTARTS[self.kind]

    def __str__(self) -> str:
        code = "" if self.exit_code is None else f" (exit code {self.exit_code})"
        return f"{self.cause}{code}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits in seconds; the defaults are the config's."""

    start_timeout: float = 1200.0
    stall_timeout: float = 90.0
    suspect_timeout: float = 900.0  # ten stall timeouts: kernels compiled for minutes at most; seen: 107 s
    canary_timeout: float = 1200.0
    stop_timeout: float = 200.0  # SIGTERM, SIGKILL, the look whether all is gone and the memory back: 140 s at most
    restarts_per_hour: int = 5
    backoff: float = 5.0  # before the first restart; doubles from there to sixty times as much, 5 minutes
    phases: Mapping[str, float] = field(default_factory=dict)  # the most that a phase may take, however busy it looks


# -- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Launch:
    """Its turn has come."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """A process of an earlier tokenmill lives and was launched alike."""


@dataclass(frozen=True, slots=True)
class PhaseSeen:
    name: str
    percent: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Evidence: tokens, answers or a new phase (`strong`), or only processor time, log lines, bytes read."""

    strong: bool = True


@dataclass(frozen=True, slots=True)
class Answered:
    """The right server answers over HTTP."""


@dataclass(frozen=True, slots=True)
class Healthy:
    """Its own health check says that it can generate."""


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    pass


@dataclass(frozen=True, slots=True)
class ProbePassed:
    """A small generation over a connection of its own came back."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """It did not. `burning`: the server's processes use processor time, so it may be compiling. `free`: a slot was
    free for it. `sighted`: tokens of this server are seen as they come, by counters or in streams."""

    failure: Failure
    burning: bool
    free: bool = True
    sighted: bool = False


@dataclass(frozen=True, slots=True)
class Trouble:
    """The pump met a failure that is the server's; what the server is taken for if a small generation fails, too."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Failed:
    """Exit, wrong identity, a failed canary, an engine that says that it is dead.

    `mended` is what the next start has changed for all servers alike, empty where nothing could be.
    """

    failure: Failure
    mended: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """`busy`: requests are in flight, so silence means something. `blind`: nothing would show that it works. `said`:
    what its pages say in place of what is asked, such as HTTP 500; empty where they say nothing."""

    busy: bool = False
    blind: bool = False
    said: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of it lives and its cards' memory is back; else `trouble` says what is not: its place cannot be used
    until somebody has seen to it. `ports_taken`: somebody else has them by now."""

    trouble: str = ""
    ports_taken: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Its last failure was the surroundings': not charged, and it waits until they are well again."""


@dataclass(frozen=True, slots=True)
class Release:
    """Its turn to see whether the surroundings are well again."""


Event = (
    Launch
    | Adopt
    | PhaseSeen
    | Progress
    | Answered
    | Healthy
    | CanaryPassed
    | ProbePassed
    | ProbeFailed
    | Trouble
    | Failed
    | Tick
    | Stop
    | Gone
    | Hold
    | Release
)


# -- actions ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process. `life` counts the starts; `fresh_ports` after a port clash."""

    life: int
    fresh_ports: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """Begin to probe a server that runs already."""


@dataclass(frozen=True, slots=True)
class RunCanary:
    pass


@dataclass(frozen=True, slots=True)
class Admit:
    """Give it prompts."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take its prompts back, uncharged. `died`: while it served, and one of them may have done it."""

    died: bool = False


@dataclass(frozen=True, slots=True)
class ProbeGeneration:
    """Ask for a small generation, `after` so many seconds."""

    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """End the group at once, verify, then say Gone."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the group in good order, verify, then say Gone."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Something a person should know."""

    text: str
    failure: Failure | None = None


Action = Spawn | Watch | RunCanary | Admit | Withdraw | ProbeGeneration | Kill | Terminate | Tell


@dataclass(frozen=True, slots=True)
class Server:
    """One server's state. `since` is when the state began, `progress_at` the last evidence, `life` the starts.

    `phases` are those of this life's start that have ended, with the seconds they took. `doubt`: the trouble that made
    it SUSPECT, None where it was silence. `held`: it waits for the surroundings. `probation`: it was quarantined, and
    one more failure quarantines it again. `once_failed` are the kinds that it has failed of and that allow a single
    restart.
    """

    index: int
    timing: Timing = field(default_factory=Timing)
    owned: bool = True
    state: State = State.PENDING
    since: float = 0.0
    phase: str = ""
    phase_since: float = 0.0
    percent: float = 0.0
    phases: tuple[tuple[str, float], ...] = ()
    started_at: float = 0.0
    progress_at: float = 0.0
    life: int = 0
    charged: tuple[float, ...] = ()
    next_backoff: float = 0.0
    retry_at: float = 0.0
    gone: bool = True
    held: bool = False
    probation: bool = False
    once_failed: frozenset[FailureKind] = frozenset()
    fresh_ports: bool = False
    ready_at: float | None = None
    failure: Failure | None = None
    doubt: Failure | None = None
    story: tuple[str, ...] = ()

    @property
    def restarts(self) -> int:
        return max(0, self.life - 1)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the servers' states mean together: how many serve, and whether none ever will."""

    ready: int
    hopeless: bool


def fleet(servers: tuple[Server, ...]) -> Fleet:
    """Hopeless: every server failed in a way that no restart mends, or failed all its starts and was never ready."""
    ready = sum(server.state in SERVING for server in servers)
    lost = (
        server.state is State.FAILED or (server.state is State.QUARANTINED and server.ready_at is None)
        for server in servers
    )
    return Fleet(ready, bool(servers) and all(lost))

"""The life of one server, as a pure function: step(server, event, now) → (server, actions). No I/O, no clock.

Process exit, probes and progress decide; log text only explains. `now` is any steadily growing number of seconds.
A server that tokenmill did not launch (`owned=False`) is never spawned or killed: it is set aside and probed again.

Every (state, event) pair is defined (pairs.py): taken, late, or illegal. Every state but PENDING and the final ones
has a deadline that ticks alone bring about: start_timeout, stall_timeout and the phase's own limit before the canary,
canary_timeout in it; with work in flight stall_timeout and then suspect_timeout; stop_timeout for whatever is being
ended; `retry_at` for what waits.
"""

from dataclasses import replace

from tokenmill.core.pairs import IllegalEvent, meaning
from tokenmill.core.server import (
    BY_A_PROMPT,
    LIVE,
    SERVING,
    WAITING,
    Action,
    Admit,
    Adopt,
    Answered,
    CanaryPassed,
    Event,
    Failed,
    Failure,
    FailureKind,
    Gone,
    Healthy,
    Hold,
    Kill,
    Launch,
    PhaseSeen,
    ProbeFailed,
    ProbeGeneration,
    ProbePassed,
    Progress,
    Release,
    Restart,
    RunCanary,
    Server,
    Spawn,
    State,
    Stop,
    Tell,
    Terminate,
    Tick,
    Trouble,
    Watch,
    Withdraw,
)

Step = tuple[Server, tuple[Action, ...]]

BACKOFF_MOST = 60.0  # times the first: a server that comes back after an outage waits 5 minutes at most
GOOD_WHILE = 1800.0  # 30 good minutes: what failed before them is forgotten
QUARANTINE = 3600.0  # seconds until a server that failed too often is tried again
HOUR = 3600.0
STAGING = "staging"  # the phase in which the model is copied again before a start
STORY = 20  # events that an error carries
PROBE_PAUSE = 1.0  # seconds between two small generations of a server in doubt; its exit may be on the way


def step(server: Server, event: Event, now: float) -> Step:
    """The next state and what to do; raises IllegalEvent."""
    told = server if isinstance(event, Tick | Progress) else _remember(server, event, now)
    match meaning(told.state, type(event)):
        case "taken":
            return _take(told, event, now)
        case "late":
            return told, ()
        case "illegal":
            story = "\n  ".join(told.story)
            raise IllegalEvent(f"server {told.index}: {event} in state {told.state}; its last events:\n  {story}")


def _take(server: Server, event: Event, now: float) -> Step:
    match event:
        case Tick():
            return _tick(server, event, now)
        case Stop():
            return _stop(server, now)
        case Gone():
            return _gone(server, event, now)
        case Failed():
            return _fail(server, event.failure, now, event.mended)
        case Launch():
            return _start(server, now)
        case Adopt():
            return _adopt(server, now), (Watch(),)
        case PhaseSeen():
            return _phase(server, event, now), ()
        case Progress(strong):
            return _progress(server, strong, now)
        case Answered() | Healthy() | CanaryPassed():
            return _up(server, event, now)
        case ProbePassed() | ProbeFailed() | Trouble():
            return _doubt(server, event, now)
        case Hold() | Release():
            return _surroundings(server, event, now), ()


def _remember(server: Server, event: Event, now: float) -> Server:
    return replace(server, story=(*server.story, f"{now:.1f} {server.state}: {event}")[-STORY:])


def _enter(server: Server, state: State, now: float) -> Server:
    return replace(server, state=state, since=now, progress_at=now, doubt=None)


def _start(server: Server, now: float) -> Step:
    life = server.life + 1
    fresh = server.fresh_ports
    server = replace(
        server,
        life=life,
        phase="",
        phase_since=now,
        percent=0.0,
        phases=(),
        started_at=now,
        gone=False,
        held=False,
        fresh_ports=False,
    )
    action: Action = Spawn(life, fresh) if server.owned else Watch()
    return _enter(server, State.STARTING, now), (action,)


def _adopt(server: Server, now: float) -> Server:
    return _enter(
        replace(server, life=1, started_at=now, phase_since=now, gone=False),
        State.STARTING,
        now,
    )


def _up(server: Server, event: Answered | Healthy | CanaryPassed, now: float) -> Step:
    match event:
        case Answered():
            return _enter(server, State.ANSWERING, now), ()
        case Healthy():
            return _phase(_enter(server, State.CANARY, now), PhaseSeen("canary", 100.0), now), (RunCanary(),)
        case CanaryPassed():
            ready = _phase(_enter(server, State.READY, now), PhaseSeen("", 100.0), now)
            return replace(ready, ready_at=now), (Admit(),)


def _phase(server: Server, seen: PhaseSeen, now: float) -> Server:
    """What was reached stays reached; the time until the first phase is the process's own beginning."""
    server = replace(server, percent=max(seen.percent, server.percent), progress_at=now)
    if seen.name == STAGING:
        server = replace(server, started_at=now)  # no start yet: a model of 140 GB takes its time to be copied again
    if seen.name == server.phase:
        return server
    ended = (server.phase or "begin", now - server.phase_since)
    return replace(server, phase=seen.name, phase_since=now, phases=(*server.phases, ended))


def _progress(server: Server, strong: bool, now: float) -> Step:
    if not strong and server.state in SERVING:
        return server, ()  # a busy process is no answer: answers and tokens are
    server = replace(server, progress_at=now)
    if server.state is State.SUSPECT and server.doubt is None:
        return _enter(server, State.READY, now), (Tell("well: answers or tokens come again"),)
    return server, ()


# -- the end of a life -------------------------------------------------------------------------------------------------
def _stop(server: Server, now: float) -> Step:
    if server.state in LIVE and not server.owned:
        return replace(_enter(server, State.STOPPED, now), gone=True), (Withdraw(),)
    if server.state in LIVE:
        return _enter(server, State.STOPPING, now), (Withdraw(), Terminate())
    if not server.gone:
        return _enter(server, State.STOPPING, now), ()  # its end was ordered when it failed
    return _enter(server, State.STOPPED, now), ()


def _gone(server: Server, gone: Gone, now: float) -> Step:
    server = replace(server, gone=True, fresh_ports=server.fresh_ports or gone.ports_taken)
    if server.state is State.STOPPING:
        return _enter(server, State.STOPPED, now), ()
    if gone.trouble and server.state in WAITING:
        return _quarantine(server, now), (Tell(f"{gone.trouble}: nothing is started there for 1 h"),)
    return server, ()


def _fail(server: Server, failure: Failure, now: float, mended: str = "") -> Step:
    """A life has ended: withdraw, kill, then decide when and whether to start again."""
    if server.state in SERVING and server.ready_at is not None and now - server.ready_at >= GOOD_WHILE:
        server = replace(server, next_backoff=0.0, probation=False, once_failed=frozenset())
    if _is_of_the_config(failure) and server.ready_at is not None:
        failure = replace(failure, kind=FailureKind.CRASH)  # it has worked with this config
    withdraw = Withdraw(died=server.state in SERVING and failure.kind in BY_A_PROMPT)
    server = replace(server, failure=failure)
    ending: tuple[Action, ...] = (withdraw, Kill()) if server.owned else (withdraw,)
    server, actions = _after(server, failure, mended, now)
    return replace(server, gone=not server.owned), (*ending, *actions)


def _is_of_the_config(failure: Failure) -> bool:
    return failure.restart is Restart.NEVER and failure.kind is not FailureKind.WRONG_MODE


def _after(server: Server, failure: Failure, mended: str, now: float) -> Step:
    """Whether and when it is started again; `then` tells."""
    told = Tell(str(failure), failure)
    match failure.restart:
        case _ if not server.owned and failure.kind is not FailureKind.WRONG_MODE:
            return _set_aside(server, failure, now), (Tell(f"set aside: {failure}", failure),)
        case Restart.NEVER:
            return _enter(server, State.FAILED, now), (told,)
        case Restart.WAIT:
            return _back_off(server, now), (told,)
        case Restart.OTHER_PORTS:
            server = replace(_enter(server, State.BACKOFF, now), retry_at=now, fresh_ports=True)
        case Restart.LESS_MEMORY if not mended:
            return _enter(server, State.FAILED, now), (told,)
        case Restart.LESS_MEMORY:
            server = replace(_enter(server, State.BACKOFF, now), retry_at=now)
            told = Tell(f"{failure}; from now on {mended} for all servers", failure)
        case Restart.ONCE if failure.kind in server.once_failed:
            # A card may recover in an hour, too little memory stays too little.
            lasts = failure.kind is FailureKind.MEMORY or failure.kind is FailureKind.MEMORY_WEIGHTS
            return _enter(server, State.FAILED, now) if lasts else _quarantine(server, now), (told,)
        case Restart.ONCE:
            server = replace(_back_off(server, now), once_failed=server.once_failed | {failure.kind})
        case Restart.BACKOFF:
            server = _back_off(server, now)
    return _charge(server, now), (told,)


def then(server: Server, now: float) -> str:
    """What comes after a failure, for a person."""
    match server.state:
        case State.BACKOFF if server.held:
            return "it waits until the trouble of all is over"
        case State.BACKOFF:
            ports = ", on other ports" if server.fresh_ports else ""
            wait = server.retry_at - now
            again = "started again" if server.owned else "asked again"
            return (f"{again} in {wait:.0f} s" if wait >= 1.0 else f"{again} at once") + ports
        case State.QUARANTINED:
            return f"it failed too often: tried again in {(server.retry_at - now) / 60:.0f} min"
        case State.FAILED:
            return "not started again: that cannot help"
    return ""


def _set_aside(server: Server, failure: Failure, now: float) -> Server:
    """A server of someone else's: asked again soon, or in an hour where once was too often."""
    again = failure.kind in server.once_failed
    once = {failure.kind} if failure.restart is Restart.ONCE else set()
    server = replace(_back_off(server, now), once_failed=server.once_failed | once)
    return replace(server, retry_at=now + QUARANTINE) if again else server


def _back_off(server: Server, now: float) -> Server:
    first = server.timing.backoff
    wait = server.next_backoff or first
    doubled = min(wait * 2, first * BACKOFF_MOST)
    return replace(_enter(server, State.BACKOFF, now), retry_at=now + wait, next_backoff=doubled)


def _charge(server: Server, now: float) -> Server:
    """Quarantined where the hour's budget is used up, or where it was quarantined before."""
    charged = (*(t for t in server.charged if now - t < HOUR), now)
    if server.probation or len(charged) > server.timing.restarts_per_hour:
        return _quarantine(server, now)
    return replace(server, charged=charged)


def _quarantine(server: Server, now: float) -> Server:
    entered = _enter(server, State.QUARANTINED, now)
    return replace(entered, retry_at=now + QUARANTINE, charged=(), probation=True, held=False)


def _surroundings(server: Server, event: Hold | Release, now: float) -> Server:
    """Held: not charged, and tried after an hour even if nobody releases it."""
    if isinstance(event, Release):
        return replace(server, held=False, retry_at=now) if server.held else server
    charged = tuple(at for at in server.charged if at != server.since)
    entered = _enter(server, State.BACKOFF, now)
    return replace(entered, held=True, retry_at=now + HOUR, charged=charged, probation=False)


# -- time --------------------------------------------------------------------------------------------------------------
def _tick(server: Server, tick: Tick, now: float) -> Step:
    if not server.gone and server.state not in LIVE and now - server.since > server.timing.stop_timeout:
        return _gone(server, Gone(f"its processes could not be ended in {server.timing.stop_timeout:.0f} s"), now)
    match server.state:
        case State.BACKOFF | State.QUARANTINED:
            return _start(server, now) if server.gone and now >= server.retry_at else (server, ())
        case State.STARTING | State.ANSWERING:
            return _tick_start(server, tick, now)
        case State.CANARY:
            return _tick_canary(server, tick, now)
        case State.READY:
            return _tick_ready(server, tick, now)
        case State.SUSPECT if now - max(server.since, server.progress_at) > server.timing.suspect_timeout:
            silent = _hang(f"busy, but no answer and no token for {now - server.progress_at:.0f} s")
            return _fail(server, server.doubt or silent, now)
    return server, ()


def _tick_start(server: Server, tick: Tick, now: float) -> Step:
    timing = server.timing
    at = f"{server.phase} {server.percent:.0f}%" if server.phase else "start"
    at = f"{at}; {tick.said}" if tick.said else at
    if now - server.started_at > timing.start_timeout:
        return _fail(server, _hang(f"not ready after start_timeout = {timing.start_timeout:.0f} s, at {at}"), now)
    limit = timing.phases.get(server.phase, timing.start_timeout)
    if now - server.phase_since > limit:
        return _fail(server, _hang(f"longer than {limit:.0f} s at {at}, which never takes so long"), now)
    if server.owned and now - server.progress_at > timing.stall_timeout:
        return _fail(server, _hang(f"silent and idle for {timing.stall_timeout:.0f} s at {at}"), now)
    return server, ()


def _tick_canary(server: Server, tick: Tick, now: float) -> Step:
    timing = server.timing
    if now - server.since > timing.canary_timeout:
        return _fail(server, _hang(f"the canary took longer than {timing.canary_timeout:.0f} s"), now)
    if now - server.progress_at > timing.stall_timeout and not tick.blind:
        return _fail(server, _hang(f"silent and idle for {timing.stall_timeout:.0f} s in the canary"), now)
    return server, ()


def _tick_ready(server: Server, tick: Tick, now: float) -> Step:
    if not tick.busy:
        return replace(server, progress_at=now), ()
    silent = now - server.progress_at
    if silent <= server.timing.stall_timeout:
        return server, ()
    suspect = replace(server, state=State.SUSPECT, since=now)
    return suspect, (
        ProbeGeneration(),
        Tell(f"no answer and no token for {silent:.0f} s; a small generation decides"),
    )


def _hang(cause: str) -> Failure:
    return Failure(FailureKind.HANG, cause)


def _doubt(server: Server, event: ProbePassed | ProbeFailed | Trouble, now: float) -> Step:
    return _trouble(server, event.failure, now) if isinstance(event, Trouble) else _probed(server, event, now)


def _probed(server: Server, event: ProbePassed | ProbeFailed, now: float) -> Step:
    """A failed probe decides where a slot was free for it; where none was, the tokens of what holds the slots do."""
    if isinstance(event, ProbePassed):
        return _enter(server, State.READY, now), (Tell("well: the small generation came back"),)
    silent = now - server.progress_at > server.timing.stall_timeout
    if event.burning or not (event.free or (event.sighted and silent)):
        return server, (ProbeGeneration(PROBE_PAUSE),)
    failure = event.failure
    if server.doubt is not None:
        failure = replace(server.doubt, cause=f"{server.doubt.cause}; and a small generation failed: {failure.cause}")
    else:
        failure = replace(failure, cause=f"hangs: no answer, no token, and a small generation failed: {failure.cause}")
    return _fail(server, failure, now)


def _trouble(server: Server, failure: Failure, now: float) -> Step:
    if server.state is State.READY:
        suspect = replace(server, state=State.SUSPECT, since=now, doubt=failure)
        return suspect, (ProbeGeneration(PROBE_PAUSE), Tell(f"in doubt: {failure}; a small generation decides"))
    if server.state is State.SUSPECT and server.doubt is None:
        return replace(server, doubt=failure), ()
    return server, ()

"""The life of one server, as a pure function: step(server, event, now) → (server, actions). No I/O, no clock.

Process exit, probes and progress decide; log text only explains. `now` is any steadily growing number of seconds.
A server that tokenmill did not launch (`owned=False`) is never spawned or killed: it is set aside and probed again.
Every live state has a deadline: start_timeout and stall_timeout before READY, stall_timeout and then suspect_timeout
with work in flight after it.
"""

from dataclasses import replace

from tokenmill.core.server import (
    FINAL,
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
    Kill,
    Launch,
    PhaseSeen,
    ProbeFailed,
    ProbeGeneration,
    ProbePassed,
    Progress,
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
from tokenmill.errors import TokenmillError

Step = tuple[Server, tuple[Action, ...]]

BACKOFF_MOST = 60.0  # times the first: a server that comes back after an outage waits 5 minutes at most
GOOD_WHILE = 1800.0  # 30 good minutes reset the back-off
QUARANTINE = 3600.0  # seconds until a server that failed too often is tried again
HOUR = 3600.0
STORY = 20  # events that an error carries
PROBE_PAUSE = 1.0  # seconds between two small generations of a server in doubt; its exit may be on the way


class IllegalEvent(TokenmillError):
    """A bug of ours: an event that cannot happen in this state; carries the server's last events."""


def step(server: Server, event: Event, now: float) -> Step:
    """The next state and what to do. Events that come too late for a state are ignored; impossible ones raise."""
    told = server if isinstance(event, Tick | Progress) else _remember(server, event, now)
    match event:
        case Tick():
            return _tick(told, event, now)
        case Stop():
            return _stop(told, now)
        case Gone():
            return _gone(told, now)
        case Failed(failure):
            return _fail(told, failure, now) if told.state in LIVE else (told, ())
        case Launch():
            return _launch(told, now)
        case Adopt():
            return _adopt(told, now)
        case _ if told.state not in LIVE:
            return told, ()  # the last words of a life that has ended
        case PhaseSeen(name, percent):
            # Target and draft print the same lines: what was reached stays reached.
            return replace(told, phase=name, percent=max(percent, told.percent), progress_at=now), ()
        case Progress(strong):
            return _progress(told, strong, now)
        case Answered():
            return _answered(told, now)
        case Healthy():
            return _healthy(told, now)
        case CanaryPassed():
            return _canary_passed(told, now)
        case ProbePassed() | ProbeFailed() | Trouble():
            return _doubt(told, event, now)


def _remember(server: Server, event: Event, now: float) -> Server:
    return replace(server, story=(*server.story, f"{now:.1f} {server.state}: {event}")[-STORY:])


def _enter(server: Server, state: State, now: float) -> Server:
    return replace(server, state=state, since=now, progress_at=now, doubt=None)


def _launch(server: Server, now: float) -> Step:
    if server.state is not State.PENDING:
        return _illegal(server, "Launch")
    return _start(server, now)


def _start(server: Server, now: float) -> Step:
    life = server.life + 1
    fresh = server.fresh_ports
    server = replace(server, life=life, phase="", percent=0.0, started_at=now, gone=False, fresh_ports=False)
    action: Action = Spawn(life, fresh) if server.owned else Watch()
    return _enter(server, State.STARTING, now), (action,)


def _adopt(server: Server, now: float) -> Step:
    if server.state is not State.PENDING or not server.owned:
        return _illegal(server, "Adopt")
    server = replace(server, life=1, started_at=now, gone=False)
    return _enter(server, State.STARTING, now), (Watch(),)


def _progress(server: Server, strong: bool, now: float) -> Step:
    if not strong and server.state in SERVING:
        return server, ()  # a busy process is no answer: answers and tokens are
    server = replace(server, progress_at=now)
    if server.state is State.SUSPECT and server.doubt is None:
        return _enter(server, State.READY, now), (Tell("makes progress again"),)
    return server, ()


def _answered(server: Server, now: float) -> Step:
    if server.state is not State.STARTING:
        return server, ()
    return _enter(server, State.ANSWERING, now), ()


def _healthy(server: Server, now: float) -> Step:
    if server.state is not State.ANSWERING:
        return server, ()
    return replace(_enter(server, State.CANARY, now), phase="canary", percent=100.0), (RunCanary(),)


def _canary_passed(server: Server, now: float) -> Step:
    if server.state is not State.CANARY:
        return server, ()
    return replace(_enter(server, State.READY, now), phase="", ready_at=now), (Admit(),)


def _stop(server: Server, now: float) -> Step:
    if server.state in FINAL or server.state is State.STOPPING:
        return server, ()
    if server.state in LIVE and not server.owned:
        return replace(_enter(server, State.STOPPED, now), gone=True), (Withdraw(),)
    if server.state in LIVE:
        return _enter(server, State.STOPPING, now), (Withdraw(), Terminate())
    if not server.gone:
        return _enter(server, State.STOPPING, now), ()  # its end was ordered when it failed
    return _enter(server, State.STOPPED, now), ()


def _gone(server: Server, now: float) -> Step:
    server = replace(server, gone=True)
    return (_enter(server, State.STOPPED, now), ()) if server.state is State.STOPPING else (server, ())


def _fail(server: Server, failure: Failure, now: float) -> Step:
    """A life has ended: withdraw, kill, then decide when and whether to start again."""
    good = server.state in SERVING and server.ready_at is not None and now - server.ready_at >= GOOD_WHILE
    first = server.timing.backoff
    backoff = first if good else server.next_backoff or first
    doubled = min(backoff * 2, first * BACKOFF_MOST)
    never = failure.restart is Restart.NEVER and failure.kind is not FailureKind.WRONG_MODE
    if never and server.ready_at is not None:
        failure = replace(failure, kind=FailureKind.CRASH)  # it has worked with this config
    server = replace(server, failure=failure)
    actions: tuple[Action, ...] = (Withdraw(), Kill()) if server.owned else (Withdraw(),)
    if not server.owned and failure.kind is not FailureKind.WRONG_MODE:
        server = replace(_enter(server, State.BACKOFF, now), retry_at=now + backoff, next_backoff=doubled, gone=True)
        return server, (*actions, Tell(f"set aside: {failure}", failure))
    out_of_memory = server.memory_failures + (failure.restart in (Restart.ONCE, Restart.LESS_MEMORY))
    if failure.restart is Restart.NEVER or out_of_memory > 1:
        server = replace(_enter(server, State.FAILED, now), memory_failures=out_of_memory, gone=not server.owned)
        return server, (*actions, Tell(f"failed: {failure}", failure))
    charged = (*(t for t in server.charged if now - t < HOUR), now)
    server = replace(
        server, charged=charged, memory_failures=out_of_memory, fresh_ports=failure.kind is FailureKind.PORT
    )
    if len(charged) > server.timing.restarts_per_hour:
        server = replace(_enter(server, State.QUARANTINED, now), retry_at=now + QUARANTINE, charged=())
        return server, (
            *actions,
            Tell(f"failed {len(charged)} times in an hour; tried again in 1 h: {failure}", failure),
        )
    wait = 0.0 if failure.kind is FailureKind.PORT else backoff
    server = replace(_enter(server, State.BACKOFF, now), retry_at=now + wait, next_backoff=doubled)
    then = f"started again in {wait:.0f} s" if wait else "started again at once, on other ports"
    return server, (*actions, Tell(f"{failure}; {then}", failure))


def _tick(server: Server, tick: Tick, now: float) -> Step:
    timing = server.timing
    if server.state in WAITING:
        return _start(server, now) if server.gone and now >= server.retry_at else (server, ())
    if server.state in (State.STARTING, State.ANSWERING):
        return _tick_start(server, now)
    if server.state is State.CANARY:
        return _tick_canary(server, tick, now)
    if server.state is State.READY:
        return _tick_ready(server, tick, now)
    if server.state is State.SUSPECT and now - max(server.since, server.progress_at) > timing.suspect_timeout:
        silent = _hang(f"busy, but no answer and no token for {now - server.progress_at:.0f} s")
        return _fail(server, server.doubt or silent, now)
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
    return suspect, (ProbeGeneration(), Tell(f"no answer and no token for {silent:.0f} s"))


def _tick_start(server: Server, now: float) -> Step:
    timing = server.timing
    if not server.owned:
        return server, ()
    if now - server.started_at > timing.start_timeout:
        return _fail(server, _hang(f"not ready after start_timeout = {timing.start_timeout:.0f} s"), now)
    if now - server.progress_at > timing.stall_timeout:
        at = f"{server.phase} {server.percent:.0f}%" if server.phase else "start"
        return _fail(server, _hang(f"silent and idle for {timing.stall_timeout:.0f} s at {at}"), now)
    return server, ()


def _hang(cause: str) -> Failure:
    return Failure(FailureKind.HANG, cause)


def _doubt(server: Server, event: ProbePassed | ProbeFailed | Trouble, now: float) -> Step:
    if isinstance(event, Trouble):
        return _trouble(server, event.failure, now)
    return _probed(server, event, now) if server.state is State.SUSPECT else (server, ())


def _probed(server: Server, event: ProbePassed | ProbeFailed, now: float) -> Step:
    """A failed probe decides where a slot was free for it; where none was, the tokens of what holds the slots do."""
    if isinstance(event, ProbePassed):
        return _enter(server, State.READY, now), (Tell("answers again"),)
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
        return suspect, (ProbeGeneration(PROBE_PAUSE), Tell(f"in doubt: {failure}"))
    if server.state is State.SUSPECT and server.doubt is None:
        return replace(server, doubt=failure), ()
    return server, ()


def _illegal(server: Server, event: str) -> Step:
    story = "\n  ".join(server.story)
    raise IllegalEvent(f"server {server.index}: {event} in state {server.state}; its last events:\n  {story}")

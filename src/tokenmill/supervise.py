"""One server's supervisor, through all its lives: feeds events into core/lifecycle and carries out what that decides.

Whether a server is ready, hung or to be restarted is never decided here; what happens in a life is life.py's to see.
"""

import asyncio
import errno
import signal
import time
from collections.abc import Callable, Coroutine

from tokenmill import life
from tokenmill.attempt import Lane
from tokenmill.canary import Passed
from tokenmill.core import capacity
from tokenmill.core import server as core
from tokenmill.core.lifecycle import step
from tokenmill.core.server import Failure, FailureKind, Server, State, Timing
from tokenmill.core.status import ServerStatus
from tokenmill.engines.base import ServerInfo
from tokenmill.errors import BrokenError, BusyError, GoneError, PluginError, PreflightError, RequestError, StoppedError
from tokenmill.events import Event, from_thread, now
from tokenmill.folder import ServerEntry
from tokenmill.launch import Place
from tokenmill.life import LOOK_S, Job, Life
from tokenmill.machine import ports, processes

STOP_GRACE_S = 20.0
"""SIGTERM to SIGKILL."""

EXIT_WAIT_S = 3.0
"""SGLang's main process goes within seconds of its scheduler's crash, after it has written why."""

WEIGHTS_LOADED = 60.0
"""Percent at which every engine's phase table says that the weights are in memory."""

RATE_WINDOW_S = 60.0
"""Tokens a second are of the last minute: answers of 8,000 tokens come in lumps."""

UNWATCHED_S = 1.0
"""Between two looks, which come every LOOK_S: in a gap so long tokenmill itself did not run."""

_NO_PROGRAM = frozenset({errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR})
"""No restart mends these; a full disk or table of processes may be free again."""

Work = Callable[[Life], Coroutine[None, None, None]]


class _WatchClock:
    """Seconds of looking: while tokenmill itself was stopped (Ctrl-Z, a frozen container) no server was silent."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._unwatched = 0.0

    def now(self) -> float:
        moment = time.monotonic()
        gap, self._last = moment - self._last, moment
        if gap > UNWATCHED_S:
            self._unwatched += gap - LOOK_S
        return moment - self._unwatched


class Supervisor:
    """`run` ends when the server has stopped or failed for good and its processes are gone.

    `adopt` is a living process of an earlier tokenmill that was launched alike. `entry` is the process by which the
    server can be found again, for state.json; `past_weights` is set once the next server need not wait for this one.
    """

    def __init__(
        self,
        job: Job,
        place: Place,
        where: ports.Ports,
        other_ports: Callable[[], ports.Ports],
        adopt: ServerEntry | None = None,
    ) -> None:
        fleet = job.config.fleet
        timing = Timing(
            start_timeout=fleet.start_timeout,
            stall_timeout=fleet.stall_timeout,
            suspect_timeout=10 * fleet.stall_timeout,
            canary_timeout=fleet.start_timeout,
            restarts_per_hour=fleet.restarts_per_hour,
            backoff=fleet.backoff,
        )
        self.job = job
        self.place = place
        self.ports = where
        self._other_ports = other_ports
        self.entry = adopt
        self.server = Server(place.index, timing, owned=not job.config.engine.addresses)
        self.name = f"{job.node}/{place.index}" if job.node else str(place.index)
        self.lane: Lane | None = None
        self.grace_s = STOP_GRACE_S
        self.past_weights = asyncio.Event()
        self._inbox: asyncio.Queue[core.Event] = asyncio.Queue()
        self._life: Life | None = None
        self._living: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._passed: Passed | None = None
        self._probing = False
        self._answers = 0
        self._rates: list[tuple[float, int]] = []
        self._left_alive = False
        self._clock = _WatchClock()

    def post(self, event: core.Event) -> None:
        self._inbox.put_nowait(event)

    def leave(self) -> None:
        """Ends the supervision and leaves the server running, for the next tokenmill to adopt."""
        self._left_alive = True
        self.post(core.Tick())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            ticker = tasks.create_task(self._tick())
            try:
                while not self._left_alive and not (self.server.state in core.FINAL and self.server.gone):
                    self._apply(await self._inbox.get())
            finally:
                ticker.cancel()
                self._withdraw()
                self._end_life()
                if not self._left_alive and not self.server.gone:
                    self._kill_at_once()

    def _kill_at_once(self) -> None:
        """The way out where nothing can be waited for: no server survives a tokenmill that ends by a bug."""
        if self.entry is not None:
            processes.signal_all(processes.members(self.entry.group, self.entry.nonce), signal.SIGKILL)

    def status(self) -> ServerStatus:
        lane, server = self.lane, self.server
        return ServerStatus(
            node=self.job.node,
            index=self.place.index,
            gpu=self.place.label,
            port=self.entry.port if self.entry else self.ports.http,
            pid=self.entry.process.pid if self.entry else None,
            state=server.state.value,
            phase=server.phase,
            percent=round(server.percent, 1),
            in_flight=lane.in_flight if lane else 0,
            capacity=lane.capacity if lane else 0,
            tokens_per_s=self._tokens_per_s(),
            accept_length=lane.accept_length if lane else None,
            restarts=server.restarts,
            last_error=str(server.failure) if server.failure and server.state not in core.SERVING else "",
        )

    # -- the loop ----------------------------------------------------------------------------------------------------
    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self.lane is not None:
                self._note_answers(self.lane)
            busy = bool(self.lane and self.lane.in_flight)
            self.post(core.Tick(busy, blind=self._life is not None and self._life.blind))

    def _note_answers(self, lane: Lane) -> None:
        if (came := lane.answers + lane.seen) != self._answers:
            self._answers = came
            self.post(core.Progress(strong=True))
        moment = time.monotonic()
        if not self._rates or moment - self._rates[-1][0] >= 1.0:
            self._rates = [*(r for r in self._rates if moment - r[0] < RATE_WINDOW_S), (moment, lane.tokens)]
        if self._life is not None and self._life.accept_length is not None:
            lane.accept_length = self._life.accept_length

    def _tokens_per_s(self) -> float:
        if len(self._rates) < 2:
            return 0.0
        (start, first), (end, last) = self._rates[0], self._rates[-1]
        return round((last - first) / (end - start), 1)

    def _apply(self, event: core.Event) -> None:
        before = self.server.state
        self.server, actions = step(self.server, event, self._clock.now())
        for action in actions:
            self._do(action)
        if self.server.percent >= WEIGHTS_LOADED or self.server.state not in (State.PENDING, State.STARTING):
            self.past_weights.set()
        if self.server.state is not before:
            if self.server.state is State.READY and self.lane is not None:
                self.job.pump.resume(self.lane)
            self._tell("state", f"{before} → {self.server.state}")
            self.job.changed()

    def _do(self, action: core.Action) -> None:
        match action:
            case core.Spawn(fresh_ports=fresh):
                self._start(fresh)
            case core.Watch():
                self._watch()
            case core.RunCanary():
                self._in_life(self._run_canary)
            case core.Admit():
                self._admit()
            case core.Withdraw():
                self._withdraw()
                if not self.server.owned:
                    self._end_life()  # nothing is asked of it while it is set aside
            case core.ProbeGeneration(after):
                self._in_life(lambda now_living: self._probe_generation(now_living, after))
            case core.Kill():
                self._end(0.0)
            case core.Terminate():
                self._end(self.grace_s)
            case core.Tell(text, failure):
                fix, lines = (failure.fix, failure.lines) if failure else ("", ())
                self.job.tell(Event(now(), "server", text, self.name, "warn" if failure else "info", fix, lines))

    def _tell(self, kind: str, text: str, level: str = "info") -> None:
        self.job.tell(Event(now(), kind, text, self.name, level))

    # -- lives -------------------------------------------------------------------------------------------------------
    def _start(self, fresh_ports: bool) -> None:
        """At once, or after the model was staged again, where its copy has been removed since."""
        if gone := self.job.staged.missing():
            assert self._tasks is not None
            self._tell("stage", f"{gone}: staging the model again", "warn")
            self._tasks.create_task(self._stage_and_spawn(fresh_ports, self.server.life))
        else:
            self._spawn(fresh_ports)

    async def _stage_and_spawn(self, fresh_ports: bool, life_number: int) -> None:
        def superseded() -> bool:
            return self.server.life != life_number or self.server.state is not State.STARTING

        def told(text: str) -> None:
            self._tell("stage", text)
            self.post(core.PhaseSeen("staging", 0.0))  # copying is no silence

        try:
            await asyncio.to_thread(self.job.staged.renew, from_thread(told), superseded)
        except StoppedError:
            return
        except PreflightError as error:
            self.post(core.Failed(Failure(FailureKind.CONFIG, f"its model cannot be staged again: {error}", error.fix)))
            return
        if not superseded():
            self._spawn(fresh_ports)

    def _spawn(self, fresh_ports: bool) -> None:
        try:
            if fresh_ports:
                self.ports = self._other_ports()
            spec, entry, process = life.spawn(self.job, self.place, self.ports, self._known_as)
        except OSError as error:
            self._known_as(None)
            cause = f"{error.filename or 'the engine'} cannot be started: {error.strerror}"
            kind = FailureKind.CONFIG if error.errno in _NO_PROGRAM else FailureKind.CRASH
            self.post(core.Failed(Failure(kind, cause, "see engine.python and engine.command")))
            return
        except (PluginError, PreflightError) as error:
            self.post(core.Failed(Failure(FailureKind.CONFIG, str(error), error.fix)))
            return
        self._known_as(entry)
        self._tell("launch", f"started as pid {entry.process.pid} on port {entry.port}, GPU {entry.gpu}")
        self._begin(Life(self.job, spec, entry, self.post, lambda: self.server.state, process))

    def _known_as(self, entry: ServerEntry | None) -> None:
        self.entry = entry
        self.job.changed()

    def _watch(self) -> None:
        nonce = self.entry.nonce if self.entry else ""
        spec = life.spec_for(self.job, self.place, self.ports, nonce)
        if self.entry is not None:
            self._tell("adopt", f"adopts pid {self.entry.process.pid} on port {self.entry.port}")
        self._begin(Life(self.job, spec, self.entry, self.post, lambda: self.server.state))

    def _begin(self, new: Life) -> None:
        assert self._tasks is not None
        self._end_life()
        self._probing = False
        self._life = new
        self._living = self._tasks.create_task(new.run(), name=f"server {self.name}")

    def _end_life(self) -> None:
        if self._living is not None:
            self._living.cancel()
            self._living = None

    def _in_life(self, work: Work) -> None:
        if self._life is not None and self._living is not None:
            self._life.do(work(self._life))

    @property
    def _capacity(self) -> tuple[int, str]:
        """Requests at once, and what limits them."""
        generation = self.job.config.generation
        info = self._life.info if self._life else ServerInfo()
        asked = generation.concurrency if isinstance(generation.concurrency, int) else None
        tokens = capacity.tokens_of_one(generation.max_tokens, info.context)
        wanted = capacity.in_flight(info.limits, asked, tokens)
        return min(wanted, (self.job.most_in_flight, "open files"))

    async def _run_canary(self, now_living: Life) -> None:
        result = await now_living.canary(self._capacity[0], self.server.timing.canary_timeout)
        if isinstance(result, Failure):
            # A server that dies under the canary breaks its connections first; its exit says more, and comes now.
            await asyncio.sleep(0.0 if result.kind is FailureKind.WRONG_MODE else EXIT_WAIT_S)
            self.post(core.Failed(result))
            return
        if result.warning:
            self._tell("canary", result.warning, "warn")
        if not now_living.counters:
            self._tell("canary", now_living.sight)
        self._passed = result
        self.post(core.CanaryPassed())

    async def _probe_generation(self, now_living: Life, after: float) -> None:
        if self._probing:
            return  # its result serves this doubt, too
        self._probing = True
        try:
            await asyncio.sleep(after)
            free = self._has_free_slot(now_living)
            error = await now_living.probe_generation()
        finally:
            self._probing = False
        if error is None:
            self.post(core.ProbePassed())
            return
        free = free or isinstance(error, GoneError)  # it never got as far as a slot
        self.post(core.ProbeFailed(Failure(FailureKind.HANG, str(error)), now_living.burning, free, now_living.sighted))

    def _has_free_slot(self, now_living: Life) -> bool:
        """As far as we know: others may use a server of someone else's, and its metrics may be old."""
        lane, load = self.lane, now_living.load
        if lane is None:
            return True
        slots = now_living.info.limits.running or lane.capacity
        if load is not None and load.queued:
            return False
        return max(lane.in_flight, load.running or 0 if load is not None else 0) < slots

    # -- the pump ----------------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        assert self._life is not None
        assert self._passed is not None
        width, limit = self._capacity
        self.lane = Lane(
            name=self.name,
            index=self.place.index,
            engine=self.job.engine,
            spec=self._life.spec,
            client=self._life.client,
            info=self._life.info,
            reading=self._passed.reading,
            capacity=width,
            on_trouble=self._trouble,
            streams=self._life.streams,
            accept_length=self._passed.accept_length,
        )
        self._answers, self._rates = 0, []
        self._tell("ready", f"ready for {width} requests at once, limited by {limit}")
        if unforeseen := capacity.surprise(self.job.forecast.limits, self._life.info.limits):
            self._tell("plan", f"not as planned: it says {unforeseen}", "warn")
        self.job.pump.open(self.lane)

    def _withdraw(self) -> None:
        self.job.pump.close(self.place.index)
        self.lane = None
        self._rates = []

    def _trouble(self, error: RequestError) -> None:
        """The pump met a failure that is the server's. Its exit may be on the way; else a small generation decides."""
        if isinstance(error, BrokenError) and self.job.engine.lost(error.body):
            lines = tuple(str(error).splitlines()[:2])
            self.post(core.Failed(Failure(FailureKind.CRASH, "it says that its engine is dead", "", lines)))
        elif not self.server.owned:
            self.post(core.Trouble(Failure(FailureKind.UNREACHABLE, str(error))))
        else:
            kind = FailureKind.HANG if isinstance(error, BusyError) else FailureKind.CRASH
            self.post(core.Trouble(Failure(kind, str(error))))

    # -- the end -----------------------------------------------------------------------------------------------------
    def _end(self, grace_s: float) -> None:
        assert self._tasks is not None
        self._end_life()
        self._tasks.create_task(self._end_group(self._life, grace_s))

    async def _end_group(self, ended: Life | None, grace_s: float) -> None:
        left = await ended.end(grace_s) if ended is not None else []
        if left:
            self._tell("leftover", f"cannot be ended: {', '.join(map(processes.describe, left))}", "error")
        else:
            self._known_as(None)  # what cannot be ended stays in state.json, for `down`
        self.post(core.Gone())

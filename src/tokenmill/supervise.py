"""One server's supervisor, through all its lives: feeds events into core/lifecycle and carries out what that decides.

Whether a server is ready, hung or to be restarted is never decided here; what happens in a life is life.py's to see.
"""

import asyncio
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from tokenmill import job as jobs
from tokenmill.attempt import Lane
from tokenmill.clocks import LOOK_S, Rate, WatchClock
from tokenmill.core import capacity, starts
from tokenmill.core import server as core
from tokenmill.core.lifecycle import STAGING, step, then
from tokenmill.core.server import Failure, FailureKind, Server, State, Timing
from tokenmill.core.status import ServerStatus, name_of
from tokenmill.ending import VERIFY_S, Ending
from tokenmill.engines.base import Spec
from tokenmill.errors import BrokenError, BusyError, PluginError, PreflightError, RequestError, StoppedError
from tokenmill.events import Event, from_thread, now
from tokenmill.folder import ServerEntry
from tokenmill.job import Job
from tokenmill.launch import Place
from tokenmill.life import Life
from tokenmill.machine import group, ports, shm, threads
from tokenmill.machine.threads import reading
from tokenmill.pacing import Pacing
from tokenmill.workmeter import WorkMeter

STOP_GRACE_S = 20.0
"""SIGTERM to SIGKILL."""

WEIGHTS_LOADED = 60.0
"""Percent at which every engine's phase table says that the weights are in memory."""

Work = Callable[[Life], Coroutine[None, None, None]]

_ORDERS = core.Launch | core.Adopt | core.Stop | core.Hold | core.Release | core.Tick
"""Events that are meant for the server, whichever life it is in."""


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
        moved: Callable[["Supervisor", State], bool],
        adopt: ServerEntry | None = None,
    ) -> None:
        fleet = job.config.fleet
        timing = Timing(
            start_timeout=fleet.start_timeout,
            stall_timeout=fleet.stall_timeout,
            suspect_timeout=10 * fleet.stall_timeout,
            canary_timeout=fleet.start_timeout,
            stop_timeout=STOP_GRACE_S + 3 * VERIFY_S,
            restarts_per_hour=fleet.restarts_per_hour,
            backoff=fleet.backoff,
            phases=job.engine.phase_limits,
        )
        self.job = job
        self.place = place
        self.ports = where
        self._other_ports = other_ports
        self._moved = moved
        self.entry = adopt
        self.server = Server(place.index, timing, owned=not job.config.engine.addresses)
        self.name = name_of(job.node, place.index)
        self.lane: Lane | None = None
        self.grace_s, self.verify_s = STOP_GRACE_S, VERIFY_S
        self.past_weights = asyncio.Event()
        self._inbox: asyncio.Queue[tuple[int, core.Event]] = asyncio.Queue()
        self._life: Life | None = None
        self._living: asyncio.Task[None] | None = None
        self._launching: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._answers = 0
        self._rate = Rate()
        self._work = WorkMeter(job.config.generation.calibrate or 0.0, adopt.peak if adopt else None)
        self._pacing = Pacing(job, self.name)
        self._left_alive = False
        self._tuned: dict[str, Any] = {}
        self._clock = WatchClock()

    def post(self, event: core.Event) -> None:
        self._inbox.put_nowait((self.server.life, event))

    async def hasten(self) -> None:
        """Its end is not waited for: what is being ended is killed, what will be ended gets no time for good order."""
        self.grace_s = 0.0
        if self.entry is not None and self.server.state not in core.LIVE | {State.PENDING}:
            known = self.entry.processes
            group.kill(tuple(await reading(lambda: group.look(known).living, ())))

    def leave(self) -> None:
        """Ends the supervision, and leaves the server running for the next tokenmill to adopt."""
        self._left_alive = True
        self.post(core.Tick())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            ticker = tasks.create_task(self._tick())
            try:
                while not self._left_alive and not (self.server.state in core.FINAL and self.server.gone):
                    life_number, event = await self._inbox.get()
                    if life_number == self.server.life or isinstance(event, _ORDERS):
                        self._apply(event)
            finally:
                ticker.cancel()
                if self._launching is not None:
                    self._launching.cancel()
                self._withdraw()
                self._end_life()
                if self.entry is not None and not self._left_alive and not self.server.gone:
                    # Nothing can be waited for, and no server survives a tokenmill that ends by a bug.
                    group.kill(tuple(group.look(self.entry.processes).living))

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
            tokens_per_s=self._rate.per_s,
            accept_length=lane.accept_length if lane else None,
            restarts=server.restarts,
            last_error=str(server.failure) if server.failure and server.state not in core.SERVING else "",
            eta_s=self._eta_s(),
            doing=self._life.doing if self._life is not None and server.state in core.LIVE else "",
            last_problem=str(server.failure or ""),
            work=self._work.work,
            peak=self._work.peak,
        )

    def _eta_s(self) -> float | None:
        server, elapsed_s = self.server, self._clock.seen - self.server.phase_since
        starting = server.state in core.LIVE - core.SERVING
        return starts.left_s(self.job.last_start.phases, server.phase, elapsed_s) if starting else None

    def accept_reports(self) -> list[float]:
        """The accept lengths that its log or its metrics told since the last call."""
        return self._life.sight.take_reports() if self._life is not None else []

    # -- the loop ----------------------------------------------------------------------------------------------------
    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._work.look(self.lane) and self.entry is not None:
                self._known_as(self.entry)
            if self.lane is not None:
                self._note_answers(self.lane)
            busy = bool(self.lane and self.lane.in_flight)
            life = self._life
            self.post(core.Tick(busy, life is not None and life.blind, life.said if life is not None else ""))

    def _note_answers(self, lane: Lane) -> None:
        if (came := lane.answers + lane.seen) != self._answers:
            self._answers = came
            self.post(core.Progress(strong=True))
        self._rate.note(lane.answered.tokens)
        if self._life is not None:
            self._pacing.look(lane, self._life.sight)
            if self._life.sight.accept_length is not None:
                lane.accept_length = self._life.sight.accept_length

    def _apply(self, event: core.Event) -> None:
        before = self.server.state
        if isinstance(event, core.Failed) and event.failure.restart is core.Restart.LESS_MEMORY:
            event = core.Failed(event.failure, self.job.tuning.lower(self._tuned))
        self.server, actions = step(self.server, event, self._clock.look())
        moment = self._clock.seen
        for action in actions:
            if not isinstance(action, core.Tell):
                self._do(action)
        if self.server.state is not before and self._moved(self, before):
            self.server, _ = step(self.server, core.Hold(), moment)
        for action in actions:
            if isinstance(action, core.Tell):
                self._say(action, moment)
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
                self._in_life(lambda now_living: now_living.run_canary(self.server.timing.canary_timeout, self._tell))
            case core.Admit():
                self._admit()
            case core.Withdraw(died):
                self._withdraw(died)
                if not self.server.owned:
                    self._end_life()  # nothing is asked of it while it is set aside
            case core.ProbeGeneration(after):
                self._in_life(lambda now_living: now_living.probe(after, lambda: self.lane))
            case core.Kill():
                self._end(0.0)
            case core.Terminate():
                self._end(self.grace_s)

    def _say(self, tell: core.Tell, moment: float) -> None:
        failure = tell.failure
        if failure is None:
            self._tell("server", tell.text)
        else:
            text = "; ".join(filter(None, (tell.text, then(self.server, moment))))
            self.job.tell(Event(now(), "server", text, self.name, "warn", failure.fix, failure.lines))

    def _tell(self, kind: str, text: str, level: str = "info") -> None:
        self.job.tell(Event(now(), kind, text, self.name, level))

    # -- lives -------------------------------------------------------------------------------------------------------
    def _start(self, fresh_ports: bool) -> None:
        assert self._tasks is not None
        self._life = None
        self._launching = self._tasks.create_task(self._launch(fresh_ports, self.server.life))

    async def _launch(self, fresh_ports: bool, life_number: int) -> None:
        """Starts the process, after the model was staged again where its copy has been removed since.

        A mount or a driver may hang meanwhile, and the server be stopped: what was decided then goes before.
        """

        def superseded() -> bool:
            return self._left_alive or self.server.life != life_number or self.server.state is not State.STARTING

        if gone := await reading(self.job.staged.missing, ""):
            self._tell("stage", f"{gone}: staging the model again", "warn")
            if not await self._stage_again(superseded):
                return
        cards, gpus, index = self.job.sensors.cards, self.place.gpus, self.place.index
        bases = await reading(lambda: cards.take(gpus, index), ())
        if superseded() or not self._spawn(fresh_ports, bases):
            cards.leave(gpus, index)

    async def _stage_again(self, superseded: Callable[[], bool]) -> bool:
        told = from_thread(lambda text: self._tell("stage", text))
        staging = asyncio.wrap_future(threads.ask(lambda: self.job.staged.renew(told, superseded)))
        while not staging.done():
            await asyncio.wait([staging], timeout=LOOK_S)
            if superseded():
                staging.cancel()
                return False
            self.post(core.PhaseSeen(STAGING, 0.0))  # copying is no silence, nor is waiting for another's copy
        try:
            staging.result()
        except StoppedError:
            return False
        except PreflightError as error:
            self.post(core.Failed(Failure(FailureKind.CONFIG, f"its model cannot be staged again: {error}", error.fix)))
            return False
        return True

    def _spawn(self, fresh_ports: bool, gpu_bases: tuple[int | None, ...]) -> bool:
        """Whether its process could be started."""
        try:
            if fresh_ports:
                self.ports = self._other_ports()
            self._tuned = dict(self.job.tuning.args)
            if words := shm.short(self.job.sensors.shm):
                self._tell("leftover", words, "warn")
            spec, entry, process = jobs.spawn(self.job, self.place, self.ports, gpu_bases, self._known_as)
        except (OSError, PluginError, PreflightError) as error:
            self._known_as(None)
            self.post(core.Failed(jobs.not_started(error)))
            return False
        self._known_as(entry)
        card = "without a GPU" if entry.gpu in ("none", "") else f"GPU {entry.gpu}"
        self._tell("launch", f"started as pid {entry.process.pid} on port {entry.port}, {card}")
        self._begin(spec, process)
        return True

    def _known_as(self, entry: ServerEntry | None) -> None:
        self.entry = replace(entry, peak=self._work.peak) if entry is not None else None
        self.job.changed()

    def _watch(self) -> None:
        nonce = self.entry.nonce if self.entry else ""
        spec = jobs.spec_for(self.job, self.place, self.ports, nonce)
        if self.entry is not None:
            self._tell(
                "adopt",
                f"adopts pid {self.entry.process.pid} on port {self.entry.port}: it runs since an earlier start",
            )
            self.job.sensors.cards.take(self.place.gpus, self.place.index, self.entry.gpu_bases)
        self._begin(spec)

    def _begin(self, spec: Spec, process: subprocess.Popen[bytes] | None = None) -> None:
        assert self._tasks is not None
        self._end_life()
        number = self.server.life

        def post(event: core.Event) -> None:
            self._inbox.put_nowait((number, event))  # not heard any more once the next life has begun

        new = Life(self.job, spec, self.entry, post, lambda: self.server.state, process, self._known_as)
        self._life = new
        self._living = self._tasks.create_task(new.run(), name=f"server {self.name}")

    def _end_life(self) -> None:
        if self._living is not None:
            self._living.cancel()
            self._living = None

    def _in_life(self, work: Work) -> None:
        if self._life is not None and self._living is not None:
            self._life.do(work(self._life))

    # -- the pump ----------------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        assert self._life is not None
        assert self._life.passed is not None
        width, limit = self._pacing.begin(self._life.info.limits, *self._life.capacity, self._life.sight)
        self.lane = Lane(
            name=self.name,
            index=self.place.index,
            engine=self.job.engine,
            spec=self._life.spec,
            client=self._life.client,
            info=self._life.info,
            reading=self._life.passed.reading,
            capacity=width,
            on_trouble=self._trouble,
            streams=self._life.sight.streams,
            accept_length=self._life.passed.accept_length,
            work=self._work.opens(width, adopted=self._life.adopted),
        )
        self._answers = 0
        self._rate.clear()
        took = starts.words(self.server.phases)
        how = f" after {self.server.since - self.server.started_at:.0f} s ({took})" if took else ""
        self._tell("ready", f"ready{how}: it takes {width} requests at once, limited by {limit}")
        if self.entry is not None and not self._life.adopted:
            self.job.last_start.keep(self.server.phases)
        if unforeseen := capacity.surprise(self.job.forecast.limits, self._life.info.limits):
            self._tell("plan", f"not as planned: it says {unforeseen}", "warn")
        self.job.pump.open(self.lane)

    def _withdraw(self, died: bool = False) -> None:
        self.job.pump.close(self.place.index, died=died)
        self._work.closes()
        self.lane = None
        self._rate.clear()

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
        ending = await ended.end(grace_s, self.verify_s) if ended is not None else Ending()
        for text, level in ((ending.left, "error"), (ending.others, "info"), (ending.cleaned, "info")):
            if text:
                self._tell("leftover", text, level)
        if not ending.pids and ended is self._life:
            self._known_as(None)  # what cannot be ended stays in state.json, for `down`
        self.post(core.Gone(ending.left if ending.pids or ending.memory else "", bool(ending.ports)))

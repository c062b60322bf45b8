"""One life of one server, from its start to its end: its process, its client, its log, and the signs that it works.

A life only reports: what it sees becomes events for core/lifecycle, which decides. All that it starts ends with `run`.
"""

import asyncio
import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from tokenmill import caches, launch
from tokenmill.canary import Canary, Passed
from tokenmill.client import Client
from tokenmill.clocks import LOOK_S
from tokenmill.config import Config
from tokenmill.core import server as core
from tokenmill.core import speculation
from tokenmill.core.capacity import Forecast
from tokenmill.core.server import Failure, FailureKind, State
from tokenmill.ending import VERIFY_S, Ending, Sensors, end_server, reading
from tokenmill.engines.base import Engine, Sampling, ServerInfo, Spec
from tokenmill.errors import BrokenError, PluginError, RequestError, boundary
from tokenmill.events import Event
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.generate import Pump
from tokenmill.launch import Place
from tokenmill.machine import group, logtail, ports, processes, reach
from tokenmill.machine.logtail import LogTail
from tokenmill.machine.processes import ProcessId
from tokenmill.render import Renderer
from tokenmill.signs import Signs
from tokenmill.staging.staged import Staged
from tokenmill.tuning import Tuning

METRICS_S = 2.0
"""How often a ready server's metrics are read."""

IDENTITY_TIMEOUT_S = 5.0
"""A page that needs no engine comes in milliseconds; a loaded Python server may hold its loop for seconds."""

HEALTH_TIMEOUT_S = 30.0
"""SGLang's own health check takes up to 20 s before it says no."""

ADDRESS_PATIENCE_S = 10.0
"""A server that runs already answers at once, or is said to be away."""

PROBE_TIMEOUT_S = 4.0
"""A small generation of a server in doubt: with it a hang is named within stall_timeout + 5 s."""


@dataclass(slots=True)
class LastStart:
    """The phases of the node's last whole start; `write` keeps them for the next tokenmill."""

    phases: tuple[tuple[str, float], ...]
    write: Callable[[tuple[tuple[str, float], ...]], None]

    def keep(self, phases: tuple[tuple[str, float], ...]) -> None:
        """A start has ended well."""
        self.phases = phases
        self.write(phases)


@dataclass(frozen=True, slots=True)
class Job:
    """What all servers of a node have in common.

    `model_files` is the fingerprint of what they load; `most_in_flight` is what open files allow each of them,
    `forecast` what each is expected to say of itself, `sensors` read the machine.
    """

    node: str
    config: Config
    folder: RunFolder
    engine: Engine
    staged: Staged
    python: str
    version: str
    model_files: str
    renderer: Renderer
    sampling: Sampling
    pump: Pump
    api_key: str
    most_in_flight: int
    tell: Callable[[Event], None]
    changed: Callable[[], None]
    last_start: LastStart
    tuning: Tuning
    forecast: Forecast = field(default_factory=Forecast)
    sensors: Sensors = field(default_factory=Sensors)


class Life:
    """`post` takes events; `state` tells what the server is taken for; no `entry`: it is someone else's server. `note`
    takes the entry anew when more is known by which its leftovers can be found.
    """

    def __init__(
        self,
        job: Job,
        spec: Spec,
        entry: ServerEntry | None,
        post: Callable[[core.Event], None],
        state: Callable[[], State],
        process: subprocess.Popen[bytes] | None = None,
        note: Callable[[ServerEntry], None] = lambda entry: None,
    ) -> None:
        self.job = job
        self.spec = spec
        self._signs = self._signs_of(entry, note, fresh=process is not None) if entry is not None else None
        self.info = ServerInfo()
        self._post = post
        self._state = state
        self._process = process
        addresses = job.config.engine.addresses
        self.address = addresses[spec.index] if addresses else f"http://{spec.host}:{spec.port}"
        self.client = Client(self.address, api_key=job.api_key)
        self._tail = LogTail(job.folder.log(spec.index), entry.log_start if entry else 0)
        self._tasks: asyncio.TaskGroup | None = None
        self._last_tokens: float | None = None
        self.accept_length: float | None = None
        self.accept_reports: list[float] = []
        self._logs_accept_length = False
        self._began = time.monotonic()
        self._silence = ""

    def _signs_of(self, entry: ServerEntry, note: Callable[[ServerEntry], None], *, fresh: bool) -> Signs:
        job = self.job
        tmp, stall_s = launch.tmp_folder(job.folder.path, entry.index), job.config.fleet.stall_timeout
        return Signs(entry, job.sensors, note, job.staged.path, tmp, stall_s, fresh=fresh)

    @property
    def entry(self) -> ServerEntry | None:
        return self._signs.entry if self._signs else None

    @property
    def burning(self) -> bool:
        """Whether its processes or cards were at work at the last look."""
        return self._signs is not None and self._signs.burning

    @property
    def doing(self) -> str:
        """What a server that says nothing does, in words; empty while its log or its answers tell."""
        return self._signs.doing(self._state()) if self._signs else ""

    async def run(self) -> None:
        """Watches exit, log and HTTP together until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self._signs is not None:
                    tasks.create_task(self._watch_exit(self._signs.entry.process))
                    tasks.create_task(self._watch_log())
                    tasks.create_task(self._signs.watch(self._post, self._state))
                tasks.create_task(self._probe())
        finally:
            self._tasks = None
            await self.client.close()

    def do(self, work: Coroutine[None, None, None]) -> None:
        """Work that ends with this life at the latest; dropped where the life has ended."""
        if self._tasks is None:
            work.close()
        else:
            self._tasks.create_task(self._sealed(work))

    async def _sealed(self, work: Coroutine[None, None, None]) -> None:
        with self._seam():
            await work

    @contextmanager
    def _seam(self) -> Iterator[None]:
        """Around what the engine decides: a plug-in's bug is this server's failure, not the run's end."""
        try:
            with boundary(f"engine {self.job.engine.kind}"):
                yield
        except PluginError as error:
            self._post(core.Failed(Failure(FailureKind.CRASH, str(error))))

    # -- its process and its log -------------------------------------------------------------------------------------
    async def _watch_exit(self, process: ProcessId) -> None:
        await processes.ended(process)
        await asyncio.sleep(LOOK_S)  # its last words may still be on the way to the file
        self._tail.read()
        code = self._process.wait() if self._process is not None else None
        with self._seam():
            # 600 long lines take seconds to be searched for all causes.
            failure = await asyncio.to_thread(self.job.engine.diagnose, self._tail.tail(), code)
            self._post(core.Failed(await self._explained(failure)))

    async def _explained(self, failure: Failure) -> Failure:
        """What a restart could not mend may be a mount that is away: then it is waited for."""
        if failure.restart is not core.Restart.NEVER:
            return failure
        needed = [Path(self.spec.python), *([self.job.staged.path] if self.job.staged.path else [])]
        away = await asyncio.to_thread(reach.unreadable, needed)
        return dataclasses.replace(failure, kind=FailureKind.STORAGE, cause=away, fix="") if away else failure

    async def _watch_log(self) -> None:
        last: tuple[str, float] = ("", 0.0)
        while True:
            lines = self._tail.read()
            if told := [length for line in lines if (length := speculation.told(line)) is not None]:
                self._logs_accept_length = True
                self.accept_reports += told
            with self._seam():
                for line in lines if self._state() in (State.STARTING, State.ANSWERING) else ():
                    phase = self.job.engine.phase(line, last[1])
                    if phase is not None and (phase.name, phase.percent) != last:
                        last = (phase.name, phase.percent)
                        self._post(core.PhaseSeen(phase.name, phase.percent))
            if lines and self._signs is not None:
                self._signs.spoke()
                self._post(core.Progress(strong=False))
            await asyncio.sleep(LOOK_S)

    # -- what it answers ---------------------------------------------------------------------------------------------
    async def _probe(self) -> None:
        """Asks what its state wants to know; what an answer means is the engine's to say."""
        while True:
            pause = LOOK_S
            with self._seam():
                match self._state():
                    case State.STARTING:
                        await self._probe_identity()
                    case State.ANSWERING:
                        await self._probe_health()
                    case State.READY | State.SUSPECT:
                        pause = METRICS_S
                        await self._probe_metrics()
                    case _:
                        pass
            await asyncio.sleep(pause)

    async def _ask(self, path: str, timeout_s: float) -> bytes | None:
        """A page, or None where the server does not give it (yet)."""
        try:
            return await self.client.get(path, timeout_s=timeout_s)
        except RequestError as error:
            self._silence = str(error)
            return None

    async def _probe_identity(self) -> None:
        page = await self._ask(self.job.engine.probes(self.spec).identity, IDENTITY_TIMEOUT_S)
        if page is None:
            self._note_silence()
            return
        stranger = self.job.engine.stranger(self.spec, page)
        if self.entry is None:
            failure = Failure(FailureKind.CONFIG, f"{self.address} is {stranger}", "see engine.addresses")
            self._post(core.Failed(failure) if stranger else core.Answered())
            return
        foreign, known = ports.listener(self.spec.port), self.entry.processes
        ours = await reading(lambda: {each.pid for each in group.look(known).living}, set[int]())
        holder = "" if foreign is None or foreign in ours else processes.describe(foreign)
        if stranger or holder:
            taken = f"port {self.spec.port} is taken by {holder or 'another process'}"
            cause = f"{taken}: {stranger}" if stranger else taken
            self._post(core.Failed(Failure(FailureKind.PORT, cause)))
        else:
            self._post(core.Answered())

    def _note_silence(self) -> None:
        """Somebody else's server that does not answer: no exit and no log will ever say why."""
        if self.entry is None and time.monotonic() - self._began > ADDRESS_PATIENCE_S:
            self._post(core.Failed(Failure(FailureKind.UNREACHABLE, self._silence, "see engine.addresses")))

    async def _probe_health(self) -> None:
        probes = self.job.engine.probes(self.spec)
        if await self._ask(probes.health, HEALTH_TIMEOUT_S) is None:
            return
        page = await self._ask(probes.info, HEALTH_TIMEOUT_S)
        if page is None:
            return
        log = logtail.head(self._tail.path, self.entry.log_start) if self.entry else ""
        try:
            self.info = self.job.engine.info(self.spec, page, log)
        except BrokenError as error:
            self._post(core.Failed(Failure(FailureKind.CRASH, f"{probes.info} cannot be read: {error}")))
            return
        self._post(core.Healthy())

    async def _probe_metrics(self) -> None:
        path = self.job.engine.probes(self.spec).metrics
        page = await self._ask(path, IDENTITY_TIMEOUT_S) if path else None
        if page is None:
            return
        load = self.job.engine.load(page.decode("utf-8", "replace"))
        if load.tokens is not None and load.tokens != self._last_tokens:
            self._last_tokens = load.tokens
            self._post(core.Progress(strong=True))
            if load.accept_length is not None and not self._logs_accept_length:
                self.accept_reports.append(load.accept_length)
        if load.accept_length is not None:
            self.accept_length = load.accept_length

    # -- real completions --------------------------------------------------------------------------------------------
    async def canary(self, width: int, timeout_s: float) -> Passed | Failure:
        return await self._canary(width, timeout_s).run()

    async def probe_generation(self) -> str:
        """A small generation over a connection of its own; empty where it came back, else what went wrong."""
        return await self._canary(1, PROBE_TIMEOUT_S).probe(PROBE_TIMEOUT_S)

    def _canary(self, width: int, timeout_s: float) -> Canary:
        job = self.job
        return Canary(job.engine, self.spec, self.client, self.info, job.renderer, job.sampling, width, timeout_s)

    # -- its end -----------------------------------------------------------------------------------------------------
    async def end(self, grace_s: float, verify_s: float = VERIFY_S) -> Ending:
        """Ends all its processes, removes its TMPDIR and what they left; says what did not come back."""
        ending = Ending()
        if self.entry is not None:
            folder, sensors = self.job.folder.path, self.job.sensors
            ending = await end_server(self.entry, folder, sensors, grace_s=grace_s, verify_s=verify_s)
        if self._process is not None:
            self._process.poll()  # reaps it
        return ending


def spawn(
    job: Job, place: Place, where: ports.Ports, announce: Callable[[ServerEntry], None]
) -> tuple[Spec, ServerEntry, subprocess.Popen[bytes]]:
    """Starts a server's process; raises OSError where its program cannot be run, PluginError.

    `announce` is told of it before it lives, by its nonce alone: killed in between, we would leave one behind that
    nobody knows of and that holds a GPU.
    """
    configured = spec_for(job, place, where, launch.new_nonce())
    spec = dataclasses.replace(configured, args={**configured.args, **job.tuning.args})
    with boundary(f"engine {job.engine.kind}"):
        command = job.engine.command(spec)
    tmp = launch.tmp_folder(job.folder.path, place.index)
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True, mode=0o700)
    cache = cache_folder(job, place)
    if job.engine.cache_variables:
        cache.mkdir(parents=True, exist_ok=True)
        cache.parent.touch()  # used now: pruned last
    env = launch.environment(job.config, place, job.engine, command, tmp, cache)
    log = job.folder.log(place.index)
    entry = ServerEntry(
        node=job.node,
        index=place.index,
        process=ProcessId(0, 0, processes.boot_id()),
        group=processes.NO_GROUP,
        port=spec.port,
        internal_port=spec.internal_port,
        gpu=place.label,
        nonce=spec.nonce,
        launch=launch.made_of(job.engine, configured, job.config, place, job.model_files),
        log_start=logtail.size(log),
        gpu_bases=job.sensors.cards.take(place.gpus, place.index),
    )
    announce(entry)
    try:
        process = processes.spawn(command.argv, env, log, spec.nonce, job.staged.descriptors)
    except OSError:
        job.sensors.cards.leave(place.gpus, place.index)
        raise
    # A process that is gone already has no start time: its watcher says so at once.
    identity = processes.identify(process.pid) or ProcessId(process.pid, 0, "")
    return spec, replace(entry, process=identity, group=process.pid), process


def cache_folder(job: Job, place: Place) -> Path:
    """Where the kernels lie that a server compiles."""
    args = spec_for(job, place, ports.Ports(0, 0), "").args
    return caches.folder_for(job.engine.kind, job.version, place.gpu_name, place.index, args)


def spec_for(job: Job, place: Place, where: ports.Ports, nonce: str) -> Spec:
    return launch.spec(job.config, place, where, nonce, model=job.staged.path, python=job.python, version=job.version)

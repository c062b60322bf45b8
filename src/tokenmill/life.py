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
from tokenmill.config import Config
from tokenmill.core import server as core
from tokenmill.core.capacity import Forecast
from tokenmill.core.server import Failure, FailureKind, State
from tokenmill.engines.base import Engine, Load, Sampling, ServerInfo, Spec
from tokenmill.errors import BadPromptError, BrokenError, PluginError, RequestError, boundary
from tokenmill.events import Event
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.generate import Pump
from tokenmill.launch import Place
from tokenmill.machine import logtail, ports, processes
from tokenmill.machine.logtail import LogTail
from tokenmill.machine.processes import ProcessId
from tokenmill.render import Renderer
from tokenmill.staging.staged import Staged

LOOK_S = 0.25
"""How often a server is looked at: a death must be known in less than 2 s."""

METRICS_S = 2.0
"""How often a ready server's metrics and processor time are read; oftener where the stall timeout is short."""

MEMBERS_S = 15.0
"""How often the members of its group are counted anew: that reads all of /proc."""

IDENTITY_TIMEOUT_S = 5.0
"""A page that needs no engine comes in milliseconds; a loaded Python server may hold its loop for seconds."""

HEALTH_TIMEOUT_S = 30.0
"""SGLang's own health check takes up to 20 s before it says no."""

ADDRESS_PATIENCE_S = 10.0
"""A server that runs already answers at once, or is said to be away."""

PROBE_TIMEOUT_S = 4.0
"""A small generation of a server in doubt: with it a hang is named within stall_timeout + 5 s."""

BURNING = 0.2
"""Share of a core that says that a server is at work: idle ones were seen at 0.02, compiling ones at 1 and more."""

VERIFY_S = 60.0
"""SIGKILL to given up: the driver tears a process down in seconds, not at once."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all servers of a node have in common. `most_in_flight` is what open files allow each of them, `forecast`
    what each is expected to say of itself."""

    node: str
    config: Config
    folder: RunFolder
    engine: Engine
    staged: Staged
    python: str
    version: str
    renderer: Renderer
    sampling: Sampling
    pump: Pump
    api_key: str
    most_in_flight: int
    tell: Callable[[Event], None]
    changed: Callable[[], None]
    forecast: Forecast = field(default_factory=Forecast)


class Life:
    """`post` takes events; `state` tells what the server is taken for; no `entry`: it is someone else's server.

    Its tokens are seen by `counters`, once its metrics page has shown that they move, or in answers that it `streams`;
    `load` is what that page last said. `sight` is in words which, empty until it was decided.
    """

    def __init__(
        self,
        job: Job,
        spec: Spec,
        entry: ServerEntry | None,
        post: Callable[[core.Event], None],
        state: Callable[[], State],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.job = job
        self.spec = spec
        self.entry = entry
        self.info = ServerInfo()
        self.burning = False
        self.counters = False
        self.streams = False
        self.sight = ""
        self.load: Load | None = None
        self._post = post
        self._state = state
        self._process = process
        addresses = job.config.engine.addresses
        self.address = addresses[spec.index] if addresses else f"http://{spec.host}:{spec.port}"
        self.client = Client(self.address, api_key=job.api_key)
        self._tail = LogTail(job.folder.log(spec.index), entry.log_start if entry else 0)
        self._tasks: asyncio.TaskGroup | None = None
        self._members: tuple[float, list[int]] = (0.0, [])
        self._cpu: tuple[float, float] = (0.0, 0.0)
        self._seen = self._last_seen = 0
        self.accept_length: float | None = None
        self._began = time.monotonic()
        self._silence = ""

    async def run(self) -> None:
        """Watches exit, log and HTTP together until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self.entry is not None:
                    tasks.create_task(self._watch_exit(self.entry.process))
                    tasks.create_task(self._watch_log())
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
            self._post(core.Failed(self.job.engine.diagnose(self._tail.tail(), code)))

    async def _watch_log(self) -> None:
        last: tuple[str, float] = ("", 0.0)
        while True:
            lines = self._tail.read()
            with self._seam():
                for line in lines if self._state() is State.STARTING else ():
                    phase = self.job.engine.phase(line)
                    if phase is not None and (phase.name, phase.percent) != last:
                        last = (phase.name, phase.percent)
                        self._post(core.PhaseSeen(phase.name, phase.percent))
            if lines or self._burns():
                self._post(core.Progress(strong=False))
            await asyncio.sleep(LOOK_S)

    def _burns(self) -> bool:
        """Whether its processes used processor time since the last reading."""
        moment = time.monotonic()
        if self.entry is None or moment - self._cpu[0] < METRICS_S:
            return False
        if moment - self._members[0] > MEMBERS_S:
            self._members = (moment, processes.members(self.entry.group))
        used = processes.cpu_seconds(self._members[1])
        last, self._cpu = self._cpu, (moment, used)
        self.burning = bool(last[0]) and (used - last[1]) / (moment - last[0]) > BURNING
        return self.burning

    # -- what it answers ---------------------------------------------------------------------------------------------
    async def _probe(self) -> None:
        """Asks what its state wants to know; what an answer means is the engine's to say."""
        while True:
            pause = LOOK_S
            self._note_seen()
            with self._seam():
                match self._state():
                    case State.STARTING:
                        await self._probe_identity()
                    case State.ANSWERING:
                        await self._probe_health()
                    case State.CANARY | State.READY | State.SUSPECT:
                        pause = min(METRICS_S, self.job.config.fleet.stall_timeout / 4)
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
        foreign = ports.listener(self.spec.port)
        ours = processes.members(self.entry.group, self.entry.nonce)
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
        await self._probe_metrics()
        self._post(core.Healthy())

    async def _probe_metrics(self) -> None:
        """A page may be as late as the stall timeout: llama.cpp's waits for the batch that is being computed."""
        path = "" if self.streams else self.job.engine.probes(self.spec).metrics
        patience_s = max(IDENTITY_TIMEOUT_S, self.job.config.fleet.stall_timeout)
        page = await self._ask(path, patience_s) if path else None
        if page is None:
            if self.load is not None:  # its slots may be free by now
                self.load = dataclasses.replace(self.load, running=None, queued=None)
            return
        last, self.load = self.load, self.job.engine.load(page.decode("utf-8", "replace"))
        if self.load.tokens is not None and last is not None and self.load.tokens != last.tokens:
            self.counters = True  # some pages never move
            self._post(core.Progress(strong=True))
        if self.load.accept_length is not None:
            self.accept_length = self.load.accept_length

    def _see(self) -> None:
        self._seen += 1

    def _note_seen(self) -> None:
        """Tokens that came in pieces, in the canary and in probes; the pump's are the supervisor's to note."""
        if self._seen != self._last_seen:
            self._last_seen = self._seen
            self._post(core.Progress(strong=True))

    @property
    def sighted(self) -> bool:
        """Whether this server's tokens are seen as they come."""
        return self.counters or self.streams

    @property
    def blind(self) -> bool:
        """Whether nothing at all would show that it works: no process of ours, no stream, no counter on its page."""
        return self.entry is None and not self.streams and (self.load is None or self.load.tokens is None)

    # -- real completions --------------------------------------------------------------------------------------------
    async def canary(self, width: int, timeout_s: float) -> Passed | Failure:
        """Streamed where there are no counters; where they did not move in the canary, from now on."""
        if self.load is None or self.load.tokens is None:
            await self._choose_sight(timeout_s)
        result = await self._canary(width, timeout_s).run()
        if not self.sight and isinstance(result, Passed):
            await self._choose_sight(timeout_s)
        return result

    async def _choose_sight(self, timeout_s: float) -> None:
        """How its tokens will be seen; decided once a life."""
        await self._probe_metrics()
        why_not = "" if self.counters else await self._canary(1, timeout_s).why_not_streamed(self._see)
        if not self.counters:
            await self._probe_metrics()  # SGLang's counters stand on the page after the first generation
        self.streams = not why_not and not self.counters
        if self.counters:
            self.sight = "its token counters move"
        elif self.streams:
            self.sight = "it has no token counters, so its answers are streamed"
        else:
            self.sight = f"its tokens are not seen: it has no counters, and {why_not}"

    async def probe_generation(self) -> RequestError | BadPromptError | None:
        """A small generation over a connection of its own; None where it came back, else what went wrong."""
        patience_s = min(PROBE_TIMEOUT_S, self.job.config.fleet.stall_timeout)
        return await self._canary(1, patience_s).probe(patience_s)

    def _canary(self, width: int, timeout_s: float) -> Canary:
        job = self.job
        seen = self._see if self.streams else None
        return Canary(job.engine, self.spec, self.client, self.info, job.renderer, job.sampling, width, timeout_s, seen)

    # -- its end -----------------------------------------------------------------------------------------------------
    async def end(self, grace_s: float) -> list[int]:
        """Ends its whole process group and removes its TMPDIR; returns pids that cannot be ended."""
        left: list[int] = []
        if self.entry is not None:
            left = await processes.end_group(self.entry.group, self.entry.nonce, grace_s=grace_s, verify_s=VERIFY_S)
            shutil.rmtree(launch.tmp_folder(self.job.folder.path, self.spec.index), ignore_errors=True)
        if self._process is not None:
            self._process.poll()  # reaps it
        return left


def spawn(
    job: Job, place: Place, where: ports.Ports, announce: Callable[[ServerEntry], None]
) -> tuple[Spec, ServerEntry, subprocess.Popen[bytes]]:
    """Starts a server's process; raises OSError where its program cannot be run, PluginError.

    `announce` is told of it before it lives, by its nonce alone: killed in between, we would leave one behind that
    nobody knows of and that holds a GPU.
    """
    spec = spec_for(job, place, where, launch.new_nonce())
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
        launch=launch.fingerprint(job.engine, spec, job.config, place),
        log_start=logtail.size(log),
    )
    announce(entry)
    process = processes.spawn(command.argv, env, log, spec.nonce, job.staged.descriptors)
    # A process that is gone already has no start time: its watcher says so at once.
    identity = processes.identify(process.pid) or ProcessId(process.pid, 0, "")
    return spec, replace(entry, process=identity, group=process.pid), process


def cache_folder(job: Job, place: Place) -> Path:
    """Where the kernels lie that a server compiles."""
    args = spec_for(job, place, ports.Ports(0, 0), "").args
    return caches.folder_for(job.engine.kind, job.version, place.gpu_name, place.index, args)


def spec_for(job: Job, place: Place, where: ports.Ports, nonce: str) -> Spec:
    return launch.spec(job.config, place, where, nonce, model=job.staged.path, python=job.python, version=job.version)

"""One life of one server, from its start to its end: its process, its client, its log, and the signs that it works.

A life only reports: what it sees becomes events for core/lifecycle, which decides. All that it starts ends with `run`.
"""

import asyncio
import dataclasses
import errno
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill import launch, occupied
from tokenmill.attempt import Lane
from tokenmill.canary import Canary, Passed
from tokenmill.client import Client
from tokenmill.clocks import LOOK_S
from tokenmill.core import capacity, speculation
from tokenmill.core import server as core
from tokenmill.core.server import Failure, FailureKind, State
from tokenmill.ending import VERIFY_S, Ending, end_server
from tokenmill.engines.base import ServerInfo, Spec
from tokenmill.errors import BadPromptError, BrokenError, GoneError, LateError, PluginError, RequestError, boundary
from tokenmill.folder import ServerEntry
from tokenmill.job import Job
from tokenmill.machine import group, logtail, ports, processes, reach
from tokenmill.machine.group import Group
from tokenmill.machine.logtail import LogTail
from tokenmill.machine.processes import ProcessId, Pulse
from tokenmill.machine.threads import reading
from tokenmill.sight import Sight
from tokenmill.signs import Signs

METRICS_S = 2.0
"""How often a ready server's metrics are read; oftener where the stall timeout is short."""

IDENTITY_TIMEOUT_S = 5.0
"""A page that needs no engine comes in milliseconds; a loaded Python server may hold its loop for seconds."""

HEALTH_TIMEOUT_S = 30.0
"""SGLang's own health check takes up to 20 s before it says no."""

ADDRESS_PATIENCE_S = 10.0
"""A server that runs already answers at once, or is said to be away."""

EXIT_WAIT_S = 3.0
"""SGLang's main process goes within seconds of its scheduler's crash, after it has written why."""

ADOPTED_WIDTH = 4
"""Canaries of a server that has served already: its kernels are compiled, and it must be back within 5 s."""

ODD_ANSWERS = 3
"""Pages of our own server that name another one, before they are believed."""

HOLDER_S = 2.0
"""Between two looks at who listens on a port that gives no page: each reads the descriptors of all processes."""

SAID = 200
"""Characters of a page's refusal that are shown."""

PROBE_TIMEOUT_S = 2.5
"""A small generation of a server in doubt. With it and the 2 s by which its last token may be seen late, a hang is told
within stall_timeout + 5 s; a server that is only slow works meanwhile, and is asked again."""


class Life:
    """`post` takes events; `state` tells what the server is taken for; no `entry`: it is someone else's server. `note`
    takes the entry anew when more is known by which its leftovers can be found.

    `sight`: how its tokens are seen; `passed`: its canary, once it has; `said`: what its pages said last in place of
    what was asked, in a line.
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
        self.passed: Passed | None = None
        self._probing = False
        self._post = post
        self._state = state
        self._process = process
        addresses = job.config.engine.addresses
        self.address = addresses[spec.index] if addresses else f"http://{spec.host}:{spec.port}"
        self._pulse = Pulse(entry.process) if entry is not None else None
        lives = self._pulse.beats if self._pulse is not None else lambda: True
        self.client = Client(self.address, api_key=job.api_key, lives=lives)
        self._tail = LogTail(job.folder.log(spec.index), entry.log_start if entry else 0)
        self._tasks: asyncio.TaskGroup | None = None
        self.sight = Sight(job.engine, job.engine.probes(spec).metrics, self._ask, post, job.config.fleet.stall_timeout)
        self._began = time.monotonic()
        self._silence = ""
        self._odd_answers = 0
        self._listens = self._accepted = False
        self._looked_at = float("-inf")
        self.said = ""

    def _signs_of(self, entry: ServerEntry, note: Callable[[ServerEntry], None], *, fresh: bool) -> Signs:
        job = self.job
        tmp, stall_s = launch.tmp_folder(job.folder.path, entry.index), job.config.fleet.stall_timeout
        return Signs(entry, job.sensors, note, job.staged.path, tmp, stall_s, fresh=fresh)

    @property
    def entry(self) -> ServerEntry | None:
        return self._signs.entry if self._signs else None

    @property
    def adopted(self) -> bool:
        """Whether an earlier tokenmill launched it."""
        return self.entry is not None and self._process is None

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
            if self._pulse is not None:
                self._pulse.close()
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
        """What a restart could not mend may be a mount that is away, what lacked memory a card that another has taken:
        then it is waited for."""
        if failure.restart is not core.Restart.NEVER:
            entry, cards = self.entry, self.job.sensors.cards
            if entry is None:
                return failure
            ours = {entry.process.pid, *(each.pid for each in entry.members)}
            told = lambda: occupied.explain(failure, ours, cards, entry.cards, entry.gpu_bases)  # noqa: E731
            return await reading(told, failure)
        needed = [Path(self.spec.python), *([self.job.staged.path] if self.job.staged.path else [])]
        away = await reading(lambda: reach.unreadable(needed), "")
        return dataclasses.replace(failure, kind=FailureKind.STORAGE, cause=away, fix="") if away else failure

    async def _watch_log(self) -> None:
        last: tuple[str, float] = ("", 0.0)
        while True:
            lines = self._tail.read()
            self.sight.read(lines)
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
            self.sight.note()
            with self._seam():
                match self._state():
                    case State.STARTING:
                        await self._probe_identity()
                    case State.ANSWERING:
                        await self._probe_health()
                    case State.CANARY | State.READY | State.SUSPECT:
                        pause = min(METRICS_S, self.job.config.fleet.stall_timeout / 4)
                        await self.sight.look()
                    case _:
                        pass
            await asyncio.sleep(pause)

    async def _ask(self, path: str, timeout_s: float) -> bytes | None:
        """A page, or None where the server does not give it (yet)."""
        try:
            return await self.client.get(path, timeout_s=timeout_s)
        except RequestError as error:
            self._silence = str(error)
            answered = error.__cause__ is None and not isinstance(error, LateError)  # with a status
            self._accepted = getattr(error.__cause__, "errno", None) != errno.ECONNREFUSED
            self.said = self._silence.partition("\n")[0][:SAID] if answered else ""
            return None

    async def _probe_identity(self) -> None:
        page = await self._ask(self.job.engine.probes(self.spec).identity, IDENTITY_TIMEOUT_S)
        if page is None and (self.entry is None or not self._may_be_taken()):
            self._note_silence()
            return
        stranger = "" if page is None else self.job.engine.stranger(self.spec, page)
        if self.entry is None:
            failure = Failure(FailureKind.CONFIG, f"{self.address} is {stranger}", "see engine.addresses")
            self._post(core.Failed(failure) if stranger else core.Answered())
            return
        port, own = self.spec.port, self.entry.processes
        holder = await reading(lambda: _holder(port, own), None)
        self._listens = holder == ""
        if holder or (stranger and holder is None):
            taken = f"port {self.spec.port} is taken by {holder or 'another process'}"
            cause = f"{taken}: {stranger}" if stranger else taken
            self._post(core.Failed(Failure(FailureKind.PORT, cause)))
        elif stranger:
            self._odd_answers += 1
            if self._odd_answers < ODD_ANSWERS:
                return  # whoever had the port before us may have given it
            page_name = self.job.engine.probes(self.spec).identity
            fix = f"curl http://{self.spec.host}:{self.spec.port}{page_name}   while it runs; see model.name"
            self._post(core.Failed(Failure(FailureKind.CONFIG, f"it answers as {stranger}", fix)))
        elif page is not None:
            self._post(core.Answered())

    def _may_be_taken(self) -> bool:
        """Whether a server that gives no page may not be ours: something listens on its port, and nobody has looked
        lately who it is. With that port it cannot succeed, and some engines would say nothing until they are ended."""
        now = time.monotonic()
        if self._listens or not self._accepted or now - self._looked_at < HOLDER_S:
            return False
        self._looked_at = now
        return True

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
        await self.sight.look()
        self._post(core.Healthy())

    @property
    def capacity(self) -> tuple[int, str]:
        """Requests at once, and what limits them."""
        generation = self.job.config.generation
        asked = generation.concurrency if isinstance(generation.concurrency, int) else None
        tokens = capacity.tokens_of_one(generation.max_tokens, self.info.context)
        wanted = capacity.in_flight(self.info.limits, asked, tokens)
        return min(wanted, (self.job.most_in_flight, "open files"))

    def has_free_slot(self, lane: Lane | None) -> bool:
        """As far as we know: others may use a server of someone else's, and its metrics may be old."""
        load = self.sight.load
        if lane is None:
            return True
        if load is not None and load.queued:
            return False
        running = load.running or 0 if load is not None else 0
        return max(lane.in_flight, running) < (self.info.limits.running or lane.capacity)

    @property
    def blind(self) -> bool:
        """Whether nothing at all would show that it works: no process of ours, no stream, no counter on its page."""
        return self.entry is None and not self.sight.streams and not self.sight.has_counters

    # -- real completions --------------------------------------------------------------------------------------------
    async def canary(self, timeout_s: float) -> Passed | Failure:
        """Streamed where there are no counters; where they did not move in the canary, from now on."""
        width = min(self.capacity[0], ADOPTED_WIDTH) if self.adopted else self.capacity[0]
        if not self.sight.has_counters:
            await self._choose_sight(timeout_s)
        result = await self._canary(width, timeout_s).run()
        if not self.sight.words and isinstance(result, Passed):
            await self._choose_sight(timeout_s)
        return result

    async def run_canary(self, timeout_s: float, tell: Callable[[str, str, str], None]) -> None:
        """Posts whether it passed; `tell` takes kind, text and level of what a person should know."""
        result = await self.canary(timeout_s)
        if isinstance(result, Failure):
            # A server that dies under the canary breaks its connections first; its exit says more, and comes now.
            await asyncio.sleep(0.0 if result.kind is FailureKind.WRONG_MODE else EXIT_WAIT_S)
            self._post(core.Failed(result))
            return
        for words in result.warnings:
            tell("canary", words, "warn")
        if asked := speculation.algorithm(self.spec.args):
            length = result.accept_length if result.accept_length is not None else self.sight.reported
            tell("canary", *speculation.first_words(asked, length))
        if not self.sight.counters:
            tell("canary", self.sight.words, "info")
        self.passed = result
        self._post(core.CanaryPassed())

    async def probe(self, after_s: float, lane: Callable[[], Lane | None]) -> None:
        """Posts whether a small generation came back; one at a time, whose result serves every doubt meanwhile."""
        if self._probing:
            return
        self._probing = True
        try:
            await asyncio.sleep(after_s)
            free = self.has_free_slot(lane())
            error = await self.probe_generation()
        finally:
            self._probing = False
        if error is None:
            self._post(core.ProbePassed())
            return
        free = free or isinstance(error, GoneError)  # it never got as far as a slot
        self._post(core.ProbeFailed(Failure(FailureKind.HANG, str(error)), self.burning, free, self.sight.sighted))

    async def _choose_sight(self, timeout_s: float) -> None:
        await self.sight.choose(lambda: self._canary(1, timeout_s).why_not_streamed(self.sight.see))

    async def probe_generation(self) -> RequestError | BadPromptError | None:
        """A small generation over a connection of its own; None where it came back, else what went wrong."""
        patience_s = min(PROBE_TIMEOUT_S, self.job.config.fleet.stall_timeout)
        return await self._canary(1, patience_s).probe(patience_s)

    def _canary(self, width: int, timeout_s: float) -> Canary:
        job = self.job
        seen = self.sight.see if self.sight.streams else None
        return Canary(job.engine, self.spec, self.client, self.info, job.renderer, job.sampling, width, timeout_s, seen)

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


def _holder(port: int, own: Group) -> str | None:
    """Who listens on a port: empty where it is one of a server's own processes, None where it cannot be seen."""
    holder = ports.listener(port)
    if holder is None:
        return None
    ours = any(each.pid == holder for each in group.look(own).living)
    return "" if ours else processes.describe(holder)

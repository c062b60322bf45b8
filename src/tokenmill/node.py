"""One machine's part of a run: it launches servers, watches them and generates with them over loopback.

Takes prompts against credits, gives back judged records (cluster/base.py). `run` is its life: all that it starts ends
with it, but for servers that are meant to be kept.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from tokenmill import caches, environment, launch, plugins
from tokenmill.attempt import Orders
from tokenmill.auditing import Auditor
from tokenmill.cluster.base import Results
from tokenmill.config import Config, rules_of
from tokenmill.core import server as core
from tokenmill.core.environment import Environment
from tokenmill.core.records import Prompt, Record
from tokenmill.core.status import NodeStatus
from tokenmill.engines.base import Engine
from tokenmill.errors import StoppedError, TokenmillError
from tokenmill.events import Event, from_thread, now
from tokenmill.fleet import Fleet
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.generate import Pump
from tokenmill.job import Job, LastStart, cache_folder, spec_for
from tokenmill.launch import Place
from tokenmill.leftovers import end_survivor, end_unadopted
from tokenmill.machine import gpus, modelfiles, nvml, ports, processes, threads
from tokenmill.planning import forecast as foretelling
from tokenmill.render import Renderer, renderer_for
from tokenmill.settings import sampling
from tokenmill.stage import stage
from tokenmill.staging.staged import Staged
from tokenmill.steps import Told
from tokenmill.supervise import Supervisor
from tokenmill.tuning import Tuning

OPEN_FILES = 65536
"""The limit we ask for: 16 servers with 256 requests each, many times over."""

OWN_FILES = 40
"""Files that a run has open for itself: logs, journal, lock, pidfds, probes."""

USUAL_IN_FLIGHT = 128
"""Few engines run more requests than this at once; below it a limit is worth a word."""

MOST_UNTAKEN = 64
"""Records that wait for the store. One of 30 KB takes 0.2 MB with its text, its ids and its line: a slow disk or
hundreds of answers at once would double the memory of a run."""

RESULTS_WAIT_S = 1.0
"""An empty answer after so long: whoever asks can look at credits and at the end meanwhile."""

WATCH_S = 0.25
"""Between two looks at the fleet as a whole."""


class LocalNode:
    """`entries` are the servers of an earlier tokenmill that still live: adopted where they were launched alike, else
    ended. `settings` is the id of the run's row in settings.jsonl."""

    def __init__(
        self, config: Config, folder: RunFolder, settings: str, entries: Sequence[ServerEntry], name: str = ""
    ) -> None:
        self.config = config
        self.name = name
        self.supervisors: list[Supervisor] = []
        self._fleet = Fleet(config, folder, self.supervisors, self._say)
        self.pump: Pump | None = None
        self._auditor: Auditor | None = None
        self._folder = folder
        self._settings = settings
        self._entries = entries
        self._renderer: Renderer | None = None
        self._records: list[Record] = []
        self._events: list[Event] = []
        self._something = asyncio.Event()
        self._room = asyncio.Semaphore(MOST_UNTAKEN)
        self._admitted = 0
        self._ended = False
        self._stopping = asyncio.Event()
        self._staged: Staged | None = None
        self._grace_s: float | None = None
        self._keep = False
        self._tokens = 0
        self._environment: Environment | None = None
        self._told: Told | None = None

    async def prepare(self) -> None:
        """Stages the model, loads the tokenizer, finds the places; raises PreflightError, StoppedError."""
        config = self.config
        engine: Engine = plugins.load("engines", config.engine.kind)()
        told = self._told = Told(from_thread(lambda text: self._say("stage", text)))
        ask = partial(threads.unless_stopped, self._stopping)  # whatever is read may lie on a mount that goes away
        staged = self._staged = await ask(lambda: stage(config, told, self._stopping.is_set))
        told.step = None
        model = staged.path
        version = await ask(lambda: launch.engine_version(config, engine))
        self._renderer = await ask(lambda: renderer_for(engine, model, config.generation.thinking))
        cards = gpus.choose(await nvml.answer(), config.gpus) if config.gpus != "none" else None
        self._environment = environment.look(config.engine.kind, version, cards or (), self.name)
        drawn = await ask(lambda: sampling(config, model))
        generation = config.generation
        orders = Orders(
            sampling=drawn,
            thinking=generation.thinking,
            rules=rules_of(config),
            settings=self._settings,
            attempts=generation.attempts,
            seed=generation.seed,
            timeout_s=None if generation.timeout == "auto" else generation.timeout,
            patience_s=config.fleet.stall_timeout,
            speller=self._renderer,
        )
        pump = self.pump = Pump(orders, self._renderer.render, self._deliver, room=self._admit)
        self._auditor = await ask(lambda: Auditor(config, pump, self.supervisors, self._tell))
        places, bad = launch.without(launch.places(config, cards), cards or (), config.fleet.min_ready)
        for card, why in bad.items():
            self._say("gpus", f"{card} is left out: {why}", "warn", "nvidia-smi -q")
        if engine.cache_variables:
            await ask(lambda: caches.prune(caches.root()))
        # A key read from a file ends with a newline, and no header may hold one.
        key = os.environ.get(config.engine.api_key_env, "").strip() if config.engine.api_key_env else ""
        job = Job(
            node=self.name,
            config=config,
            folder=self._folder,
            engine=engine,
            staged=staged,
            python=launch.python_of(config),
            version=version,
            model_files=await ask(lambda: modelfiles.fingerprint(model)) if model is not None else "",
            renderer=self._renderer,
            sampling=drawn,
            pump=self.pump,
            api_key=key,
            most_in_flight=self._most_in_flight(len(places)),
            tell=self._tell,
            changed=self._write_state,
            last_start=LastStart(self._folder.state().start, self._keep_start),
            tuning=Tuning(engine, config.engine.args),
            forecast=await ask(lambda: foretelling.forecast(engine, foretelling.given(config, cards, version, model))),
        )
        self._recall(job, places[0])
        adopted = await self._adoptable(job, places)
        for place, where in zip(places, self._ports(places, adopted), strict=True):
            adopt = adopted.get(place.index)
            self.supervisors.append(Supervisor(job, place, where, self._other_ports, self._fleet.moved, adopt))

    def _most_in_flight(self, servers: int) -> int:
        """What open files allow each server: a request in flight is a connection."""
        allowed = processes.raise_open_files(OPEN_FILES)
        most = max(1, (allowed - OWN_FILES) // servers)
        asked = self.config.generation.concurrency
        if most < (asked if isinstance(asked, int) else USUAL_IN_FLIGHT):
            words = f"only {allowed} files may be open: at most {most} requests in flight at each server"
            self._say("node", words, "warn", "ulimit -n 65536")
        return most

    async def _adoptable(self, job: Job, places: list[Place]) -> dict[int, ServerEntry]:
        """The living servers that were launched as we would launch them now; the others are ended."""
        by_index = {place.index: place for place in places}
        adopted: dict[int, ServerEntry] = {}
        for entry in self._entries:
            place = by_index.get(entry.index)
            why = "" if processes.alive(entry.process) else "its main process is dead or not known"
            if place is None:
                why = why or "this run has no such server"
            elif not why:
                spec = spec_for(job, place, ports.Ports(entry.port, entry.internal_port), entry.nonce)
                parts = launch.made_of(job.engine, spec, self.config, place, job.model_files)
                if not entry.launch:
                    why = "state.json does not know it"
                elif changed := launch.unlike(parts, entry.launch):
                    why = f"it was launched with another {changed}"
            if why:
                self._say("leftover", f"server {entry.index}, pid {entry.process.pid}, is ended: {why}")
                ending = await end_survivor(self._folder, entry)
                if ending.left:
                    self._say("leftover", f"server {entry.index}: {ending.left}", "error")
            else:
                adopted[entry.index] = entry
        return adopted

    def _ports(self, places: list[Place], adopted: Mapping[int, ServerEntry]) -> list[ports.Ports]:
        """An adopted server keeps its ports; the others get blocks beside those."""
        if self.config.engine.addresses:
            return [ports.Ports(0, 0) for _ in places]
        kept = {index: ports.Ports(entry.port, entry.internal_port) for index, entry in adopted.items()}
        taken = frozenset(port for where in kept.values() for port in ports.taken(where))
        fresh = iter(ports.assign(self.config.fleet.port, len(places) - len(kept), taken))
        return [kept[place.index] if place.index in kept else next(fresh) for place in places]

    def _other_ports(self) -> ports.Ports:
        """A block that no server of ours has: one that still loads has not bound its own. Raises PreflightError."""
        taken = frozenset(port for supervisor in self.supervisors for port in ports.taken(supervisor.ports))
        return ports.assign(self.config.fleet.port, 1, taken)[0]

    # -- the seam ----------------------------------------------------------------------------------------------------
    async def credits(self) -> int:
        return self._credits()

    def _credits(self) -> int:
        return self.pump.credits() if self.pump and self._fleet.serves and not self._stopping.is_set() else 0

    async def offer(self, prompts: list[Prompt]) -> None:
        assert self.pump is not None, "prompts come against credits, and there were none"
        self.pump.offer(prompts)

    async def results(self) -> Results:
        if not self._records and not self._events and not self._ended:
            self._something.clear()
            try:
                async with asyncio.timeout(RESULTS_WAIT_S):
                    await self._something.wait()
            except TimeoutError:
                pass
        records, self._records = self._records, []
        for _ in range(self._admitted):
            self._room.release()
        self._admitted = 0
        events, self._events = self._events, []
        rendering = self._renderer.rendering if self._renderer else None
        ended = self._ended and not records and not events
        again = self._auditor.take_again() if self._auditor else ()
        capacity = self.pump.capacity if self.pump else 0
        return Results(records, events, self._credits(), rendering, ended, again, capacity)

    async def status(self) -> NodeStatus:
        return NodeStatus(
            node=self.name,
            servers=tuple(supervisor.status() for supervisor in self.supervisors),
            queued=self.pump.queued if self.pump else 0,
            in_flight=self.pump.in_flight if self.pump else 0,
            capacity=self.pump.capacity if self.pump else 0,
            credits=self._credits(),
            tokens=self._tokens,
            findings=self._auditor.findings if self._auditor else (),
            step=self._told.step if self._told else None,
            environment=self._environment,
            state="draining" if self._stopping.is_set() else "",
        )

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        hasten = self._stopping.is_set() and grace_s == 0.0 and not keep
        self._grace_s, self._keep = grace_s, keep
        if self.pump is not None:
            self.pump.drain()
        self._stopping.set()
        if hasten:
            await asyncio.gather(*(supervisor.hasten() for supervisor in self.supervisors))

    # -- its life ----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Raises NoServerError where no server can be kept, GateError where all show the wrong mode."""
        trouble: TokenmillError | None = None
        try:
            try:
                await self.prepare()
            except StoppedError as error:
                self._say("stage", str(error), "warn")
                if not self._keep:
                    self._entries = await end_unadopted(self._folder, self._entries, self._say, self._grace_s)
                return
            self._fleet.begins()
            async with asyncio.TaskGroup() as tasks:
                for supervisor in self.supervisors:
                    tasks.create_task(supervisor.run())
                launching = tasks.create_task(self._launch())
                try:
                    await self._until_stopped()
                except TokenmillError as error:
                    trouble = error  # raised once the servers are gone: a group that raises would cut their end short
                launching.cancel()
                self._end_servers()
        finally:
            self._ended = True
            self._write_state()
            self._something.set()
            if self._staged is not None:
                self._staged.close()
        if trouble is not None:
            raise trouble

    async def _until_stopped(self) -> None:
        """Watches the fleet as a whole until it is told to stop and what is in flight has ended or its time is over."""
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._stopping.wait()
            except TimeoutError:
                self._look()
        asked_at = time.monotonic()
        while self.pump is not None and self.pump.in_flight:
            if self._grace_s is not None and time.monotonic() - asked_at >= self._grace_s:
                return
            await asyncio.sleep(0.05)
            self._look()

    def _look(self) -> None:
        if self.pump is not None:
            self.pump.look()
        if self._auditor is not None:
            self._auditor.tick()
        self._fleet.look()

    def _end_servers(self) -> None:
        for supervisor in self.supervisors:
            state = supervisor.server.state
            unadopted = state is core.State.PENDING and supervisor.entry is not None  # it lives all the same
            if self._keep and (unadopted or state in core.LIVE):
                supervisor.leave()
                continue
            if unadopted:
                supervisor.post(core.Adopt())  # what was not adopted could not be ended
            supervisor.post(core.Stop())

    # -- launching ---------------------------------------------------------------------------------------------------
    async def _launch(self) -> None:
        """Adopts what lives, then starts the rest as `stagger` says: the first warms the page cache for the others."""
        waiting = [supervisor for supervisor in self.supervisors if supervisor.entry is None]
        for supervisor in self.supervisors:
            if supervisor.entry is not None:
                supervisor.post(core.Adopt())
        stagger = self.config.fleet.stagger
        for position, supervisor in enumerate(waiting):
            if supervisor.job.engine.cache_variables:
                folder = cache_folder(supervisor.job, supervisor.place)
                await asyncio.wrap_future(threads.ask(partial(caches.seed, folder)))
            supervisor.post(core.Launch())
            if position + 1 < len(waiting):
                if stagger == "first":
                    if position == 0:
                        await supervisor.past_weights.wait()
                elif stagger != "off":
                    await asyncio.sleep(float(stagger))

    # -- what comes from below ---------------------------------------------------------------------------------------
    def _deliver(self, record: Record) -> None:
        self._tokens += record.output_tokens
        if self._auditor is not None and not self._auditor.keep(record):
            return
        self._records.append(record)
        self._something.set()

    async def _admit(self) -> None:
        """Waits for room for one more record; what is admitted has its record before anything else happens, or none."""
        await self._room.acquire()
        self._admitted += 1

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._something.set()

    def _say(self, kind: str, text: str, level: str = "info", fix: str = "") -> None:
        self._tell(Event(now(), kind, text, "", level, fix, node=self.name))

    def _recall(self, job: Job, place: Place) -> None:
        """What an earlier start had to lower holds on, as long as the config asks for the same launch."""
        state = self._folder.state()

        def parts() -> dict[str, str]:
            nowhere = replace(place, index=0, gpus=())
            spec = spec_for(job, nowhere, ports.Ports(0, 0), "")
            return launch.made_of(job.engine, spec, self.config, nowhere, job.model_files)

        def keep(changed: dict[str, Any]) -> None:
            self._kept("what was lowered", lambda: self._folder.write_changed(changed, parts()))

        job.tuning.recall(state.changed if state.changed and state.changed_from == parts() else {}, keep)

    def _keep_start(self, phases: tuple[tuple[str, float], ...]) -> None:
        self._kept("the time of a start", lambda: self._folder.write_start(phases))

    def _kept(self, what: str, write: Callable[[], None]) -> None:
        """A full disk must not end the node: its answers may yet be stored, and the store says it aloud."""
        try:
            write()
        except OSError as error:
            self._say("node", f"{what} cannot be written into state.json: {error.strerror}", "warn")

    def _write_state(self) -> None:
        """So that whatever happens to us, the servers can be found again."""
        entries = tuple(
            structs.replace(entry, state=server.state.value, phase=server.phase)
            if server.state is not core.State.PENDING  # not adopted yet: as it was left
            else entry
            for entry, server in ((supervisor.entry, supervisor.server) for supervisor in self.supervisors)
            if entry is not None
        )
        if not self.supervisors:
            entries = tuple(self._entries)  # not prepared, or it failed: they live on, and must be found again
        self._kept("where the servers are", lambda: self._folder.write_servers(entries, keep=self._keep))

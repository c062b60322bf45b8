"""One life of one server, with a real process and without a run: what it does and says, and what its end leaves."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill import configfile, plugins
from tokenmill import job as jobs
from tokenmill.attempt import Orders
from tokenmill.core import server as core
from tokenmill.core.judge import Rules
from tokenmill.core.server import Failure, State
from tokenmill.ending import Ending, Sensors
from tokenmill.engines.base import Sampling
from tokenmill.events import Event
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.generate import Pump
from tokenmill.job import Job, LastStart
from tokenmill.launch import Place
from tokenmill.life import Life
from tokenmill.machine import group, ports
from tokenmill.render import renderer_for
from tokenmill.staging.staged import Staged
from tokenmill.tuning import Tuning


def job(folder: Path, command: Sequence[str], model: Path | None = None, sensors: Sensors | None = None) -> Job:
    """What a node has for its servers, which are any program."""
    return job_of(folder, {"kind": "openai", "command": list(command)}, model=model, sensors=sensors)


def job_of(
    folder: Path,
    engine: dict[str, Any],
    *,
    generation: dict[str, Any] | None = None,
    fleet: dict[str, Any] | None = None,
    model: Path | None = None,
    sensors: Sensors | None = None,
    tell: Callable[[Event], None] = lambda event: None,
) -> Job:
    """What a node has for its servers, by these tables of the config. Nothing is changed on this machine's /dev/shm."""
    data: dict[str, Any] = {
        "model": {"name": "m", "path": "" if engine["kind"] == "openai" else "/m"},
        "prompts": {"path": "p"},
        "engine": engine,
        "generation": generation or {},
        "fleet": fleet or {},
    }
    config, made = configfile.validate(data, "test"), plugins.load("engines", engine["kind"])()
    renderer, sampling = renderer_for(made, None, True), Sampling(100)
    run = RunFolder(folder / "run")
    run.create()
    (folder / "shm").mkdir(exist_ok=True)
    return Job(
        node="",
        config=config,
        folder=run,
        engine=made,
        staged=Staged(model),
        python=sys.executable,
        version="",
        model_files="",
        renderer=renderer,
        sampling=sampling,
        pump=Pump(Orders(sampling, True, Rules(), "s"), renderer.render, lambda record: None),
        api_key="",
        most_in_flight=1_000,
        tell=tell,
        changed=lambda: None,
        last_start=LastStart((), lambda phases: None),
        tuning=Tuning(made, {}),
        sensors=sensors or Sensors(shm=folder / "shm"),
    )


@dataclass
class Living:
    """A life that runs. `state` is what it is taken for, `progressed` counts its signs of work."""

    life: Life
    entry: ServerEntry
    state: State = State.STARTING
    progressed: int = 0
    failures: list[Failure] = field(default_factory=list)

    def post(self, event: core.Event) -> None:
        match event:
            case core.Progress():
                self.progressed += 1
            case core.Failed(failure):
                self.failures.append(failure)

    @property
    def doing(self) -> str:
        return self.life.doing

    async def until(self, what: Callable[[], object], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, f"{self.doing!r}, {self.entry}, {self.failures}"
            await asyncio.sleep(0.02)

    async def end(self, grace_s: float = 5.0, verify_s: float = 5.0) -> Ending:
        return await self.life.end(grace_s, verify_s)


@asynccontextmanager
async def begun(of: Job, port: int, gpus: tuple[int, ...] = ()) -> AsyncIterator[Living]:
    """Its process, and the life that watches it, for the scope; whatever it leaves is ended."""
    where = ports.Ports(port, ports.assign(port, 1)[0].internal)
    bases = of.sensors.cards.take(gpus, 0)
    spec, entry, process = jobs.spawn(of, Place(0, gpus), where, bases, lambda known: None)

    def noted(entry: ServerEntry) -> None:
        found.entry = entry

    watched = Life(of, spec, entry, lambda event: found.post(event), lambda: found.state, process, noted)
    found = Living(watched, entry)
    watching = asyncio.create_task(watched.run())
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        group.kill(tuple(group.look(found.entry.processes).living))
        process.wait()

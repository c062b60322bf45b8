"""One server's supervisor where a run shows it too seldom: a model that is staged again, and an end meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests import living
from tokenmill.core import server as core
from tokenmill.core.server import State
from tokenmill.launch import Place
from tokenmill.machine import ports
from tokenmill.staging.staged import Staged
from tokenmill.supervise import Supervisor

WAIT_S = 10.0


@dataclass
class Scene:
    """A supervisor whose model has vanished; `staged` lets it come back, in a thread that hangs until then."""

    supervisor: Supervisor
    staged: threading.Event
    running: "asyncio.Task[None]"

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not what():  # noqa: ASYNC110 the state is the supervisor's
                await asyncio.sleep(0.02)

    async def ends(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.running


@asynccontextmanager
async def staging(folder: Path, port: int) -> AsyncIterator[Scene]:
    staged, again = threading.Event(), Staged(None)

    def stage(tell: object, halted: object) -> Staged:
        staged.wait()
        return again

    of = replace(
        living.job_of(folder, {"kind": "fake"}, fleet={"stall_timeout": 1.0}),
        staged=Staged(None, copy=folder / "vanished", again=stage),
    )
    where = ports.Ports(port, 0)
    supervisor = Supervisor(of, Place(0, ()), where, lambda: where, lambda *moved: False)
    scene = Scene(supervisor, staged, asyncio.create_task(supervisor.run()))
    supervisor.post(core.Launch())
    try:
        await scene.until(lambda: supervisor.server.phase == "staging")
        yield scene
    finally:
        staged.set()
        scene.running.cancel()
        await asyncio.wait([scene.running])


def test_a_model_that_is_staged_again_is_no_silence(tmp_path: Path, port: int) -> None:
    async def play() -> None:
        async with staging(tmp_path, port) as scene:
            await asyncio.sleep(2.0)
            assert (scene.supervisor.server.state, scene.supervisor.server.life) == (State.STARTING, 1)
            scene.staged.set()
            await scene.until(lambda: scene.supervisor.entry)
            scene.supervisor.post(core.Stop())
            await scene.ends()

    asyncio.run(play())


def test_who_leaves_or_stops_does_not_wait_for_a_copy_that_hangs(tmp_path: Path, port: int) -> None:
    async def play(stop: Callable[[Supervisor], None]) -> None:
        async with staging(tmp_path, port) as scene:
            stop(scene.supervisor)
            await scene.ends()
            scene.staged.set()
            await asyncio.sleep(0.1)
            assert scene.supervisor.entry is None

    asyncio.run(play(lambda supervisor: supervisor.leave()))
    asyncio.run(play(lambda supervisor: supervisor.post(core.Stop())))

"""What Ray runs on a machine: an outpost in an actor's event loop. A detached actor ends only by itself."""

import asyncio
import os
import threading

from tokenmill.outpost import Outpost

BEGIN_S = 300.0
"""Until an actor answers its head: Ray starts a process for it, and may have to wait for the machine's GPUs."""


class Post(Outpost):
    """Its process ends where it is deserted, and where no head begins it: one that left while Ray made the actor."""

    def __init__(self) -> None:
        super().__init__()
        self._unbegun = threading.Timer(BEGIN_S, os._exit, (0,))
        self._unbegun.daemon = True
        self._unbegun.start()

    async def begin(self, order: bytes) -> None:
        self._unbegun.cancel()
        await super().begin(order)
        asyncio.get_running_loop().create_task(self._leave(), name="leave")

    async def _leave(self) -> None:
        await self.deserted.wait()
        os._exit(0)

"""What Ray runs on a machine: an outpost in an actor's event loop. A detached actor ends only by itself."""

import asyncio
import os
import threading

import msgspec

from tokenmill.config import Config
from tokenmill.outpost import Order, Outpost, folder_of
from tokenmill.sentry import Sentry

BEGIN_S = 300.0
"""Until a head begins its actor once Ray has started it: one that lives does so at once."""


class Post(Outpost):
    """Its process ends where it is deserted, and where no head begins it: one that left while Ray made the actor. Its
    servers end where Ray, or a machine short of memory, ends the process and no other comes."""

    def __init__(self, begin_s: float = BEGIN_S) -> None:
        super().__init__()
        self._sentry: Sentry | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._unbegun = threading.Timer(begin_s, os._exit, (0,))
        self._unbegun.daemon = True
        self._unbegun.start()

    async def begin(self, order: bytes) -> bytes | None:
        refused = await super().begin(order)
        if refused is None:
            self._unbegun.cancel()
            self._post_sentry(msgspec.json.decode(order, type=Order))
            self._leaving = self._leaving or asyncio.create_task(self._leave(), name="leave")
        return refused

    def _post_sentry(self, order: Order) -> None:
        config = Config.model_validate_json(order.config)
        earlier, self._sentry = self._sentry, Sentry(folder_of(config, order.node).path, config.fleet.wait_for_head)
        if earlier is not None:
            earlier.dismiss()

    async def _leave(self) -> None:
        await self.deserted.wait()
        os._exit(0)

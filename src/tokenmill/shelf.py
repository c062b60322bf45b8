"""Records on their way into the store, whatever its disk does: written, or kept for as long as was told.

What a failed write left behind goes with the next one, in order. Nothing is passed on as written that is not, and the
row of the settings that a record was made with stands before it.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill import settings
from tokenmill.core.records import Record
from tokenmill.core.rendering import Rendering
from tokenmill.errors import StoreError, TokenmillError, VanishedError
from tokenmill.events import EventLog
from tokenmill.resume import Accounts
from tokenmill.store import Store

STORE_PATIENCE_S = 60.0
"""How long answers are kept in memory for a store that cannot be written: time to free some room."""


class Shelf:
    """`written` is told of records once they are stored. `renderings` are those that servers have shown; the first is
    of the settings' row."""

    def __init__(
        self,
        accounts: Accounts,
        store: Store,
        data: Path,
        log: EventLog,
        patience_s: float,
        written: Callable[[list[Record]], None],
    ) -> None:
        self.renderings: list[Rendering] = []
        self._accounts = accounts
        self._store = store
        self._data = data
        self._log = log
        self._patience_s = patience_s
        self._written = written
        self._deadline = 0.0
        self._settings_kept: list[Rendering] | None = None
        self._storing = asyncio.Lock()
        """One batch at a time is written: what a failed write left behind goes with the next."""

    @property
    def is_over(self) -> bool:
        """Whether there was a failed write, and the patience that began with it is at its end."""
        return bool(self._deadline) and time.monotonic() > self._deadline

    async def keep(self, records: list[Record]) -> None:
        """Writes these records and what a failed write left behind. Raises StoreError: all of them wait for the next
        call then. The first is told, and the patience begins with it."""
        try:
            async with self._storing:
                await self._append(records)
        except VanishedError:
            raise
        except StoreError as error:
            if not self._deadline:
                self._deadline = time.monotonic() + self._patience_s
                words = f"cannot write: {error}; no new prompts; retrying for {self._patience_s:.0f} s"
                self._log.say("store", words, "error", error.fix)
            raise

    async def pause(self) -> None:
        """Between a failed write and the next."""
        await asyncio.sleep(min(1.0, self._patience_s / 10))

    async def write_the_rest(self, failure: TokenmillError | None) -> TokenmillError | None:
        """Every answer is in: writes what a failed write left behind, until the patience is over. Returns what ended
        the run: what did before, or what became of the answers."""
        while self._store.unsaved:
            try:
                await self.keep([])
            except VanishedError as error:
                return error
            except StoreError as error:
                if self.is_over:
                    return self._story(error, len(self._store.unsaved))
                await self.pause()
        if isinstance(failure, StoreError) and not isinstance(failure, VanishedError):
            return self._story(failure, 0)
        return failure

    async def _append(self, records: list[Record]) -> None:
        """A StoreError leaves all of them in the store's `unsaved`."""
        waiting, self._store.unsaved = [*self._store.unsaved, *records], []
        if not waiting:
            return
        try:
            self._keep_settings()
        except OSError as error:
            self._store.unsaved = waiting
            raise StoreError(f"{self._data}: {error.strerror}", fix=f"df -h {self._data}") from error
        await self._store.append(waiting)
        self._written(waiting)

    def _keep_settings(self) -> None:
        """The settings' row stands before the first record made with it. By then its rendering is known, unless the
        record is of an earlier life, and no server has rendered in this one."""
        first = self.renderings[:1]
        if first != self._settings_kept:
            row = self._accounts.row
            settings.keep(self._data, settings.complete(row, first[0]) if first else row)
            self._settings_kept = first

    def _story(self, error: StoreError, lost: int) -> StoreError:
        safe = f"{self._accounts.ledger.counts().done:,} records are safe"
        end = (
            f"{lost:,} answers could not be stored and are lost"
            if lost
            else "every answer in flight was stored in the end"
        )
        return StoreError(f"results could not be stored: {error}; {safe}; {end}", fix=error.fix)

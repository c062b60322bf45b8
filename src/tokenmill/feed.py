"""The prompts of a run in order of dispatch, as a stream: the first cohort spread over the whole set, then the rest.

Reading happens in one worker thread, a batch ahead; rows that cannot be used come out as failed records.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from pathlib import Path

import numpy as np

from tokenmill import prompts
from tokenmill.core.records import NULL, Prompt, Record, failed
from tokenmill.core.schedule import cohorts, spread
from tokenmill.errors import BadPromptError
from tokenmill.ledger import Ledger
from tokenmill.rows import RawRow

BATCH = 256
"""Prompts read ahead: a quarter of a megabyte of usual rows."""

Item = Prompt | Record


class Feed:
    """`first_cohort` are the rows of cohort 0 that are still to be made, `first_cohort_pending` its ids without any
    record; later cohorts count from `next_cohort` on. What is made again stays in its cohort.

    `last_cohort` is the number and size so far of the cohort that is being filled.
    """

    def __init__(
        self, path: Path, ledger: Ledger, settings: str, *, cohort: int, next_cohort: int, dedup: bool
    ) -> None:
        self._read_all = False
        self.last_cohort = (0, 0)
        self._path = path
        self._ledger = ledger
        self._settings = settings
        self._size = cohort
        self._next_cohort = max(next_cohort, 1)
        self._repeats = ledger.index.repeats_content() if dedup else None
        asked = ledger.rows_asked()
        rows = -(-cohort // ledger.samples)
        chosen = [int(asked[place]) for place in spread(len(asked), rows)]
        self.first_cohort = [row for row in chosen if ledger.pending_samples(row)]
        self.first_cohort_pending = sum(map(ledger.unrecorded, chosen))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._stream = self._items()
        self._ahead: asyncio.Future[list[Item]] | None = None
        self._ready: list[Item] = []

    @property
    def ended(self) -> bool:
        """Whether every prompt of the set has been taken."""
        return self._read_all and not self._ready

    async def take(self, count: int) -> list[Item]:
        """The next items, `count` at most; fewer only at the end of the set."""
        loop = asyncio.get_running_loop()
        while len(self._ready) < count and not self._read_all:
            if self._ahead is None:
                self._ahead = loop.run_in_executor(self._thread, self._read)
            batch = await self._ahead
            self._ahead = loop.run_in_executor(self._thread, self._read) if batch else None
            self._read_all = not batch
            self._ready += batch
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> list[Item]:
        return list(islice(self._stream, BATCH))

    def _items(self) -> Iterator[Item]:
        first = np.zeros(len(self._ledger.index), dtype=np.bool_)
        first[self.first_cohort] = True
        rest = self._ledger.rows_pending() & ~first
        for raw in prompts.rows(self._path, first):
            yield from self._row_items(raw, repeat(0))
        later = cohorts(self._next_cohort, self._size)
        for raw in prompts.rows(self._path, rest):
            yield from self._row_items(raw, later)

    def _row_items(self, raw: RawRow, numbers: Iterator[int]) -> Iterator[Item]:
        samples = self._ledger.pending_samples(raw.row)
        if not samples:
            return
        own = prompts.identity(raw.data)
        key = self._ledger.index.key(raw.row, own.key)
        problem, label = "", "bad_prompt"
        messages = tools = NULL
        try:
            if self._repeats is not None and self._repeats[raw.row]:
                problem, label = f"{raw.place}: the same content as an earlier row", "duplicate"
            else:
                messages, tools = prompts.messages(raw.data)
        except BadPromptError as error:
            problem = f"{raw.place}: {error}"
        for sample in samples:
            cohort = self._ledger.cohort(raw.row, sample)
            if cohort is None:
                cohort = next(numbers)
                self._count(cohort)
            prompt = Prompt(key, sample, raw.row, cohort, own.digest, messages, tools)
            if problem:
                yield failed(
                    prompt, "duplicate" if label == "duplicate" else "bad_prompt", problem, settings=self._settings
                )
            else:
                yield prompt

    def _count(self, cohort: int) -> None:
        number, count = self.last_cohort
        self.last_cohort = (cohort, count + 1 if cohort == number else 1)

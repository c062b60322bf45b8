"""A collector whose store fails: what is in flight comes in, and is kept and tried again for the time that is told."""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.make import jsonl, record
from tests.unit.test_collect_again import accounts_of
from tokenmill import dataset, events, store
from tokenmill.cluster.base import Results
from tokenmill.cluster.local import Alone
from tokenmill.collect import Collector
from tokenmill.core.records import Prompt, Record
from tokenmill.core.status import NodeStatus
from tokenmill.errors import StoreError, TokenmillError, UsageError, VanishedError
from tokenmill.events import EventLog
from tokenmill.feed import BATCH, Feed
from tokenmill.folder import RunFolder
from tokenmill.resume import Accounts
from tokenmill.rows import Mask, RawRow
from tokenmill.store import Store

ROWS, BATCHES = BATCH, 2
"""Prompts in flight, and in how many pieces their answers come."""


class Late:
    """A node that answers once it has been asked to stop, or at once; with `endless`, its last answer never comes."""

    name = ""

    def __init__(self, *, at_once: bool = False, endless: bool = False) -> None:
        self.at_once, self.endless = at_once, endless
        self.waiting: list[Prompt] = []
        self.stopped = False

    async def credits(self) -> int:
        return ROWS

    async def offer(self, prompts: list[Prompt]) -> None:
        self.waiting += prompts

    async def results(self) -> Results:
        await asyncio.sleep(0.005)
        given: list[Record] = []
        while (self.stopped or self.at_once) and len(self.waiting) > self.endless and len(given) < ROWS // BATCHES:
            asked = self.waiting.pop(0)
            own = {"cohort": asked.cohort, "digest": asked.digest, "messages": asked.messages, "settings": "s"}
            given.append(record(asked.key, asked.row, **own))
        return Results(given, [], 0 if self.stopped else ROWS, ended=self.stopped and not given and not self.waiting)

    async def status(self) -> NodeStatus:
        return NodeStatus("", ())

    async def run(self) -> None:
        """It has no life of its own."""

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        self.stopped = True
        if grace_s == 0.0:
            self.waiting.clear()


class Broken(Feed):
    """A prompt file that cannot be read any more behind the first cohort."""

    _is_read = False

    def _rows(self, wanted: Mask) -> Iterator[RawRow]:
        if self._is_read:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield from super()._rows(wanted)
        self._is_read = True


def none(data: Path) -> None:
    pass


def full(data: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_and_gone(data: Path) -> None:
    """Somebody makes room, in the wrong place."""
    for journal in store.journals(data):
        journal.unlink()
    full(data)


class Faulty(Store):
    """Of its next writes, each meets one of the faults."""

    def __init__(self, data: Path, faults: Sequence[Callable[[Path], None]]) -> None:
        super().__init__(data, 1 << 30, lambda text, level: None)
        self._faults = list(faults)

    def _write(self, lines: bytes) -> None:
        if self._faults:
            self._faults.pop(0)(self.data)
        super()._write(lines)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def accounts_for(folder: RunFolder, rows: int) -> tuple[Path, Accounts]:
    path = jsonl(folder.path / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"q{n}"} for n in range(rows)])
    return path, accounts_of(folder, path, 1)


def unreadable(folder: RunFolder) -> Accounts:
    """Of prompts of which so many can be read as are in flight when that is found."""
    path, accounts = accounts_for(folder, 2 * ROWS)
    accounts.feed.close()
    return replace(accounts, feed=Broken(path, accounts.ledger, "s", cohort=ROWS, held={}, dedup=False))


def collected(
    folder: RunFolder, accounts: Accounts, node: Late, faults: Sequence[Callable[[Path], None]], patience_s: float
) -> TokenmillError | None:
    """A run with one node; returns what ended it."""

    async def collect() -> TokenmillError | None:
        kept = Faulty(folder.data, faults)
        collector = Collector(accounts, kept, folder, EventLog(folder.events), patience_s=patience_s)

        async def stop(grace_s: float | None) -> None:
            collector.draining = True
            await node.stop(grace_s, keep=False)

        collector.stop = stop
        async with asyncio.timeout(30):
            await collector.run(Alone(node, node.run))
        await kept.close(seal=False)
        accounts.feed.close()
        return collector.failure

    return asyncio.run(collect())


def told(folder: RunFolder) -> str:
    return "\n".join(event.text for event, _ in events.read(folder.events))


def test_a_store_is_tried_again_for_as_long_whatever_ended_the_run_before(folder: RunFolder) -> None:
    accounts = unreadable(folder)
    failure = collected(folder, accounts, Late(), [full] * (BATCHES + 1), patience_s=3)
    assert isinstance(failure, UsageError)
    assert "the prompts cannot be read any more" in str(failure)
    assert "cannot write: " in told(folder)
    assert len(list(dataset.records(folder.data))) == accounts.ledger.counts().done == ROWS


def test_an_answer_that_never_comes_holds_a_full_store_up_for_as_long_as_was_told(folder: RunFolder) -> None:
    failure = collected(folder, unreadable(folder), Late(endless=True), [full] * 10_000, patience_s=0.3)
    assert isinstance(failure, StoreError)
    assert f"0 records are safe; {ROWS - 1} answers could not be stored and are lost" in str(failure)


@pytest.mark.parametrize("prompts_fail", [False, True])
def test_a_journal_that_is_gone_is_never_called_stored_in_the_end(folder: RunFolder, prompts_fail: bool) -> None:
    """It went after all had come, while its disk was full."""
    accounts = unreadable(folder) if prompts_fail else accounts_for(folder, ROWS)[1]
    faults = [none] * (BATCHES - 1) + [full_and_gone]
    failure = collected(folder, accounts, Late(at_once=not prompts_fail), faults, patience_s=1)
    assert isinstance(failure, VanishedError)
    assert "was removed or moved away in mid-run" in str(failure)

"""From one reader to many browsers: each look's messages are encoded once and handed to all. However many they are, the
run folder is read once a second, and so is each log that somebody looks at."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tokenmill.errors import FullError, StoreError, UsageError
from tokenmill.machine.threads import Asker, reading
from tokenmill.web.catalog import Found
from tokenmill.web.shown import Shown, shown
from tokenmill.web.watcher import LogTail, Message, Watcher, message

LOOK_S = 1.0
"""As often as a run renews its status."""

IDLE_S = 2.0
"""Between two looks for new records to find, once all are taken in."""

PAUSE_S = 0.02
"""After each file taken in: answers go before."""

STEP_S = 120.0
"""For taking in one file: a part has 128 MB of journal."""

CLIENTS = 64
"""Streams at once: a browser has six for a host, and a person a few browsers."""

BEHIND = 120
"""Messages that wait for a client: two minutes of one that does not read. It begins anew then."""

READS = 4
"""Answers read from the folder at once: each holds a row group in memory."""

LISTED = 10
"""Records in a list: what a person reads."""

Feed = asyncio.Queue[Message | None]


@dataclass(slots=True)
class _Room:
    """Those who follow one thing; None in a feed ends it."""

    feeds: set[Feed] = field(default_factory=set)

    def tell(self, message: Message | None) -> None:
        for feed in list(self.feeds):
            if message is None or feed.full():
                self.feeds.discard(feed)
                while not feed.empty():
                    feed.get_nowait()
                feed.put_nowait(None)
            else:
                feed.put_nowait(message)


@dataclass(slots=True)
class _LogRoom(_Room):
    """Those who follow a server's log."""

    tail: LogTail = field(kw_only=True)
    asker: Asker[list[str]] = field(default_factory=Asker)

    async def look(self) -> None:
        """Tells what has come; its end, where it is no log of this folder any more."""
        try:
            lines = await self.asker.reading(self.tail.look, None)
        except (UsageError, OSError):
            self.tell(None)
            return
        if lines:
            self.tell(message("lines", lines))

    def close(self) -> None:
        self.tell(None)
        self.asker.close()
        self.tail.close()


class Hub:
    """Runs the watcher's looks and the catalog's steps for the scope of `run`."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._all = _Room()
        self._logs: dict[str, _LogRoom] = {}
        self._watching: Asker[list[Message]] = Asker()
        self._stepping: Asker[bool] = Asker()
        # Held for a look with its telling, and for a newcomer's beginning: nobody misses a message between the two.
        self._looking = asyncio.Lock()
        self._whole: Message | None = None
        self._reads = asyncio.Semaphore(READS)
        self._lists: dict[tuple[str, str], tuple[float, asyncio.Task[list[Shown]]]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look_on())
                tasks.create_task(self._take_in())
        finally:
            self.close()

    def close(self) -> None:
        """Lets go of all who look, and closes the logs."""
        self._all.tell(None)
        self._watching.close()
        self._stepping.close()
        for room in self._logs.values():
            room.close()
        self._logs.clear()

    async def look(self) -> None:
        """One look, told to all."""
        async with self._looking:
            nothing: list[Message] = []
            messages = await self._watching.reading(self.watcher.look, nothing)
            if messages:
                self._whole = None
            for each in messages:
                self._all.tell(each)
            for name, room in list(self._logs.items()):
                if not room.feeds:
                    self._logs.pop(name).close()
                else:
                    await room.look()

    async def _look_on(self) -> None:
        while True:
            due = time.monotonic() + LOOK_S
            await self.look()
            await asyncio.sleep(max(due - time.monotonic(), LOOK_S / 4))

    async def _take_in(self) -> None:
        while True:
            busy = False
            try:
                busy = await self._stepping.reading(self.watcher.catalog.step, False, STEP_S)
            except (StoreError, OSError) as error:
                self.watcher.trouble = str(error)
            await asyncio.sleep(PAUSE_S if busy else IDLE_S)

    # -- following ---------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def joined(self) -> AsyncIterator[tuple[Message, Feed]]:
        """What a page begins with, and what comes; raises FullError, StoreError."""
        self._check_room()
        async with self._looking:
            whole = self._whole or await reading(self.watcher.whole, None)
            if whole is None:
                raise StoreError("the run folder does not come: its disk hangs")
            self._whole = whole
            self._all.feeds.add(feed := Feed(BEHIND))
        try:
            yield whole, feed
        finally:
            self._all.feeds.discard(feed)

    @contextlib.asynccontextmanager
    async def log(self, name: str) -> AsyncIterator[tuple[Message, Feed]]:
        """The end of a server's log, and what comes; raises FullError, UsageError where there is none to show."""
        self._check_room()
        async with self._looking:
            if name not in self._logs:
                tail = await reading(lambda: LogTail(self.watcher.folder, name), None)
                if tail is None:
                    raise UsageError(f"the log of server {name} does not come: its disk hangs")
                self._logs[name] = _LogRoom(tail=tail)
            room = self._logs[name]
            room.feeds.add(feed := Feed(BEHIND))
            begin = message("begin", list(room.tail.recent))
        try:
            yield begin, feed
        finally:
            room.feeds.discard(feed)

    def _check_room(self) -> None:
        if len(self._all.feeds) + sum(len(room.feeds) for room in self._logs.values()) >= CLIENTS:
            raise FullError(f"{CLIENTS} browsers look already")

    # -- asking ------------------------------------------------------------------------------------------------------
    async def listed(self, order: str, label: str) -> list[Shown]:
        """The newest records or the worst; whoever asks within a second gets the same answer."""
        catalog = self.watcher.catalog
        made, task = self._lists.get((order, label), (0.0, None))
        if task is None or time.monotonic() - made > LOOK_S:
            find = (lambda: catalog.newest(LISTED)) if order == "newest" else (lambda: catalog.worst(label, LISTED))
            task = asyncio.create_task(self._read(find))
            self._lists = {key: held for key, held in self._lists.items() if time.monotonic() - held[0] <= LOOK_S}
            self._lists[order, label] = (time.monotonic(), task)
        return await asyncio.shield(task)

    async def found(self, key: str) -> list[Shown]:
        """All records of a key."""
        return await self._read(lambda: self.watcher.catalog.find(key)[:LISTED])

    async def one(self, key: str, sample: int, turn: int) -> list[Shown]:
        """The records of one id, whole."""
        catalog = self.watcher.catalog
        return await self._read(lambda: catalog.find(key, sample, turn)[:LISTED], whole=True)

    async def _read(self, find: Callable[[], list[Found]], *, whole: bool = False) -> list[Shown]:
        async with self._reads:
            found: list[Shown] | None = await reading(lambda: [shown(one, whole=whole) for one in find()], None)
        if found is None:
            raise StoreError("the records do not come: their disk hangs")
        return found

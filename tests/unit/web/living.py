"""A run folder to look at, and the page's application on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import DummyCookieJar, web
from aiohttp.test_utils import TestClient, TestServer

from tests.unit.make import record
from tokenmill import linefile, store
from tokenmill.core.records import Record
from tokenmill.core.status import PromptCounts, RunStatus
from tokenmill.events import Event, EventLog
from tokenmill.folder import RunFolder, State
from tokenmill.history import Moment
from tokenmill.web.app import application
from tokenmill.web.hub import Hub
from tokenmill.web.watcher import Watcher

Client = TestClient[web.Request, web.Application]


def run_folder(path: Path, records: Sequence[Record] = (), *, state: str = "done") -> RunFolder:
    """A run that has ended, with these records in its journal."""
    folder = RunFolder(path)
    folder.create()
    with (folder.data / "journal-000001.jsonl").open("ab") as out:
        out.writelines(map(store.line_of, records or [record("k1", 0), record("k2", 1, labels=("empty_answer",))]))
    folder.write_state(State())
    folder.write_status(
        RunStatus(path.name, state, PromptCounts(2, 1, 1, 0, 0), (), 5.0, None, 0.5, tokens=80, updated=1_700_000_100.0)
    )
    log = EventLog(folder.events)
    log.add(Event(1_700_000_000.0, "state", "pending → starting", "0"))
    log.add(Event(1_700_000_010.0, "state", "starting → ready", "0"))
    for n in range(3):
        moment = Moment(1_700_000_000.0 + 10 * n, "generating", accepted=n)
        linefile.append(folder.history, msgspec.json.encode(moment))
    folder.log(0).write_text("a line\n\x1b[31mred\x1b[0m \u202eturned\n")
    return folder


@asynccontextmanager
async def page(folder: RunFolder, token: str = "") -> AsyncIterator[tuple[Client, Hub]]:
    """A client of the page, with all looked at and all records taken in; the hub does nothing of itself."""
    hub = Hub(Watcher(folder))
    await hub.look()
    while await asyncio.to_thread(hub.watcher.catalog.step):
        pass
    await hub.look()
    try:
        async with TestClient(TestServer(application(hub, token)), cookie_jar=DummyCookieJar()) as client:
            yield client, hub
    finally:
        hub.close()


async def event(client: Client, path: str) -> tuple[str, object]:
    """The first server-sent event of a stream."""
    async with client.get(path) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        name = (await answer.content.readline()).decode().strip().removeprefix("event: ")
        data = (await answer.content.readuntil(b"\n")).removeprefix(b"data: ")
        return name, msgspec.json.decode(data)

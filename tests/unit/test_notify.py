"""Notifications: real commands and a real receiver on loopback; once each, never for longer than the deadline."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tokenmill.config import Config, Notify, shown
from tokenmill.configfile import load
from tokenmill.core.status import ServerStatus
from tokenmill.errors import ConfigError, GateError, NoServerError, StoreError, TokenmillError
from tokenmill.events import EventLog, read
from tokenmill.folder import RunFolder
from tokenmill.ledger import Ledger
from tokenmill.machine import processes
from tokenmill.notify import LOW_BYTES, WITHOUT_S, Notifier
from tokenmill.progress import Progress
from tokenmill.prompts import scan
from tokenmill.streams import console
from tokenmill.view import View


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def made(path: Path, deadline_s: float = 10.0, **wanted: Any) -> Notifier:
    folder = RunFolder(path / "night-run")
    folder.create()
    return Notifier(Notify(**wanted), folder, EventLog(folder.events), deadline_s=deadline_s)


def warnings(path: Path) -> list[str]:
    return [event.text for event, _ in read(path / "night-run" / "events.jsonl") if event.kind == "notify"]


@asynccontextmanager
async def receiver(status: int = 200, delay_s: float = 0.0) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook's address, and what came."""
    came: list[dict[str, Any]] = []

    async def hook(request: web.Request) -> web.Response:
        came.append(await request.json())
        await asyncio.sleep(delay_s)
        return web.Response(status=status, headers={"Location": "/moved"})

    async def moved(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/services/hush-1234", hook)
    app.router.add_get("/moved", moved)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield f"http://127.0.0.1:{port}/services/hush-1234", came
    finally:
        await runner.cleanup()


def test_a_command_gets_the_event_on_stdin_and_in_variables(tmp_path: Path) -> None:
    script = f'cat > {tmp_path}/in; echo "$TOKENMILL_RUN|$TOKENMILL_EVENT|$TOKENMILL_TEXT" > {tmp_path}/env'

    async def work() -> None:
        notifier = made(tmp_path, command=["sh", "-c", script])
        notifier.tell("done", "done: 40 accepted \033[31m")
        notifier.tell("done", "twice")
        await notifier.finish()

    asyncio.run(work())
    sent = json.loads((tmp_path / "in").read_text())
    assert (sent["run"], sent["event"]) == ("night-run", "done")
    assert sent["text"] == "tokenmill night-run: done: 40 accepted "
    assert (tmp_path / "env").read_text() == f"night-run|done|{sent['text']}\n"
    assert warnings(tmp_path) == []


def test_a_webhook_gets_json_and_each_event_once_also_after_a_restart(tmp_path: Path) -> None:
    async def work() -> list[dict[str, Any]]:
        async with receiver() as (address, came):
            for _ in range(2):  # two lives of the run
                notifier = made(tmp_path, webhook=address)
                notifier.tell("gate", "the gate stopped the run")
                notifier.look_at_disk(LOW_BYTES - 1)
                notifier.look_at_disk(LOW_BYTES - 2)
                await notifier.finish()
            return came

    came = asyncio.run(work())
    assert sorted(one["event"] for one in came) == ["disk_low", "gate"]
    assert all(one["text"].startswith("tokenmill night-run: ") for one in came)
    assert warnings(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "sleep 60 & echo $$ > pid; sleep 60"], "had not ended after 0.5 s, and was killed"),
        (["sh", "-c", "echo no such list >&2; exit 7"], "ended with exit code 7: no such list"),
        (["/nowhere/mail"], "No such file or directory"),
    ],
)
def test_a_command_that_fails_is_one_warning_and_is_tried_again_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)

    async def work() -> None:
        for _ in range(2):
            notifier = made(tmp_path, deadline_s=0.5, command=command)
            notifier.tell("done", "x")
            notifier.tell("done", "x")
            await notifier.finish()

    asyncio.run(work())
    told = warnings(tmp_path)
    assert len(told) == 2, "one a life"
    assert words in told[0]
    if (tmp_path / "pid").exists():
        group, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
        while any(_lives_in(group, pid) for pid in processes.pids()):
            assert time.monotonic() < deadline, "its children live on"
            time.sleep(0.02)


def _lives_in(group: int, pid: int) -> bool:
    status = processes.stat(pid)
    return status is not None and status.group == group and status.state not in "ZX"


@pytest.mark.parametrize(
    ("status", "delay_s", "words"),
    [(404, 0.0, "answered HTTP 404"), (301, 0.0, "answered HTTP 301"), (200, 5.0, "did not answer")],
)
def test_a_webhook_that_fails_is_one_warning_without_its_secret(
    tmp_path: Path, status: int, delay_s: float, words: str
) -> None:
    async def work() -> None:
        async with receiver(status, delay_s) as (address, _):
            notifier = made(tmp_path, deadline_s=0.3, webhook=address)
            notifier.tell("done", "x")
            await notifier.finish()

    asyncio.run(work())
    (told,) = warnings(tmp_path)
    assert words in told
    assert "hush-1234" not in told


@pytest.mark.parametrize("rest", ["/services/hush-1234", "?token=hush-1234", "/?token=hush-1234"])
def test_nobody_listens(tmp_path: Path, rest: str) -> None:
    async def work() -> None:
        notifier = made(tmp_path, webhook=f"http://127.0.0.1:9{rest}")
        notifier.tell("done", "x")
        await notifier.finish()

    asyncio.run(work())
    (told,) = warnings(tmp_path)
    assert "hush-1234" not in told


@pytest.mark.parametrize(
    ("error", "event"),
    [(GateError("bad\n  a completion"), "gate"), (NoServerError("x"), "no_servers"), (StoreError("x"), "failed")],
)
def test_an_end_is_told_by_its_first_line(tmp_path: Path, error: TokenmillError, event: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')

    async def ending() -> int:
        raise error

    async def work(running: Coroutine[None, None, int]) -> list[dict[str, Any]]:
        async with receiver() as (address, came):
            notifier = made(tmp_path, webhook=address)
            progress = Progress(RunFolder(tmp_path / "night-run"), View(None, console()))
            progress.ledger = Ledger(scan(tmp_path / "prompts.jsonl"), 1)
            with pytest.raises(TokenmillError):
                await notifier.of(running, progress)
            await notifier.finish()
            return came

    (one,) = asyncio.run(work(ending()))
    assert one["event"] == event
    assert "a completion" not in one["text"]


def server(state: str) -> ServerStatus:
    return ServerStatus("", 0, "0", 1, 1, state, "", 0.0, 0, 0, 0.0, None, 0, "", last_problem="it died")


def test_no_server_for_ten_minutes_is_told_but_not_a_long_first_start(tmp_path: Path) -> None:
    notifier = made(tmp_path)
    told: list[str] = []
    notifier.tell = lambda event, text: told.append(f"{event}: {text}")  # type: ignore[method-assign]
    for minute in range(30):
        notifier.look_at_servers((server("starting"),), 60.0 * minute)
    assert told == []
    notifier.look_at_servers((server("ready"),), 2000.0)
    notifier.look_at_servers((server("backoff"),), 2010.0)
    notifier.look_at_servers((server("starting"),), 2009.0 + WITHOUT_S)
    assert told == []
    notifier.look_at_servers((server("starting"),), 2010.0 + WITHOUT_S)
    assert told == ["no_servers: no server has served for 10 min; server 0: it died. It tries on until fleet.give_up"]


def test_secrets_of_notify_are_kept_nowhere(tmp_path: Path) -> None:
    config = Config(
        notify=Notify(
            command=["curl", "-H", "Authorization: hush-1234"], webhook="https://me:hush-1234@h.example/a/hush-1234"
        )
    )
    kept = shown(config)["notify"]
    assert "hush-1234" not in str(kept)
    assert kept == {"command": ["curl", "***", "***"], "webhook": "https://***@h.example/***"}
    assert Notify(**kept) is not None, "a run folder's config is read again"


def test_a_wrong_webhook_is_a_mistake_that_does_not_show_it(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[prompts]\npath="p"\n[engine]\nkind="fake"\n[notify]\nwebhook = "hush-1234"\n')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "x.toml")
    assert "notify.webhook" in str(caught.value)
    assert "hush-1234" not in str(caught.value)

"""The page's addresses: what they answer, whom they refuse, and that many who look cost one look."""

import asyncio
import os
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.make import record
from tests.unit.web.living import event, page, run_folder
from tokenmill import linefile
from tokenmill.core.records import Parts
from tokenmill.errors import UsageError
from tokenmill.events import Event, EventLog
from tokenmill.web import app, hub
from tokenmill.web.guard import check_address

TOKEN = "0123456789abcdef"
ADDRESSES = (
    "/",
    "/metrics",
    "/api/status",
    "/api/stream",
    "/api/log?server=0",
    "/api/records",
    *map("/{}".format, app.FILES),
)


def go(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


# -- whom it refuses ---------------------------------------------------------------------------------------------------
def test_every_answer_says_what_a_browser_may_do(tmp_path: Path) -> None:
    async def look() -> None:
        async with page(run_folder(tmp_path / "run")) as (client, _):
            for address in (*ADDRESSES, "/nowhere", "/api/log?server=99", "/api/log?server=../state"):
                async with client.head(address) as answer:
                    assert answer.headers["X-Content-Type-Options"] == "nosniff", address
                    policy = answer.headers["Content-Security-Policy"]
                    assert "default-src 'none'" in policy
                    assert "unsafe" not in policy
                    assert "frame-ancestors 'none'" in policy
                    assert answer.headers["Referrer-Policy"] == "no-referrer"

    go(look())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_exists(tmp_path: Path, method: str) -> None:
    async def look() -> None:
        async with page(run_folder(tmp_path / "run")) as (client, _):
            for address in ADDRESSES:
                async with client.request(method, address) as answer:
                    assert answer.status == 405

    go(look())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1:8800", 200), ("localhost", 200), ("localhost:1", 200), ("[::1]:8800", 200), ("127.0.0.2", 200)),
        *(("evil.example", 403), ("evil.example:8800", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil", 403)),
        *(("10.0.0.1", 403), ("", 403), ("localhost:1:2", 403), ("[::1", 200), ("LOCALHOST", 200)),
    ],
)
def test_only_names_of_this_machine_are_answered(tmp_path: Path, host: str, status: int) -> None:
    async def look() -> None:
        async with page(run_folder(tmp_path / "run")) as (client, _):
            answer = await client.get("/api/status", headers={"Host": host})
            assert answer.status == status

    go(look())


def test_a_token_is_needed_everywhere_and_becomes_a_cookie(tmp_path: Path) -> None:
    async def look() -> None:
        async with page(run_folder(tmp_path / "run"), TOKEN) as (client, _):
            for address in ADDRESSES:
                async with client.get(address) as answer:
                    assert answer.status == 401, address
            for bad in ("?token=", "?token=0123456789abcdeF", f"?token={TOKEN}x"):
                async with client.get(f"/{bad}") as answer:
                    assert answer.status == 401
            async with client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.status == 200
            async with client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN[:-1]}"}) as answer:
                assert answer.status == 401
            async with client.get(
                "/api/status", headers={"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}
            ) as a:
                assert a.status == 403
            async with client.get(f"/?token={TOKEN}") as answer:
                (cookie,) = answer.headers.getall("Set-Cookie")
                assert answer.status == 200
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert TOKEN not in cookie
            name, _, value = cookie.partition(";")[0].partition("=")
            async with client.get(
                "/api/status", headers={"Cookie": f"{name}={value}", "Host": "10.1.2.3:8800"}
            ) as answer:
                assert answer.status == 200
            async with client.get("/api/status", headers={"Cookie": f"{name}={value}x"}) as answer:
                assert answer.status == 401

    go(look())


@pytest.mark.parametrize(
    ("address", "token", "words"),
    [
        ("0.0.0.0", "", "needs a token"),
        ("::", "", "needs a token"),
        ("10.0.0.1", "short", "5 characters"),
        ("evil.example", TOKEN, "no IP address"),
        ("127.0.0.1", "short", "5 characters"),
    ],
)
def test_what_would_be_open_to_others_is_refused(address: str, token: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        check_address(address, token)
    assert refused.value.fix


@pytest.mark.parametrize(("address", "token"), [("127.0.0.1", ""), ("localhost", ""), ("::1", ""), ("0.0.0.0", TOKEN)])
def test_what_is_safe_is_not(address: str, token: str) -> None:
    check_address(address, token)


# -- logs --------------------------------------------------------------------------------------------------------------
def test_a_log_is_shown_without_what_hides_in_it(tmp_path: Path) -> None:
    async def look() -> None:
        async with page(run_folder(tmp_path / "run")) as (client, _):
            assert await event(client, "/api/log?server=0") == ("begin", ["a line", "red ⟨U+202E⟩turned"])

    go(look())


def test_no_log_leads_out_of_the_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (tmp_path / "secret").write_text("the secret\n")
    folder.log(1).symlink_to(tmp_path / "secret")
    folder.log(2).symlink_to("server-0.log")
    os.mkfifo(folder.log(3))

    async def look() -> None:
        async with page(folder) as (client, _):
            for server in ("1", "3", "4", "-1", "../../secret", "0/../../secret", "", "0x1", "١", "9" * 30):
                async with client.get("/api/log", params={"server": server}) as answer:
                    assert answer.status in (400, 404), server
                    assert "secret\n" not in (await answer.text()).replace("../", "")
            assert (await event(client, "/api/log?server=2"))[0] == "begin"
            for path in (
                "/../state.json",
                "/%2e%2e/state.json",
                "/data/journal-000001.jsonl",
                "/static/app.js",
                "/etc/passwd",
            ):
                async with client.get(path) as answer:
                    assert answer.status == 404, path

    go(look())


def test_a_log_that_becomes_a_link_ends(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (tmp_path / "secret").write_text("the secret\n")

    async def look() -> None:
        async with page(folder) as (_, watched), watched.log("0") as (_, feed):
            with folder.log(0).open("a") as out:
                out.write("more\n")
            await watched.look()
            assert feed.get_nowait() == ("lines", b'["more"]')
            folder.log(0).unlink()
            folder.log(0).symlink_to(tmp_path / "secret")
            await watched.look()
            assert feed.get_nowait() is None

    go(look())


# -- what it shows -----------------------------------------------------------------------------------------------------
def test_a_page_begins_with_all_there_is(tmp_path: Path) -> None:
    async def look() -> None:
        async with page(run_folder(tmp_path / "run")) as (client, _):
            name, found = await event(client, "/api/stream")
            assert name == "whole"
            assert isinstance(found, dict)
            assert found["columns"]["t"] == [1_700_000_000.0, 1_700_000_010.0, 1_700_000_020.0]
            assert found["timeline"] == {"0": [[1_700_000_000.0, "starting"], [1_700_000_010.0, "ready"]]}
            assert [one["text"] for one in found["events"]] == ["pending → starting", "starting → ready"]
            assert (found["live"], found["logs"]) == (False, ["0"])
            async with client.get("/api/status") as answer:
                status = await answer.json()
            assert status["prompts"] == found["status"]["prompts"]
            assert status["state"] == "done"

    go(look())


def test_what_a_model_wrote_comes_as_text(tmp_path: Path) -> None:
    text = "<think>\n\u202eturned\x00\n</think>\n\n<script>alert(1)</script>"
    bad = record("<b>\u202ekey", 0, text=text, parts=Parts(8, 16, 27, len(text)), labels=("bad_text",))

    async def look() -> None:
        async with page(run_folder(tmp_path / "run", [bad, record("k", 1)])) as (client, _):
            async with client.get("/api/records?order=worst&label=bad_text") as answer:
                assert answer.content_type == "application/json"
                (found,) = await answer.json()
            assert (found["name"], found["key"]) == ("<b>⟨U+202E⟩key", "<b>\u202ekey")
            assert (found["thought"], found["answer"]) == ("⟨U+202E⟩turned␀", "<script>alert(1)</script>")
            async with client.get("/api/record", params={"key": found["key"], "sample": 0, "turn": 0}) as answer:
                (whole,) = await answer.json()
            assert whole["raw"].startswith("<think>\n⟨U+202E⟩")
            async with client.get("/api/records", params={"order": "key", "key": "k"}) as answer:
                assert [one["key"] for one in await answer.json()] == ["k"]
            async with client.get("/api/records?order=sideways") as answer:
                assert answer.status == 400

    go(look())


def test_events_and_points_come_as_they_happen(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")

    async def look() -> None:
        async with page(folder) as (_, watched), watched.joined() as (_, feed):
            await watched.look()
            assert feed.empty()  # nothing new, nothing told
            EventLog(folder.events).add(Event(1_700_000_050.0, "state", "ready → failed", "0"))
            linefile.append(folder.history, b'{"t":1700000030.0,"state":"generating","accepted":9}')
            await watched.look()
            names = []
            while not feed.empty():
                names.append(feed.get_nowait())
            assert [name for name, _ in filter(None, names)] == ["points", "events"]

    go(look())


def test_another_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [record(f"old{n}", n) for n in range(9)])

    async def look() -> None:
        async with page(folder) as (client, watched), watched.joined() as (_, feed):
            shutil.rmtree(folder.path)
            await watched.look()  # and what is shown stays
            run_folder(folder.path, [record("new", 0)])
            folder.events.write_bytes(folder.events.read_bytes().replace(b"1700000000", b"1700009999"))
            await watched.look()
            while await asyncio.to_thread(watched.watcher.catalog.step):
                pass
            names = [feed.get_nowait() for _ in range(feed.qsize())]
            assert names[-1] is not None
            assert names[-1].name == "whole"
            assert b"1700009999" in names[-1].data
            assert [one.key for one in await watched.found("new")] == ["new"]
            assert await watched.found("old1") == []
            _, whole = await event(client, "/api/stream")
            assert isinstance(whole, dict)
            assert [len(whole["events"]), len(whole["columns"]["t"])] == [2, 3]

    go(look())


# -- many who look -----------------------------------------------------------------------------------------------------
def test_many_who_look_cost_one_look_and_get_the_same_bytes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")

    async def look() -> None:
        async with page(folder) as (_, watched), asyncio.TaskGroup() as tasks:
            joined, enough = asyncio.Event(), asyncio.Event()

            async def one() -> tuple[int, int]:
                async with watched.joined() as (whole, feed):
                    if len(watched._all.feeds) == 20:
                        joined.set()
                    message = await feed.get()
                    await enough.wait()
                    return id(whole.data), id(message and message.data)

            lookers = [tasks.create_task(one()) for _ in range(20)]
            await joined.wait()
            EventLog(folder.events).add(Event(1.0, "run", "something"))
            await watched.look()
            enough.set()
            assert len({await looker for looker in lookers}) == 1

    go(look())


def test_who_does_not_read_is_let_go_and_too_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BEHIND", 2)
    monkeypatch.setattr(hub, "CLIENTS", 1)
    folder = run_folder(tmp_path / "run")

    async def look() -> None:
        async with page(folder) as (client, watched):
            async with watched.joined() as (_, feed):
                async with client.get("/api/stream") as answer:
                    assert answer.status == 503
                for number in range(4):
                    EventLog(folder.events).add(Event(float(number), "run", "something"))
                    await watched.look()
                assert feed.get_nowait() is None
            assert (await event(client, "/api/stream"))[0] == "whole"

    go(look())


def test_rules_that_change_change_the_verdicts(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [record("k", 0, reasoning_tokens=20)])

    async def look() -> None:
        async with page(folder) as (_, watched):
            assert await watched.listed("worst", "") == []
            folder.config.write_text(
                '[engine]\nkind = "fake"\n[prompts]\npath = "p"\n[judge]\nmin_reasoning_tokens = 30\n'
            )
            await watched.look()
            assert watched.watcher.trouble == ""
            await asyncio.to_thread(watched.watcher.catalog.step)
            assert [one.labels for one in await watched.found("k")] == [("empty_reasoning",)]

    go(look())

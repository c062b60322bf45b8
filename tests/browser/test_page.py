"""The page in a real browser: on a run of real llama.cpp servers while it goes and when it has ended, on a phone, by
keyboard, in light and dark, with completions that attack it."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import WAIT_MS, opened, served
from tests.conftest import free_port
from tests.harness import Case, wait_until
from tests.unit.make import record
from tests.unit.web.living import run_folder
from tokenmill import quickstart
from tokenmill.core.records import Parts
from tokenmill.core.status import GateShare
from tokenmill.folder import RunFolder

ATTACK = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"
SHORT = "<img src=x onerror=document.title='hacked'>"
"""What a small model can be made to write in a second."""

PROMPTS = 500
"""More than it can answer while the test looks."""

GATE = (GateShare("rejected", 0.1, 0.2, 0.15), GateShare("truncated", 0.0, 0.5, 0.0))

COUNTS = ("accepted", "rejected", "failed", "pending")


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Case]:
    """Two real servers, whose every answer attacks the page: a grammar makes the model write it."""
    rows = ({"id": f"p{number}", "prompt": f"Say {number} {SHORT}"} for number in range(PROMPTS))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Case(tmp_path, free_port())
    made.settings = {
        "model": {"path": str(quickstart.find_model(print)), "name": "smollm2"},
        "engine": {"kind": "llamacpp", "args": {"parallel": 2, "ctx-size": 1024, "threads": 1, "threads-http": 2}},
        "generation": {
            "thinking": False,
            "max_tokens": 100,
            "extra": {"grammar": f'root ::= "{SHORT} " [a-z ]{{2,9}}'},
        },
        "gate": {"max_rejected": 1.0, "max_truncated": 1.0},
    }
    yield made
    made.cleanup()


@pytest.fixture
def ended(tmp_path: Path) -> RunFolder:
    """A run that has ended, with records that attack the page and some of each verdict."""
    text = f"<think>\n{ATTACK}\n</think>\n\n\u202e{ATTACK}\x00"
    cut = len("<think>\n") + len(ATTACK)
    hostile = record(ATTACK, 0, text=text, parts=Parts(8, cut, cut + 11, len(text)), labels=("bad_text",))
    failed = record("refused", 1, text="", parts=Parts(0, 0, 0, 0), labels=("request_refused",), error=ATTACK)
    fine = [record(f"k{number}", number + 2) for number in range(5)]
    folder = run_folder(tmp_path / "run", [hostile, *fine, failed])
    folder.log(0).write_text(f"{ATTACK}\n")
    status = folder.status()
    assert status is not None
    folder.write_status(msgspec.structs.replace(status, message=ATTACK, labels={ATTACK: 1}, gate=GATE))
    return folder


def until(page: Page, script: str, argument: object = None) -> None:
    """Until a function of the page says yes; Playwright's own wait needs eval, which the page's policy forbids."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(script, argument):
        assert time.monotonic() < deadline, f"{script} {argument}"
        page.wait_for_timeout(100)


def number(page: Page, name: str) -> int:
    return int(page.inner_text(f"#{name}").replace(",", ""))


def counts(page: Page) -> dict[str, int]:
    return {name: number(page, name) for name in COUNTS}


def status(folder: Path) -> dict[str, Any]:
    """As `tokenmill status --json` has it."""
    command = [sys.executable, "-m", "tokenmill", "status", str(folder), "--json"]
    told: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
    return told


def safe(page: Page) -> bool:
    """Whether what attacks has stayed text: the page has no element of it and its title."""
    elements = page.evaluate("document.querySelectorAll('main img, main script, main b').length")
    return elements == 0 and "hacked" not in page.title()


def listed(page: Page) -> None:
    """Wait until the records that were asked for last are shown."""
    page.wait_for_selector("#records[aria-busy=false]")


def points(page: Page) -> str:
    """What the first chart tells of its last point."""
    return page.inner_text("figure .readout >> nth=0")


def faults(page: Page) -> list[tuple[str, str]]:
    """What axe-core finds that is serious: the rule, and the first element that breaks it."""
    axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    page.evaluate(f"{axe};0")
    found = page.evaluate("axe.run()")["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]


@pytest.mark.timeout(120)
def test_a_live_run_is_followed_until_it_ends(browser: Browser, llama: Case) -> None:
    running = llama.start()
    wait_until(lambda: llama.done() > 2, running, 45.0)
    with served(llama.run_path) as url, opened(browser, url) as page, opened(browser, url, width=360) as other:
        before = counts(page)
        told = status(llama.run_path)["prompts"]
        assert page.inner_text("#fresh") == "live"
        assert page.locator("#rows tr").count() == 2
        seen = points(page)
        until(page, "was => document.querySelector('figure .readout').textContent !== was", seen)
        until(page, "was => document.getElementById('accepted').textContent !== was", str(before["accepted"]))
        until(page, "least => parseInt(document.getElementById('accepted').textContent) >= least", told["accepted"])
        assert before["accepted"] <= told["accepted"]
        assert sum(counts(page).values()) == told["total"] == PROMPTS
        assert faults(other) == []
        running.terminate()
        assert llama.wait(running) == 130, llama.output()
        for one in (page, other):
            until(one, "() => document.getElementById('state').textContent === 'stopped'")
            until(one, "() => document.getElementById('fresh').textContent.startsWith('ended')")
        found = status(llama.run_path)
        assert counts(page) == counts(other) == {name: found["prompts"][name] for name in COUNTS}
        assert number(page, "tokens") == found["tokens"]
        assert page.locator("#timeline .track").count() == 2
        assert page.locator("#timeline .s-ready").count() == 2
        page.click("#newest")
        listed(page)
        assert SHORT in page.inner_text("#records article >> nth=0")
        assert safe(page)
        page.select_option("#log", "1")
        until(page, "() => document.getElementById('lines').textContent.length > 100")


def test_what_attacks_the_page_stays_text(browser: Browser, ended: RunFolder) -> None:
    with served(ended.path) as url, opened(browser, url, shows="#records article") as page:
        page.click("#worst")
        listed(page)
        shown = page.inner_text("#records article >> nth=0")
        assert shown.count(ATTACK) >= 3  # key, thought, answer
        assert "⟨U+202E⟩" in shown
        assert "␀" in shown
        page.click("#records article >> nth=0 >> text=Whole record")
        page.wait_for_selector("#records .whole")
        assert "whole output" in page.inner_text("#records .whole")
        page.select_option("#log", "0")
        until(page, "() => document.getElementById('lines').textContent.includes('onerror')")
        assert ATTACK in page.inner_text("#labels")
        assert page.locator("#gate li").all_inner_texts() == [
            "rejected 10.0% of 20% allowed (worst cohort 15.0%)",
            "cut off 0.0% of 50%",
        ]
        assert page.locator("#gate .warn").count() == 1
        assert page.inner_text("#message") == ATTACK
        page.select_option("#label", "request_refused")
        listed(page)
        assert "refused" in page.inner_text("#records h3 >> nth=0")
        assert safe(page)


def test_no_serious_fault_of_accessibility_and_nothing_beyond_the_edge(browser: Browser, ended: RunFolder) -> None:
    with served(ended.path) as url:
        for width, scheme in ((360, "light"), (360, "dark"), (1200, "light"), (1200, "dark")):
            with opened(browser, url, width=width, scheme=scheme, shows="#records article") as page:
                page.click("#worst")
                listed(page)
                assert page.locator("#records .bad").count() > 0
                assert faults(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                back = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, back[4:-1].split(","))) < 100) == (scheme == "dark")


def test_everything_is_reached_by_keyboard(browser: Browser, ended: RunFolder) -> None:
    with served(ended.path) as url, opened(browser, url, shows="#records article") as page:
        met: list[str] = []
        while "key" not in met and len(met) < 60:
            page.keyboard.press("Tab")
            met.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert met[0] == "skip"
        for name in ("log", "lines", "newest", "worst", "label", "key"):
            assert name in met, met
        page.keyboard.type("k3")
        page.keyboard.press("Enter")
        listed(page)
        assert page.locator("#records article").count() == 1
        assert "k3" in page.inner_text("#records h3")
        page.focus("figure >> nth=0 >> [role=img]")
        last = points(page)
        page.keyboard.press("ArrowLeft")
        assert points(page) != last


def test_a_token_opens_the_page_once_and_for_all(browser: Browser, ended: RunFolder) -> None:
    token = "a-token-of-some-length"
    with served(ended.path, "--token", token) as url:
        context = browser.new_context()
        page = context.new_page()
        answer = page.goto(url)
        assert answer is not None
        assert answer.status == 401
        page.goto(f"{url}?token={token}")
        page.wait_for_selector("#records article")
        assert page.url == url  # the token has left the address
        assert token not in page.evaluate("document.cookie + document.referrer")
        page.reload()
        page.wait_for_selector("#records article")
        context.close()


HIDE = """hidden => {
    Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""


def test_a_page_that_was_hidden_goes_on(browser: Browser, ended: RunFolder) -> None:
    with served(ended.path) as url, opened(browser, url, shows="#records article") as page:
        page.evaluate(HIDE, True)
        before = ended.status()
        assert before is not None
        ended.write_status(msgspec.structs.replace(before, tokens=4321, updated=time.time()))
        page.evaluate(HIDE, False)
        until(page, "() => document.getElementById('tokens').textContent === '4,321'")


def test_what_is_no_request_is_refused_and_fills_no_terminal(ended: RunFolder) -> None:
    with served(ended.path) as url:  # which fails where a traceback was printed
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /%b HTTP/1.1\r\n" % (b"a" * 99_999)):
            with socket.create_connection(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])), 10.0) as client:
                client.sendall(words)
                assert client.recv(99).startswith(b"HTTP/1.0 400 ")

"""Debian's chromium, and `tokenmill serve` as a process of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.conftest import free_port
from tests.harness import wait_for_port

FLAGS = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)

ROOTS = ("--no-sandbox",) if os.geteuid() == 0 else ()
"""Chromium's sandbox refuses to be root's, as CI is."""

WAIT_MS = 20_000
"""For whatever the page is to show: fifty times what it takes."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Fails where a chromium is there and does not work. Of one module: as long as it is open, its loop runs."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("NO chromium HERE (apt-get install chromium): the page is NOT tested in a browser on this machine")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *ROOTS])
        yield made
        made.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1200, scheme: str = "light", shows: str = "#state"
) -> Iterator[Page]:
    """A page of a browser profile of its own, once it shows a run; fails if anything on it went wrong."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=width < 500,
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    page.on(
        "request", lambda request: None if request.url.startswith(url.split("?")[0]) else trouble.append(request.url)
    )
    try:
        page.goto(url)
        page.wait_for_selector(shows)
        page.wait_for_selector("#state:not(:text-is('…'))")
        yield page
    finally:
        context.close()
    assert trouble == []


@contextmanager
def served(folder: Path, *words: str) -> Iterator[str]:
    """`tokenmill serve`, for the scope; its address."""
    port = free_port()
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--port", str(port), *words]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            wait_for_port(port, 30.0)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()
            said, code = process.stdout.read(), process.wait(20)
    assert f":{port}/" in said
    assert (code, "Traceback" in said) == (0, False), said

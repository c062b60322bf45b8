"""What all tests share: the long forms' switch, free ports, a scripted fleet's config, a slow mount."""

import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Case
from tests.slowfs import mounted
from tokenmill.machine.ports import INTERNAL_OFFSET

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms, too (minutes)")


LONGEST_FIRST = ("bench", "ray", "browser", "chaos", "cases", "contract")
"""Of tests that run side by side: a minute that begins last is a minute on one core. The short ones fill the gaps."""


@pytest.hookimpl(trylast=True)  # pytest-randomly has shuffled them; within a folder they stay so
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(ROOT / "tests").parts[0], len(places)))
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="a long form: make full"))
        for name in ("vllm", "gpu", "loaders"):
            if item.get_closest_marker(name) and name not in (config.getoption("-m") or ""):
                item.add_marker(pytest.mark.skip(reason=f"needs what CI has not: pytest -m {name}"))


_FIRST, _LAST = 20000, 30000
_WORKERS, _STEP = 4, 20
"""`-n 4` at most: each of pytest-xdist's processes has its own share of the ports: two would find the same one free."""

_share = (_LAST - _FIRST) // _WORKERS
_http = _share - INTERNAL_OFFSET - 100  # servers' internal ports stand that far behind their HTTP ports
_start = _FIRST + _share * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS)
_next_port = _start + random.SystemRandom().randrange(0, _http, _STEP)


@pytest.fixture
def port() -> int:
    return free_port()


def free_port() -> int:
    """A first HTTP port with room behind it, free now: below the kernel's own range, so that nobody else takes it."""
    global _next_port
    while True:
        _next_port += _STEP
        if _next_port >= _start + _http:
            _next_port = _start
        if all(_is_free(number) for number in range(_next_port, _next_port + 8)):
            return _next_port


def _is_free(number: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            return False
    return True


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """40 prompts with ids p0 … p39."""
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, 40)
    return path


def write_prompts(path: Path, count: int, start: int = 0) -> None:
    with path.open("a") as out:
        for number in range(start, start + count):
            out.write(
                json.dumps({"id": f"p{number}", "prompt": f"Question number {number}: what is {number} + 1?"}) + "\n"
            )


@pytest.fixture
def case(tmp_path: Path, port: int) -> Iterator[Case]:
    """A scripted fleet over 40 prompts; whatever it leaves behind is ended."""
    write_prompts(tmp_path / "prompts.jsonl", 40)
    made = Case(tmp_path, port)
    yield made
    made.cleanup()


Slow = Callable[..., Path]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    """Mounts a folder as a slow file system, a real one: slow(folder, "--latency-ms", "4") → where it is.

    Fails where /dev/fuse is there and does not work: what is shown on it must not go unseen.
    """
    if not Path("/dev/fuse").exists():
        pytest.skip("NO /dev/fuse HERE: staging from a slow mount is NOT tested on this machine")
    with ExitStack() as mounts:

        def mount(source: Path, *flags: str) -> Path:
            return mounts.enter_context(mounted(source, tmp_path / f"mount-{source.name}", *flags))

        yield mount

"""What a run ran on, written down while it is known: one row in environment.jsonl for each machine or version it met.

For the report, whose reader was not there. Nothing is decided by it; what cannot be read stays empty.
"""

import os
import platform
import time
from collections import Counter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tokenmill import __version__, linefile
from tokenmill.config import Config
from tokenmill.errors import PreflightError
from tokenmill.folder import RunFolder
from tokenmill.machine import gpus, nvml
from tokenmill.machine.gpus import Gpu


class Environment(msgspec.Struct, frozen=True):
    """`t` is when it was first seen, Unix time. `gpus` are the cards that the run may use, "7 × NVIDIA H200, 139 GiB";
    memory in bytes."""

    t: float
    tokenmill: str
    python: str
    engine: str
    engine_version: str
    system: str
    kernel: str
    processor: str
    cores: int
    memory: int
    driver: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()


_decode = msgspec.json.Decoder(Environment)


async def note(config: Config, folder: RunFolder, engine_version: str) -> None:
    """Writes down what this start runs on, unless the last row says the same."""
    cards: list[Gpu] = []
    if config.fleet.gpus != "none" and not config.engine.addresses:
        try:
            cards = gpus.choose(await nvml.answer(), config.fleet.gpus)
        except PreflightError:
            pass  # the node says it, and decides
    row = look(config.engine.kind, engine_version, cards)
    before = read(folder.environment)
    if not before or replace(before[-1], t=row.t) != row:
        try:
            linefile.append(folder.environment, msgspec.json.encode(row))
        except OSError:
            pass  # the store says it if the disk is full


def look(engine: str, engine_version: str, cards: list[Gpu]) -> Environment:
    """This machine, now."""
    told = Counter(f"{card.name}, {card.memory_total / 2**30:.0f} GiB" for card in cards)
    return Environment(
        t=round(time.time(), 3),
        tokenmill=__version__,
        python=platform.python_version(),
        engine=engine,
        engine_version=engine_version,
        system=_system(),
        kernel=platform.release(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        driver=next((card.driver for card in cards if card.driver), ""),
        cuda=next((".".join(map(str, card.cuda)) for card in cards if card.cuda), ""),
        gpus=tuple(f"{count} × {name}" for name, count in told.items()),
    )


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def read(path: Path) -> list[Environment]:
    """All rows; a torn one is left out."""
    return [row for row, _ in linefile.read(path, _decode)]

"""What a run ran on, written down while it is known: one row in environment.jsonl for each machine or version it met.
A node's row comes to the head with its status.

For the report, whose reader was not there. Nothing is decided by it; what cannot be read stays empty.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tokenmill import __version__, linefile
from tokenmill.config import Config
from tokenmill.core.environment import Environment, unlike
from tokenmill.core.status import NodeStatus
from tokenmill.errors import PreflightError
from tokenmill.events import Event, EventLog, now
from tokenmill.folder import RunFolder
from tokenmill.machine import gpus, nvml
from tokenmill.machine.gpus import Gpu

_decode = msgspec.json.Decoder(Environment)


class Census:
    """What a run runs on, in environment.jsonl: a row for each machine that is not as its last row says. Nodes that are
    unlike the first are told of, each once."""

    def __init__(self, folder: RunFolder, log: EventLog) -> None:
        self._path = folder.environment
        self._log = log
        self._last = {row.node: row for row in read(folder.environment)}
        self._first: Environment | None = None
        self._told: dict[str, str] = {}

    async def note_head(self, config: Config, engine_version: str) -> None:
        """Writes down what this start runs on; its nodes' cards are theirs to tell."""
        cards: list[Gpu] = []
        if config.fleet.cluster == "local" and config.gpus != "none":
            try:
                cards = gpus.choose(await nvml.answer(), config.gpus)
            except PreflightError:
                pass  # the node says it, and decides
        self._keep(look(config.engine.kind, engine_version, cards))

    def note(self, nodes: Sequence[NodeStatus]) -> None:
        """Writes down what nodes run on, where there are several."""
        for row in (status.environment for status in nodes if status.node and status.environment):
            self._keep(row)
            self._first = self._first or row
            words = unlike(row, self._first)
            if words and words != self._told.get(row.node):
                text = f"unlike node {self._first.node}: {words}"
                self._log.add(Event(now(), "node", text, level="warn", node=row.node))
            self._told[row.node] = words

    def _keep(self, row: Environment) -> None:
        before = self._last.get(row.node)
        if before is not None and replace(before, t=row.t) == row:
            return
        self._last[row.node] = row
        try:
            linefile.append(self._path, msgspec.json.encode(row))
        except OSError:
            pass  # the store says it if the disk is full


def look(engine: str, engine_version: str, cards: Sequence[Gpu], node: str = "") -> Environment:
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
        node=node,
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

"""What a check looks at and what it finds."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tokenmill import plugins
from tokenmill.config import Config
from tokenmill.engines.base import Engine
from tokenmill.errors import PreflightError
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.launch import python_of
from tokenmill.machine import filesystems, gpus, kernellog, nvml, packages, room
from tokenmill.machine.filesystems import Mount
from tokenmill.machine.gpus import Gpu
from tokenmill.machine.packages import Package
from tokenmill.machine.probe import Probe, probe
from tokenmill.machine.room import Room

Level = Literal["ok", "warn", "fail", "unknown"]
Reading = TypeVar("Reading")


class Finding(msgspec.Struct, frozen=True):
    """`subject` is what it is about: a file, a card, a key of the config. `values` are the numbers behind the words."""

    check: str
    level: Level
    subject: str
    message: str
    fix: str = ""
    values: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """The message, with its subject in front where it does not name it."""
        return self.message if self.subject in self.message else f"{self.subject}: {self.message}"


@dataclass
class Context:
    """What checks look at. `ours` are the run's own living servers; `thorough` reads the whole prompt set, which a run
    does by itself. Readings are taken once, when first asked for, also by several checks at once; tests hand in others.
    """

    config: Config
    folder: RunFolder
    ours: list[ServerEntry]
    thorough: bool = True
    read_gpus: Callable[[], list[Gpu]] = nvml.read
    read_kernel_log: Callable[[], str | None] = kernellog.read
    read_package: Callable[..., Package] = packages.read
    read_mounts: Callable[[], str] = filesystems.read_mounts
    read_room: Callable[[], Room] = room.read
    read_speed: Callable[[Path], Probe] = probe
    _taken: dict[str, Any] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def _once(self, name: str, take: Callable[[], Reading]) -> Reading:
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._taken:
                try:
                    self._taken[name] = take()
                except PreflightError as error:  # it may have taken a minute to find out
                    self._taken[name] = error
            reading: Reading | PreflightError = self._taken[name]
        if isinstance(reading, PreflightError):
            raise reading
        return reading

    @property
    def engine(self) -> Engine:
        engine: Engine = self._once("engine", lambda: plugins.load("engines", self.config.engine.kind)())
        return engine

    @property
    def package(self) -> Package:
        """The engine's distribution in its own environment; raises PreflightError where the interpreter fails."""
        engine, sources = self.config.engine, self.engine
        words = (python_of(self.config), sources.package, sources.flag_sources, engine.env)
        return self._once("package", lambda: self.read_package(*words))

    def mount_of(self, path: Path) -> Mount:
        """What a path lies on, its links resolved."""
        return filesystems.mount_of(path, self._once("mounts", self.read_mounts))

    @property
    def gpus(self) -> list[Gpu]:
        """All cards; raises PreflightError where NVML cannot be had, which the check of the cards tells."""
        return self._once("gpus", self.read_gpus)

    @property
    def cards(self) -> list[Gpu]:
        """The cards that this run may use, none where it uses none or they cannot be read: for other checks."""
        if self.config.gpus == "none":
            return []
        try:
            return gpus.choose(self.gpus, self.config.gpus)
        except PreflightError:
            return []

    @property
    def cuda_compat(self) -> bool:
        """Whether a newer CUDA than the driver's may be reached by NVIDIA's compatibility libraries."""
        return any(Path("/usr/local").glob("cuda*/compat*/libcuda.so*"))

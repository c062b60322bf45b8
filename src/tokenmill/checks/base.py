"""What a check looks at and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from tokenmill import plugins
from tokenmill.config import Config
from tokenmill.engines.base import Engine
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.launch import python_of
from tokenmill.machine import gpus, packages
from tokenmill.machine.gpus import Gpu
from tokenmill.machine.packages import Package

Level = Literal["ok", "warn", "fail", "unknown"]


class Finding(msgspec.Struct, frozen=True):
    check: str
    level: Level
    subject: str
    message: str
    fix: str = ""


@dataclass
class Context:
    """What checks look at. Readings are taken once, when first asked for; tests hand in others."""

    config: Config
    folder: RunFolder
    ours: list[ServerEntry]
    read_gpus: Callable[[], list[Gpu]] = gpus.read

    @cached_property
    def engine(self) -> Engine:
        engine: Engine = plugins.load("engines", self.config.engine.kind)()
        return engine

    @cached_property
    def package(self) -> Package:
        engine = self.config.engine
        return packages.read(python_of(self.config), self.engine.package, self.engine.flag_sources, engine.env)

    @cached_property
    def gpus(self) -> list[Gpu]:
        return self.read_gpus()

"""What all servers of a node are launched with in place of the config's own arguments: less memory, after one of them
ran out of it while it captured graphs. Once: what is not enough then is for a person to decide."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.engines.base import Engine, normal


class Tuning:
    """`args` are the changes, of this life or of an earlier one (`recall`)."""

    def __init__(self, engine: Engine, configured: Mapping[str, Any]) -> None:
        self.args: dict[str, Any] = {}
        self._engine = engine
        self._configured = {normal(name): value for name, value in configured.items()}
        self._keep: Callable[[dict[str, Any]], None] = lambda changed: None
        self._words = ""

    def recall(self, changed: Mapping[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
        """Takes over what was changed earlier; `keep` is told of what is changed from now on."""
        self.args, self._keep = dict(changed), keep
        self._words = ", ".join(f"{name} = {value}" for name, value in changed.items())

    def lower(self, launched: Mapping[str, Any]) -> str:
        """After a launch with these changes ran out of memory: what the next one has, in words; empty where nothing is
        left to lower."""
        if launched != self.args:
            return self._words
        found = None if self.args else self._engine.less_memory(self._configured)
        if found is None:
            return ""
        lowered, self._words = found
        self.args = {name: value for name, value in lowered.items() if self._configured.get(name) != value}
        self._keep(self.args)
        return self._words

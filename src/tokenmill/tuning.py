"""What all servers of a node are launched with in place of the config's own arguments: less memory, after one of them
ran out of it while it captured graphs. Once: what is not enough then is for a person to decide."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.engines.base import Engine


class Tuning:
    """`args` are the changes so far, of this run or of an earlier start; `keep` is told of each new one."""

    def __init__(
        self,
        engine: Engine,
        configured: Mapping[str, Any],
        changed: Mapping[str, Any],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self.args = dict(changed)
        self._engine = engine
        self._configured = configured
        self._keep = keep
        self._words = ""

    @property
    def step(self) -> int:
        """Which change a launch has seen: 0 before the first."""
        return 1 if self.args else 0

    def lower(self, step: int) -> str:
        """After a launch at `step` ran out of memory: the change in words; empty where nothing is left to lower."""
        if step < self.step:
            return self._words or ", ".join(f"{name} = {value}" for name, value in self.args.items())
        if self.args:
            return ""
        found = self._engine.less_memory(self._configured)
        if found is None:
            return ""
        lowered, self._words = found
        self.args = {name: value for name, value in lowered.items() if self._configured.get(name) != value}
        self._keep(self.args)
        return self._words

"""Prompts that may kill their servers: those in flight at a death come under suspicion, and are then tried singly.

An engine that asserts on one prompt would take server after server down with it, since the prompt goes back uncharged
each time, and end the run. So what was in flight at two deaths is given to a server only when no other suspect is
there; whatever is there at two more deaths has done it, and fails.
"""

from collections import deque
from dataclasses import dataclass, field

from tokenmill.core.records import Prompt

DEATHS = 2
"""Servers die of many things; in flight at one death is most of the time nobody's fault."""

ALONE = 2
"""Deaths as the only suspect of a server. One more could be chance: a server is killed now and then."""

Id = tuple[str, int, int]


@dataclass(slots=True)
class Suspects:
    """`waiting` are suspects that no server has; `with_server` says which suspect each server has, by its index."""

    waiting: deque[Prompt] = field(default_factory=deque)
    with_server: dict[int, Id] = field(default_factory=dict)
    _deaths: dict[Id, int] = field(default_factory=dict)
    _alone: dict[Id, int] = field(default_factory=dict)

    def died(self, server: int, prompt: Prompt) -> None:
        """A server died with this prompt in flight."""
        known = identity(prompt)
        self._deaths[known] = self._deaths.get(known, 0) + 1
        if self.with_server.get(server) == known:
            self._alone[known] = self._alone.get(known, 0) + 1

    def is_suspect(self, prompt: Prompt) -> bool:
        return self.deaths(prompt) >= DEATHS

    def is_guilty(self, prompt: Prompt) -> bool:
        return self._alone.get(identity(prompt), 0) >= ALONE

    def deaths(self, prompt: Prompt) -> int:
        return self._deaths.get(identity(prompt), 0)

    def take(self, server: int) -> Prompt | None:
        """A suspect for a server that has none."""
        if not self.waiting or server in self.with_server:
            return None
        prompt = self.waiting.popleft()
        self.with_server[server] = identity(prompt)
        return prompt

    def left(self, server: int, prompt: Prompt) -> bool:
        """A prompt is not with a server any more. Whether it was its suspect, and another may come."""
        if self.with_server.get(server) != identity(prompt):
            return False
        del self.with_server[server]
        return True

    def clear(self, prompt: Prompt) -> None:
        """It has a record: whoever killed servers, it was not this one, or it has paid for it."""
        self._deaths.pop(identity(prompt), None)
        self._alone.pop(identity(prompt), None)


def identity(prompt: Prompt) -> Id:
    return prompt.key, prompt.sample, prompt.turn

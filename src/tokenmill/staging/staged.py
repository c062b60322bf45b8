"""The model as servers load it, and how it comes back where its copy has vanished."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.errors import PreflightError, StoppedError
from tokenmill.machine import copies
from tokenmill.machine.copies import Lease
from tokenmill.steps import Tell

LOOK_S = 1.0
"""How often somebody who waits for another server's restart asks whether it is over."""

Halted = Callable[[], bool]


@dataclass
class Staged:
    """The model as servers load it; `path` None where there is nothing to load. Where it is a copy of ours, `lease`
    keeps it from being removed, and `renew` brings it back after somebody else did."""

    path: Path | None
    copy: Path | None = None
    lease: Lease | None = None
    again: Callable[[Tell, Halted], "Staged"] | None = None
    _renewing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What servers inherit, so that the copy is in use as long as one of them lives."""
        return (self.lease.descriptor,) if self.lease else ()

    def missing(self) -> str:
        """What of the copy is gone; empty where it is whole, and where the model lies where it always did."""
        return copies.missing(self.copy) if self.copy else ""

    def renew(self, tell: Tell, halted: Halted) -> None:
        """Stages again, to the same place, unless another server's restart has done so meanwhile.

        Raises PreflightError where the source is another model by now; StoppedError."""
        while not self._renewing.acquire(timeout=LOOK_S):
            if halted():
                raise StoppedError("stopped while the model was staged again")
        try:
            if self.missing():
                self._renew(tell, halted)
        finally:
            self._renewing.release()

    def _renew(self, tell: Tell, halted: Halted) -> None:
        assert self.again is not None
        fresh = self.again(tell, halted)
        if fresh.path != self.path:
            fresh.close()
            raise changed(fresh.path, self.path)
        old, self.lease = self.lease, fresh.lease
        if old is not None:
            old.close()

    def close(self) -> None:
        """Ends our own use of the copy; living servers keep theirs."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None


def changed(new: Path | None, old: Path | None) -> PreflightError:
    """What is said where a run would go on with another model."""
    words = f"the model has changed since this run began: {new} is not {old}"
    return PreflightError(words, fix="start the run again")

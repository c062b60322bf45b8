"""How far a run is: the status that is shown and written to status.json, with its rates and the time to go."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tokenmill.core.efficiency import Meter
from tokenmill.core.eta import Eta
from tokenmill.core.gate import Gate
from tokenmill.core.status import NodeStatus, PromptCounts, RunStatus, ServerStatus, row_of, together
from tokenmill.events import now
from tokenmill.folder import RunFolder
from tokenmill.history import History
from tokenmill.ledger import Ledger
from tokenmill.steps import Told
from tokenmill.store import Store
from tokenmill.view import View

STATUS_S = 1.0
"""How often status.json and the view are renewed."""

LAGS = 15
"""Looks among which the longest lag is told: Prometheus comes every 15 s, and must not miss one between."""


class Progress:
    """`state` is the run's step, in a word; `ledger`, `gate` and `store` are None until the accounts are open; `copied`
    is the time of the newest whole copy, 0 without one; `told` hears of long steps; `last` was published last."""

    def __init__(self, folder: RunFolder, view: View) -> None:
        self.state = "preflight"
        self.message = ""
        self.copied = 0.0
        self.ledger: Ledger | None = None
        self.gate: Gate | None = None
        self.store: Store | None = None
        self.told: Told | None = None
        self.last: RunStatus | None = None
        self._folder = folder
        self._history = History(folder.history)
        self._before = folder.status()
        self._view = view
        self._node: NodeStatus | None = None
        self._nodes: Sequence[NodeStatus] = ()
        self._eta = Eta()
        self._meter = Meter()
        self._began: float | None = None
        self._seconds = 0.0
        self._busy = 0.0
        self._looks = 0
        self._lags: deque[float] = deque(maxlen=LAGS)

    @property
    def in_flight(self) -> int:
        return self._node.in_flight if self._node else 0

    @property
    def servers(self) -> tuple[ServerStatus, ...]:
        return self._node.servers if self._node else ()

    def late(self, seconds: float) -> None:
        """By how much a look came later than it was due."""
        self._lags.append(max(seconds, 0.0))

    def look(self, nodes: Sequence[NodeStatus]) -> None:
        """Takes in the nodes' statuses, about once a second."""
        self._nodes = nodes
        self._node = node = together(nodes)
        if self.state not in ("generating", "draining") or self.ledger is None:
            return
        moment = time.monotonic()
        self._began = self._began or moment
        self._seconds = moment - self._began
        if self.state == "draining":
            return
        counts = self.ledger.counts()
        self._eta.note(moment, counts.done)
        works = {server.name: (server.work, server.peak) for server in node.servers if server.work is not None}
        self._meter.look(moment, works, ending=self.ledger.left <= node.in_flight + node.capacity)
        if node.capacity:
            self._busy += node.in_flight / node.capacity
            self._looks += 1

    @property
    def is_old(self) -> bool:
        """Whether the status was published longer ago than it should be."""
        return self.last is None or now() - self.last.updated >= STATUS_S

    def publish(self) -> None:
        """Writes status.json and renews the view."""
        self.last = status = self.status()
        try:
            self._folder.write_status(status)
        except OSError:
            pass  # the store says it if the disk is full
        self._history.note(status)
        self._view.show(status)

    def status(self) -> RunStatus:
        counts, labels = self._before.prompts if self._before else PromptCounts(), {}
        if self.ledger is not None:
            counts, labels = self.ledger.counts(), dict(self.ledger.labels)
        running = self.state in ("starting", "generating", "draining", "up")
        shown = running or (self.state == "failed" and self.ledger is None)  # which server, and why
        servers = self._node.servers if self._node and shown else ()
        tokens = self._node.tokens if self._node else 0
        mean = tokens / self._seconds if self._seconds else 0.0
        left = self._eta.estimate(counts.pending, self.in_flight) if running and self.state != "draining" else None
        step = (self._node.step if self._node else None) or (self.told.step if self.told else None)
        return RunStatus(
            run=self._folder.path.name,
            state=self.state,
            prompts=counts,
            servers=servers,
            tokens_per_s=round(sum(server.tokens_per_s for server in servers) if running else mean, 1),
            eta_s=round(left.likely_s) if left else None,
            slots_busy=round(self._busy / self._looks, 4) if self._looks else None,
            tokens=tokens,
            seconds=round(self._seconds, 1),
            labels=labels,
            message=self.message,
            updated=now(),
            copied=self.copied,
            findings=self._node.findings if self._node else (),
            written=self.store.written if self.store else 0.0,
            loop_lag_s=round(max(self._lags, default=0.0), 4),
            eta_low_s=round(left.low_s) if left else None,
            eta_high_s=round(left.high_s) if left and left.high_s is not None else None,
            gate=self.gate.shares() if self.gate else (),
            step=step,
            efficiency=self._meter.efficiency,
            nodes=tuple(row_of(node) for node in self._nodes if node.node),
        )


@asynccontextmanager
async def published(progress: Progress) -> AsyncIterator[None]:
    """Renews status.json and the view for the scope, unless somebody who has news does."""

    async def renew() -> None:
        while True:
            if progress.is_old:
                progress.publish()
            due = time.monotonic() + STATUS_S
            await asyncio.sleep(STATUS_S)
            progress.late(time.monotonic() - due)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)

"""A node on another machine: the same node, and what it needs to live on for a while without its run.

A head (the process that owns the run folder) takes parcels of results and acknowledges each with the next call, so that
a record is given up only once it is stored, and nothing else of a parcel before that has arrived. A node that hears
nothing of its head for SILENT_S goes on with the prompts that it has and spools its records on its own disk, as journal
lines; a new head gets them, and hears which prompts are in hand still. After `fleet.wait_for_head` it ends its servers;
what is spooled stays.

Everything of a node lies in `nodes/NAME` of the run folder, at the same path on its own machine. Knows nothing of Ray.
"""

import asyncio
import time
import traceback
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from tokenmill import __version__, errors
from tokenmill.checks.base import Context
from tokenmill.cluster.base import Node, Results
from tokenmill.config import Config
from tokenmill.core import status
from tokenmill.core.dispatch import Id, id_of
from tokenmill.core.records import Again, Prompt, Record
from tokenmill.core.status import NodeStatus
from tokenmill.doctor import NODE_CHECKS, examine, refuse
from tokenmill.errors import PluginError, PreflightError, TokenmillError, UsageError, boundary
from tokenmill.events import Event, now
from tokenmill.folder import RunFolder
from tokenmill.leftovers import survivors, sweep
from tokenmill.machine import nvml
from tokenmill.machine.gpus import lent
from tokenmill.node import RESULTS_WAIT_S, LocalNode
from tokenmill.spool import Spool

SILENT_S = 5.0
"""A head asks at least once a second; a full disk or a stopped process may keep it for a moment."""

QUIET_S = 3.0
"""A head that lives asks every second: after this one may be followed by another."""

LINGER_S = 0.03
"""Records of so long travel together: a parcel costs its head 1 ms, and an answer may wait 50 ms for its write."""

LOOK_S = 0.5
"""Between two looks at whether a head asks."""

MOST_EVENTS = 1000
"""Told to the next head; a node without one does little."""

Item = TypeVar("Item")


class Order(msgspec.Struct, frozen=True):
    """What a node is to do: the run's config as JSON, the id of its settings, the node's name, checks to leave out.
    `head` is who says so, in words that no other process has, `version` its tokenmill."""

    config: str
    settings: str
    node: str
    skip: tuple[str, ...] = ()
    head: str = ""
    version: str = __version__


class Trouble(msgspec.Struct, frozen=True):
    """A TokenmillError as a message: `kind` is its class."""

    kind: str
    text: str
    fix: str

    def error(self) -> TokenmillError:
        """The error again, of its own class where there is one."""
        found = getattr(errors, self.kind, TokenmillError)
        made: TokenmillError = found(self.text, fix=self.fix)
        return made


def _trouble(error: TokenmillError) -> Trouble:
    return Trouble(type(error).__name__, str(error), error.fix)


def _refusal(error: TokenmillError) -> bytes:
    return msgspec.json.encode(_trouble(error))


class Parcel(msgspec.Struct, frozen=True):
    """Results with the number by which their receipt is acknowledged; `trouble` is why the node has ended."""

    number: int
    results: Results
    trouble: Trouble | None = None


class _Unheard(Generic[Item]):
    """What goes with every parcel until one has arrived. `sent` was in the last one, `waiting` came after it."""

    def __init__(self) -> None:
        self.sent: list[Item] = []
        self.waiting: list[Item] = []

    def add(self, items: Iterable[Item]) -> None:
        self.waiting += items

    def send(self) -> list[Item]:
        self.sent, self.waiting = [*self.sent, *self.waiting], []
        return self.sent

    def arrived(self) -> None:
        self.sent = []

    def clear(self) -> None:
        self.sent, self.waiting = [], []


def folder_of(config: Config, node: str) -> RunFolder:
    return RunFolder(config.folder / "nodes" / node)


class Outpost:
    """`begin` comes first, from each head anew. All messages are JSON. `deserted` is set once no head has come back in
    time and the servers have ended, be it that a head ended them and did not live to hear of it: nobody needs this
    process any more."""

    def __init__(self, silent_s: float = SILENT_S, quiet_s: float = QUIET_S) -> None:
        self.deserted = asyncio.Event()
        self._silent_s = silent_s
        self._quiet_s = quiet_s
        self._order: Order | None = None
        self._head = ""
        self._node: Node | None = None
        self._life: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._spool: Spool | None = None
        self._unspooled = ""
        """Why the last attempt to spool failed: it is tried twice a second, and told once."""
        self._trouble: Trouble | None = None
        self._doctor: tuple[status.Finding, ...] = ()
        self._held: dict[Id, Prompt] = {}
        self._introduce = False
        """Until the head that is new has heard what is in hand."""
        self._taking = asyncio.Lock()
        """One at a time takes results: a head, or the guard where there is none."""
        self._number = 0
        self._records = _Unheard[Record]()
        self._again = _Unheard[Again]()
        self._events = _Unheard[Event]()
        self._anew: set[Id] = set()
        self._strange: set[Id] = set()
        """Of an earlier head: in hand, spooled or made anew when this one came, which counts them otherwise. What is
        made anew of them is not told of, so that it is dropped there, and the first one stays."""
        self._sent_spooled = 0
        self._heard = time.monotonic()

    async def begin(self, order: bytes) -> bytes | None:
        """A head has come: it meets the node that lives here if that was launched by the same order, else a new one,
        which adopts the servers that fit. Returns the Trouble that there is with that, None where there is none."""
        asked = msgspec.json.decode(order, type=Order)
        if asked.version != __version__:
            words = f"tokenmill is {__version__} here, {asked.version} at the run's head"
            return _refusal(PreflightError(words, fix="install the same on every machine"))
        if await self._serves_another(asked.head):
            words = f"this node works for another run of the same folder: {self._head}"
            return _refusal(UsageError(words, fix="end one of them, or give it another name"))
        try:
            config = Config.model_validate_json(asked.config)
        except ValidationError:  # whose words repeat values, secrets among them
            words = "the tokenmill here cannot read the config of the run's head"
            return _refusal(PreflightError(words, fix="install the same on every machine"))
        self._heard, self._head = time.monotonic(), asked.head
        asked = replace(asked, head="")
        async with self._taking:
            if self._living and asked == self._order:
                self._introduce = True
                self._number += 1  # no head acknowledges what another was sent
                return None
        await self._end_life()
        self._order, self._trouble, self._node, self._held = asked, None, None, {}
        self._again.clear()  # whoever was to make those anew is gone
        self._anew, self._strange = set(), set()
        self._life = asyncio.create_task(self._live(asked), name="node")
        self._guard = asyncio.create_task(self._watch(config.fleet.wait_for_head))
        return None

    async def _serves_another(self, head: str) -> bool:
        """Whether another head than this one goes on to ask: two on one folder come from two machines, each of which
        has a folder of that name. One that was killed falls silent within a second."""
        deadline = time.monotonic() + 2 * self._quiet_s
        while self._living and self._head != head and self._silence() < self._quiet_s:
            if time.monotonic() > deadline:
                return True
            await asyncio.sleep(self._quiet_s / 10)
        return False

    @property
    def _living(self) -> bool:
        return self._life is not None and not self._life.done()

    @property
    def _name(self) -> str:
        return self._order.node if self._order else ""

    async def offer(self, prompts: bytes) -> None:
        """A call that is made twice, since its answer was lost, counts once. An id with another history is another
        question."""
        self._heard = time.monotonic()
        asked = msgspec.json.decode(prompts, type=list[Prompt])
        fresh = [x for x in asked if (held := self._held.get(id_of(x))) is None or held.messages != x.messages]
        if self._node is not None:
            self._held |= {id_of(prompt): prompt for prompt in fresh}
            await self._node.offer(fresh)

    async def results(self, acknowledged: int) -> bytes:
        """The next parcel, as JSON; `acknowledged` is the number of the last one that has arrived."""
        self._heard = time.monotonic()
        await asyncio.sleep(LINGER_S)
        async with self._taking:
            self._heard = time.monotonic()
            if acknowledged == self._number:
                self._arrived()
            results = await self._take()
            if self._introduce:
                # Made for the head before: this one did not ask for them, and knows none of those to be made anew.
                self._put_aside()
                self._again.clear()
                self._strange |= self._held.keys() | self._anew
            records, events, again = self._records.send(), self._events.send(), tuple(self._again.send())
            handed = self._spool.read() if self._spool is not None and self._spool.rows else ()
            if self._introduce:
                self._strange.update(map(id_of, handed))
            self._sent_spooled = self._spool.rows if self._spool is not None else 0
            held = tuple(self._held.values()) if self._introduce else ()
            self._number += 1
            ended = results.ended and not (records or events or handed)
            whole = Results(
                records, events, results.credits, results.rendering, ended, again, results.capacity, handed, held
            )
            return msgspec.json.encode(Parcel(self._number, whole, self._trouble if ended else None))

    def _arrived(self) -> None:
        """The last parcel has; what came after it has not gone out."""
        self._records.arrived()
        self._again.arrived()
        self._events.arrived()
        self._introduce = False
        if self._spool is not None and self._spool.rows and self._sent_spooled == self._spool.rows:
            self._spool.clear()

    async def _take(self) -> Results:
        """What the node gives now goes to what is unheard."""
        if self._node is None:
            if self._life is not None:
                await asyncio.wait([self._life], timeout=RESULTS_WAIT_S)
            return Results([], [], 0, ended=not self._living)
        results = await self._node.results()
        for record in results.records:
            self._held.pop(id_of(record), None)
        self._records.add(results.records)
        self._anew.update(map(id_of, results.again))
        self._again.add(old for old in results.again if id_of(old) not in self._strange)
        self._events.add(results.events)
        return results

    async def status(self) -> bytes:
        self._heard = time.monotonic()
        found = await self._node.status() if self._node else NodeStatus(self._name, (), state="doctor")
        return msgspec.json.encode(replace(found, doctor=self._doctor))

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        """As a node's stop."""
        self._heard = time.monotonic()
        if self._node is not None:
            await self._node.stop(grace_s, keep)
        elif self._life is not None:
            self._life.cancel()

    async def dismiss(self) -> None:
        """Its run is dead and is not waited for: as if no head had come back in time."""
        await self.stop(0.0, keep=False)
        await self._drained()
        asyncio.get_running_loop().call_later(LOOK_S, self.deserted.set)  # this call's answer goes first

    # -- its life ----------------------------------------------------------------------------------------------------
    async def _live(self, order: Order) -> None:
        try:
            with boundary("node"):
                await self._serve(order)
        except TokenmillError as error:
            self._trouble = _trouble(error)
            if isinstance(error, PluginError):
                traceback.print_exception(error)  # a bug: its place stands in this process' own log and nowhere else
        except asyncio.CancelledError:
            pass  # stopped before there was a node

    async def _serve(self, order: Order) -> None:
        config = Config.model_validate_json(order.config)
        folder = folder_of(config, order.node)
        if isinstance(config.gpus, list):
            lent(await nvml.answer(), config.gpus)
        with folder.own("node"):
            self._spool = Spool(folder.path / "spool.jsonl")
            sweep(folder)
            living = survivors(folder)
            context = Context(config, folder, living, thorough=False)
            skip = tuple(name for name in order.skip if name in NODE_CHECKS)
            findings = await asyncio.to_thread(examine, context, skip, checks=NODE_CHECKS)
            told = [finding for finding in findings if finding.level in ("warn", "unknown")]
            self._doctor = tuple(status.Finding(x.check, "", x.text, x.fix) for x in told)
            for finding in self._doctor:
                words = f"{finding.kind}: {finding.text}"
                self._say("doctor", words, finding.fix)
            refuse(findings)
            self._node = node = LocalNode(config, folder, order.settings, living, order.node)
            await node.run()

    async def _end_life(self) -> None:
        """The servers go on: the next life adopts those that fit and ends the others."""
        if self._guard is not None:
            self._guard.cancel()
        if self._living and self._order is not None:
            await self.stop(0.0, keep=True)
            await self._drained()
            folder = folder_of(Config.model_validate_json(self._order.config), self._order.node)
            try:
                folder.write_servers(folder.state().servers, keep=False)  # or nobody would end them if that life fails
            except OSError:
                pass  # a full disk: the next life says so
        else:
            await self._drained()

    async def _drained(self) -> None:
        """Keeps what a node that was stopped, or has ended by itself, still gives."""
        ended = False
        while not ended:
            ended = not self._living
            async with self._taking:
                await self._keep()

    async def _keep(self) -> None:
        """Takes what has come, for the next head."""
        await self._take()
        del self._events.waiting[:-MOST_EVENTS]
        self._put_aside()

    async def _watch(self, patience_s: float) -> None:
        """Keeps what comes while no head asks for it, and ends the servers when none has come for `patience_s`. Where a
        head has ended them and is gone itself, nobody else ends this process, which may hold GPUs of Ray's."""
        while not self.deserted.is_set():
            await asyncio.sleep(min(LOOK_S, self._silent_s))
            if self._silence() < self._silent_s:
                continue
            living = self._living
            async with self._taking:
                if self._silence() >= self._silent_s:
                    await self._keep()
            if self._silence() >= patience_s:
                self._say("node", f"no head for {patience_s:.0f} s: it ends its servers")
                await self.stop(0.0, keep=False)
                await self._drained()
                self.deserted.set()
            elif not living:
                self.deserted.set()

    def _silence(self) -> float:
        return time.monotonic() - self._heard

    def _put_aside(self) -> None:
        """Records go onto the disk, with those that were sent and may not have arrived; they stay in memory where the
        disk does not take them."""
        records = [*self._records.sent, *self._records.waiting]
        if records and self._spool is not None:
            try:
                self._spool.append(records)
            except OSError as error:
                words = f"{self._spool.path} cannot be written: {error.strerror}"
                if words != self._unspooled:
                    self._say("node", words, f"df -h {self._spool.path.parent}")
                self._unspooled = words
            else:
                self._records.clear()
                self._unspooled = ""

    def _say(self, kind: str, text: str, fix: str = "") -> None:
        self._events.add([Event(now(), kind, text, "", "warn", fix, node=self._name)])

"""One node per machine of a Ray cluster: a detached actor on each machine with GPUs, or on each with gpus = "none".

The only file that imports ray. An actor is bound to its machine and named by the run folder and Ray's name of the
machine, so that a head that is started again meets it. It takes the machine's GPUs as Ray resources; engines are its
plain child processes and know nothing of Ray. What goes over the wire is JSON, as the contract tests have it.

The config, which may hold secrets for the engines, travels from head to node as a call's argument: never as an actor's
own, which Ray's head keeps, and never on a command line.
"""

import asyncio
import logging
import re
import signal
import threading
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import msgspec
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from ray import exceptions
from tokenmill.cluster.base import Node, Results
from tokenmill.cluster.post import BEGIN_S, Post
from tokenmill.config import Config
from tokenmill.core.records import Prompt
from tokenmill.core.status import NodeStatus
from tokenmill.errors import (
    GateError,
    NodeLostError,
    NoServerError,
    PreflightError,
    TokenmillError,
    UsageError,
    boundary,
)
from tokenmill.events import Event, EventLog, now
from tokenmill.machine.ports import answers
from tokenmill.outpost import Order, Parcel

NAMESPACE = "tokenmill"

CALL_S = 60.0
"""A call that takes this long has no living node behind it: the longest wait of a node is a second."""

AGAIN_S = 2.0
"""After a call that Ray could not deliver, while it thinks that the actor lives."""

LOOK_S = 2.0
"""Between two looks for machines that have joined."""

RETRY_S = 10.0
"""Before an actor is made anew on a machine that has lost one."""

HEAD_GONE_S = 45.0
"""Ray ends our process when its head has been away for 60 s: before that, we end in good order."""

STATUS_S = 5.0

MEET_S = 20.0
"""A node that lives answers within a second; one that does not is waited for no longer."""

SERVERS_OUTLIVE = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Ray ends an actor's children with it: a server that lives on is adopted, and a reload costs minutes."""

FATAL = (GateError,)
"""Trouble of one node that would be every node's."""

T = TypeVar("T")


class RayNode:
    """The head's end of a node. `done` is set when it has ended or is lost; `trouble` says why, where it was one.
    With `is_left` it counts as lost, whatever it says."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.trouble: TokenmillError | None = None
        self.done = asyncio.Event()
        self.last = NodeStatus(name, ())
        self.is_left = False
        self._first: Results | None = None
        self._actor = actor
        self._acknowledged = 0

    async def begin(self, order: Order) -> None:
        """Introduces this head, and hears what the node has from before."""
        await self._ask(self._actor.begin.remote(msgspec.json.encode(order)), BEGIN_S)
        self._first = await self.results()

    async def credits(self) -> int:
        return (await self.status()).credits

    async def offer(self, prompts: list[Prompt]) -> None:
        message = msgspec.json.encode(prompts)
        await self._again(lambda: self._actor.offer.remote(message))

    async def results(self) -> Results:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        found = await self._again(lambda: self._actor.results.remote(self._acknowledged))
        parcel = msgspec.json.decode(found, type=Parcel)
        self._acknowledged = parcel.number
        if parcel.results.ended:
            self.trouble = parcel.trouble.error() if parcel.trouble else None
            self.done.set()
        return parcel.results

    async def status(self) -> NodeStatus:
        """The last one known where the node does not answer at once."""
        try:
            found = await self._ask(self._actor.status.remote(), STATUS_S)
            self.last = msgspec.json.decode(found, type=NodeStatus)
        except (NodeLostError, TimeoutError, exceptions.ActorUnavailableError):
            pass  # whoever takes its results finds out
        return self.last

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        if not self.done.is_set():
            try:
                await self._again(lambda: self._actor.stop.remote(grace_s, keep))
            except NodeLostError:
                pass

    def kill(self) -> None:
        """The actor's process; its servers are ended or are to be kept."""
        with boundary("ray"):
            ray.kill(self._actor)

    async def _again(self, call: Any) -> Any:
        """A call that is made once more while Ray cannot deliver it; a node knows what it has met before."""
        deadline = time.monotonic() + CALL_S
        while True:
            if self.is_left:
                raise self._lost("Ray's head is gone")
            try:
                return await self._ask(call(), CALL_S)
            except exceptions.ActorUnavailableError:
                if time.monotonic() > deadline:
                    raise self._lost("it cannot be reached") from None
                await asyncio.sleep(AGAIN_S)
            except TimeoutError:
                raise self._lost(f"it has not answered for {CALL_S:.0f} s") from None

    async def _ask(self, answer: Awaitable[T], limit_s: float) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except exceptions.ActorUnavailableError:
            raise
        except exceptions.RayActorError as error:
            words = next((line.strip() for line in str(error).splitlines() if "because" in line), "")
            raise self._lost(words.partition(". ")[0] or "its actor is gone") from error

    def _lost(self, why: str) -> NodeLostError:
        self.done.set()
        return NodeLostError(f"it is lost: {why}")


class RayCluster:
    """A node on every machine of the cluster that fits; one that joins later gets its own. For `run` see Cluster."""

    def __init__(self, config: Config, settings: str, log: EventLog, skip: tuple[str, ...] = ()) -> None:
        self._config = config
        self._settings = settings
        self._log = log
        self._skip = skip
        self._nodes: dict[str, RayNode] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._again_at: dict[str, float] = {}
        self._refused: dict[str, TokenmillError] = {}
        self._joined: asyncio.Queue[Node | None] = asyncio.Queue()
        self._stop: tuple[float | None, bool] | None = None
        self._stopping = asyncio.Event()
        self._gone_tokens = 0
        self._kinds: dict[str, str] = {}
        self._met: list[RayNode] | None = []
        self._own = False
        self._head: tuple[str, int] = ("", 0)

    async def joined(self) -> Node | None:
        return await self._joined.get()

    async def status(self) -> list[NodeStatus]:
        known = list(self._nodes.values())
        living = await asyncio.gather(*(node.status() for node in known if not node.done.is_set()))
        self._tell_unlike(living)
        gone = self._gone_tokens + sum(node.last.tokens for node in known if node.done.is_set())
        return [*living, NodeStatus("", (), tokens=gone)]

    def _tell_unlike(self, nodes: Sequence[NodeStatus]) -> None:
        """Once for each kind of machine beyond the first: answers of unlike ones may differ."""
        for node in nodes:
            if node.made_of and node.made_of not in self._kinds:
                self._kinds[node.made_of] = node.node
                if len(self._kinds) > 1:
                    first, example = next(iter(self._kinds.items()))
                    words = f"unlike the others: it has {node.made_of}; {example} has {first}"
                    self._say("node", words, node.node, "warn")

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        self._stop = (grace_s, keep)
        self._stopping.set()
        await asyncio.gather(*(node.stop(grace_s, keep) for node in self._nodes.values()))

    # -- its life ----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        trouble: TokenmillError | None = None
        try:
            try:
                await asyncio.to_thread(self._connect)
                _take_back_sigterm()
                await self._until_stopped()
            except TokenmillError as error:
                trouble = error
            if isinstance(trouble, NodeLostError):
                for node in self._nodes.values():
                    node.is_left = True  # they live without Ray's head, for as long as a minute
            else:
                await self._end()
        finally:
            for task in self._coming.values():
                task.cancel()
            self._joined.put_nowait(None)
        if trouble is not None:
            raise trouble

    async def _end(self) -> None:
        """Every node's end is waited for: it takes what its servers take, and a lost one is found out. So is one that
        is just beginning; what has not begun by then ends by itself."""
        grace_s, keep = self._stop or (0.0, False)
        if self._coming:
            await asyncio.wait(self._coming.values(), timeout=MEET_S)
        for task in self._coming.values():
            task.cancel()
        nodes = list(self._nodes.values())
        await asyncio.gather(*(node.stop(grace_s, keep) for node in nodes))
        for node in nodes:
            await node.done.wait()
            node.kill()
        await asyncio.to_thread(ray.shutdown)

    async def _until_stopped(self) -> None:
        """Looks for machines until told to stop; raises the trouble that leaves no node."""
        self._say("run", f"Ray at {self._head[0]}:{self._head[1]}{', started for this run' if self._own else ''}")
        without_since, head_seen = time.monotonic(), time.monotonic()
        while not self._stopping.is_set():
            moment = time.monotonic()
            if await asyncio.to_thread(self._head_answers):
                head_seen = moment
                await self._look()
                await self._meet()
            elif moment - head_seen > HEAD_GONE_S:
                words = f"Ray's head at {self._head[0]}:{self._head[1]} has been away for {HEAD_GONE_S:.0f} s"
                raise NodeLostError(words, fix="start Ray again, then this: it goes on where it is")
            self._sort_out()
            if self._nodes:
                without_since = moment
            elif self._refused and not self._coming:
                raise next(iter(self._refused.values()))
            elif moment - without_since > self._config.fleet.give_up:
                raise NoServerError(f"no node for {self._config.fleet.give_up:.0f} s", fix="ray status")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    def _connect(self) -> None:
        """Joins the cluster; with "auto" starts one for this run where there is none. Raises PreflightError."""
        address = self._config.fleet.address
        more: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
        if address != "auto" and not answers(address):
            raise PreflightError(f"nobody answers at fleet.address = {address!r}", fix="ray status --address ADDRESS")
        with boundary("ray"):
            try:
                ray.init(address=address, **more)
            except ConnectionError:
                ray.init(address="local", include_dashboard=False, **more)
                self._own = True
            host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
        self._head = (host, int(port))

    def _head_answers(self) -> bool:
        return answers(f"{self._head[0]}:{self._head[1]}")

    async def _look(self) -> None:
        """Begins with every machine that fits and has no node."""
        with boundary("ray"):
            machines = [machine for machine in await asyncio.to_thread(ray.nodes) if machine["Alive"]]
        names = [_name(machine) for machine in machines]
        for machine, name in zip(machines, names, strict=True):
            if names.count(name) > 1:
                name = f"{name}-{machine['NodeID'][:6]}"
            busy = name in self._nodes or name in self._coming or name in self._refused
            if busy or self._gpus_of(machine) is None or time.monotonic() < self._again_at.get(name, 0.0):
                continue
            self._coming[name] = asyncio.create_task(self._begin(name, machine), name=f"node {name}")

    async def _meet(self) -> None:
        """Nodes that an earlier life left come together: what each of them has in hand must be known before prompts are
        handed out, or they would be asked for twice."""
        if self._met is None:
            return
        with boundary("ray"):
            living = await asyncio.to_thread(list_named_actors)
        tasks = [task for name, task in self._coming.items() if self._title(name) in living]
        if tasks:
            await asyncio.wait(tasks, timeout=MEET_S)
        for node in self._met:
            self._joined.put_nowait(node)
        self._met = None

    def _title(self, name: str) -> str:
        """The name of a node's actor."""
        return f"{self._config.folder} {name}"

    def _gpus_of(self, machine: dict[str, Any]) -> int | None:
        """How many GPUs its node takes of Ray; None where a machine has not enough."""
        gpus, there = self._config.fleet.gpus, int(machine["Resources"].get("GPU", 0))
        if gpus == "none" or self._config.engine.addresses:
            return 0
        wanted = there if gpus == "all" else len(gpus)
        return wanted if 0 < wanted <= there else None

    async def _begin(self, name: str, machine: dict[str, Any]) -> None:
        order = Order(self._config.model_dump_json(exclude_none=True), self._settings, name, self._skip)
        try:
            with boundary("ray"):
                actor = await asyncio.to_thread(self._actor, name, machine)
                node = RayNode(name, actor)
                await node.begin(order)
        except (TokenmillError, TimeoutError) as error:
            self._again_at[name] = time.monotonic() + RETRY_S
            self._say(
                "node", f"no node on this machine: {str(error) or 'it does not begin'}", name, "warn", "ray status"
            )
            return
        self._nodes[name] = node
        self._say("node", f"joined, at {machine['NodeManagerAddress']}", name)
        if self._met is None:
            self._joined.put_nowait(node)
        else:
            self._met.append(node)
        if self._stop is not None:
            await node.stop(*self._stop)

    def _actor(self, name: str, machine: dict[str, Any]) -> Any:
        """The actor that lives there, or a new one."""
        options = {
            "name": self._title(name),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "num_gpus": self._gpus_of(machine) or 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False),
            "runtime_env": {"env_vars": SERVERS_OUTLIVE},
        }
        return ray.remote(Post).options(**options).remote()

    def _sort_out(self) -> None:
        """Nodes that have ended leave; one that is lost may come again, one in trouble of its own does not."""
        for name, task in list(self._coming.items()):
            if task.done():
                del self._coming[name]
                task.result()
        for name, node in list(self._nodes.items()):
            if not node.done.is_set():
                continue
            del self._nodes[name]
            self._gone_tokens += node.last.tokens
            self._again_at[name] = time.monotonic() + RETRY_S
            if node.trouble is not None:
                self._say("node", str(node.trouble), name, "error", node.trouble.fix)
                node.kill()
                if not isinstance(node.trouble, UsageError):  # its folder is in use still
                    self._refused[name] = node.trouble
                if isinstance(node.trouble, FATAL):
                    raise node.trouble

    def _say(self, kind: str, text: str, node: str = "", level: str = "info", fix: str = "") -> None:
        self._log.add(Event(now(), kind, text, "", level, fix, node=node))


def _take_back_sigterm() -> None:
    """Ray's handler lets ours run and aborts the process 3 s later: no drain, no last copy. Python's own comes back."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it


def _name(machine: dict[str, Any]) -> str:
    """Ray's name of a machine, its address where nobody gave it one, as a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", machine["NodeName"] or machine["NodeManagerAddress"])

"""One node per machine of a Ray cluster: a detached actor on each machine with GPUs, or on each with gpus = "none".

An actor is bound to its machine and named by the run folder and Ray's name of the
machine, so that a head that is started again meets it. It takes the machine's GPUs as Ray resources; engines are its
plain child processes and know nothing of Ray. What goes over the wire is JSON, as the contract tests have it.

The config, which may hold secrets for the engines, travels from head to node as a call's argument: never as an actor's
own, which Ray's head keeps, and never on a command line.
"""

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from ray import exceptions
from tokenmill import __version__
from tokenmill.cluster.base import Node
from tokenmill.cluster.connection import NAMESPACE, connect, words_of
from tokenmill.cluster.far import CALL_S, FarNode
from tokenmill.cluster.machines import Machine, fitting
from tokenmill.cluster.post import Post
from tokenmill.config import Config
from tokenmill.core.roll import Roll, away
from tokenmill.core.status import NodeStatus
from tokenmill.errors import (
    GateError,
    NodeLostError,
    NoServerError,
    PreflightError,
    TokenmillError,
    UnreachedError,
    UsageError,
    boundary,
)
from tokenmill.events import Event, EventLog, now
from tokenmill.machine import threads
from tokenmill.machine.ports import answers
from tokenmill.outpost import Order

LOOK_S = 2.0
"""Between two looks for machines that have joined."""

RETRY_S = 10.0
"""Before an actor is made anew on a machine that has lost one."""

HEAD_GONE_S = 45.0
"""Ray ends our process when its head has been away for 60 s: before that, we end in good order."""

CUT_S = 10.0
"""The same where all is done, or somebody has asked twice: what is left to do is to end servers, which end anyway."""

MEET_S = 20.0
"""A node that lives answers within a second; one that does not is waited for no longer."""

PENDING_S = 15.0
"""Ray starts a process within seconds; one that takes longer waits for its GPUs, which is worth a word."""

VARIABLES = {
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
}
"""An actor's. Ray would end its children with it: a server that lives on is adopted, and a reload costs minutes. And
where a machine's shell says that Ray should not tell an actor its GPUs, it would see those of other jobs, too."""

FATAL = (GateError,)
"""Trouble of one node that would be every node's."""

T = TypeVar("T")


class RayActor:
    """An Actor (far.py): one of Ray's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def ask(self, limit_s: float | None, method: str, *words: Any) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await getattr(self._actor, method).remote(*words)
        except (exceptions.ActorUnavailableError, exceptions.ObjectLostError) as error:
            raise UnreachedError("it cannot be reached") from error
        except exceptions.RayActorError as error:
            why = next((line.strip() for line in str(error).splitlines() if "because" in line), "")
            raise NodeLostError(why.partition(". ")[0] or "its actor is gone") from error
        except exceptions.RayError as error:  # one node's trouble, a disk's or a bug's
            raise NodeLostError(words_of(error)) from error

    async def kill(self) -> None:
        try:
            await _asked(lambda: ray.kill(self._actor))
        except TokenmillError:
            pass  # it has ended, or Ray's head has: a run that is done is done


async def _asked(question: Callable[[], T], limit_s: float = HEAD_GONE_S) -> T:
    """What Ray says; asked on a thread that no exit waits for, since its head may accept a call and never answer."""

    def bounded() -> T:
        with boundary("ray"):
            return question()

    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(threads.ask(bounded))
    except TimeoutError:
        words = f"Ray's head has not answered for {limit_s:.0f} s"
        raise NodeLostError(words, fix="start Ray again, then this: it goes on where it is") from None


class RayCluster:
    """A node on every machine of the cluster that fits; one that joins later gets its own. For `run` see Cluster."""

    def __init__(self, config: Config, settings: str, log: EventLog, skip: tuple[str, ...] = ()) -> None:
        self._config = config
        self._settings = settings
        self._log = log
        self._skip = skip
        self._nodes: dict[str, FarNode] = {}
        self._names: dict[str, str] = {}
        """By Ray's ids of the machines."""
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._unplaced: dict[str, FarNode] = {}
        self._again_at: dict[str, float] = {}
        self._refused: dict[str, TokenmillError] = {}
        self._joined: asyncio.Queue[Node | None] = asyncio.Queue()
        self._stop: tuple[float | None, bool] | None = None
        self._stopping = asyncio.Event()
        self._roll = Roll()
        self._met: list[FarNode] | None = []
        self._self = f"{socket.gethostname()}, pid {os.getpid()} ({secrets.token_hex(4)})"
        self._own = False
        self._head: tuple[str, int] = ("", 0)
        self._head_seen = 0.0

    async def joined(self) -> Node | None:
        return await self._joined.get()

    async def status(self) -> list[NodeStatus]:
        await asyncio.gather(*(node.status() for node in self._nodes.values() if not node.done.is_set()))
        nodes = self._nodes.values()  # as they are now: one that has gone meanwhile is on the roll
        return self._roll.whole([away(x.last, *self._end_of(x)) if x.done.is_set() else x.last for x in nodes])

    def _end_of(self, node: FarNode) -> tuple[str, str]:
        """How a node went, and why."""
        if node.trouble is not None:
            return "failed", str(node.trouble)
        return ("ended", "") if self._stop is not None and not node.why else ("lost", node.why)

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        self._stop = (grace_s, keep)
        self._stopping.set()
        await asyncio.gather(*(node.stop(grace_s, keep) for node in self._nodes.values()))

    # -- its life ----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        trouble: TokenmillError | None = None
        try:
            try:
                await _asked(self._connect, CALL_S)
                _take_back_sigterm()
                await self._until_stopped()
            except TokenmillError as error:
                trouble = error
            if isinstance(trouble, NodeLostError):
                self._leave_all()
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
        if self._stop is None:  # else they know, and a second Ctrl-C may have shortened it
            await self.stop(0.0, keep=False)
        for name, waiting in list(self._unplaced.items()):
            self._coming.pop(name).cancel()
            await waiting.kill()  # or it would take its GPUs when they come free, for nobody
        if self._coming:
            await asyncio.wait(self._coming.values(), timeout=MEET_S)
        for task in self._coming.values():
            task.cancel()
        self._join_met()  # or nobody would take what they still have
        tasks = [asyncio.create_task(self._end_of_node(node)) for node in list(self._nodes.values())]
        while tasks and (await asyncio.wait(tasks, timeout=LOOK_S))[1]:
            cut = self._stop is not None and self._stop[0] == 0.0
            if not await self._head_is_there(CUT_S if cut else HEAD_GONE_S):
                words = f"{self._away()}: its nodes are left; they end by themselves after fleet.wait_for_head"
                self._say("node", words, "", "warn", f"tokenmill down {self._config.folder}   where they are")
                self._leave_all()
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                return
        await asyncio.gather(*tasks)
        try:
            await _asked(ray.shutdown)
        except TokenmillError:
            pass  # the exit of this process is as good

    async def _end_of_node(self, node: FarNode) -> None:
        await node.done.wait()
        await node.kill()

    def _leave_all(self) -> None:
        """They live without Ray's head, for as long as a minute."""
        for node in self._nodes.values():
            node.is_left = True

    async def _head_is_there(self, limit_s: float) -> bool:
        """Whether Ray's head has answered within so long; `_head_seen` is when it last did."""
        if await threads.reading(self._head_answers, False):
            self._head_seen = time.monotonic()
        return time.monotonic() - self._head_seen <= limit_s

    def _away(self) -> str:
        host, port = self._head
        return f"Ray's head at {host}:{port} has been away for {time.monotonic() - self._head_seen:.0f} s"

    async def _until_stopped(self) -> None:
        """Looks for machines until told to stop; raises the trouble that leaves no node."""
        self._say("run", f"Ray at {self._head[0]}:{self._head[1]}{', started for this run' if self._own else ''}")
        without_since = self._head_seen = time.monotonic()
        while not self._stopping.is_set():
            moment = time.monotonic()
            if not await self._head_is_there(HEAD_GONE_S):
                raise NodeLostError(self._away(), fix="start Ray again, then this: it goes on where it is")
            if self._head_seen >= moment:
                await self._look()
                await self._meet()
            await self._sort_out()
            is_awaited = bool(self._coming or self._again_at.keys() - self._refused.keys())
            if self._nodes:
                without_since = moment
            elif self._refused and not is_awaited:
                raise next(iter(self._refused.values()))
            elif moment - without_since > self._config.fleet.give_up:
                waiting = f": Ray has not started those on {', '.join(self._unplaced)}" if self._unplaced else ""
                raise NoServerError(f"no node for {self._config.fleet.give_up:.0f} s{waiting}", fix="ray status")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    def _connect(self) -> None:
        self._own = connect(self._config.fleet.address, or_start=True)
        host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
        self._head = (host, int(port))

    def _head_answers(self) -> bool:
        return answers(f"{self._head[0]}:{self._head[1]}")

    async def _look(self) -> None:
        """Begins with every machine that fits and has no node."""
        for machine in fitting(await _asked(ray.nodes), self._config.gpus, self._names):
            name = self._names[machine.id] = machine.name
            busy = name in self._nodes or name in self._coming or name in self._refused
            if not busy and time.monotonic() >= self._again_at.get(name, 0.0):
                self._coming[name] = asyncio.create_task(self._begin(replace(machine, name=name)), name=f"node {name}")

    async def _meet(self) -> None:
        """Nodes that an earlier life left come together: what each of them has in hand must be known before prompts are
        handed out, or they would be asked for twice."""
        if self._met is None:
            return
        living = await _asked(list_named_actors)
        tasks = [task for name, task in self._coming.items() if self._title(name) in living]
        if tasks:
            await asyncio.wait(tasks, timeout=MEET_S)
        self._join_met()

    def _join_met(self) -> None:
        for node in self._met or ():
            self._joined.put_nowait(node)
        self._met = None

    def _title(self, name: str) -> str:
        """The name of a node's actor."""
        return f"{self._config.folder} {name}"

    async def _begin(self, machine: Machine) -> None:
        name = machine.name
        config = self._config.model_dump_json(exclude_none=True)
        order = Order(config, self._settings, name, self._skip, self._self, __version__)
        self._roll.coming(name, machine.address)
        try:
            node = FarNode(name, RayActor(await _asked(lambda: self._actor(machine))))
            with boundary("ray"):
                await self._place(node, machine)
                await node.begin(order)
        except TokenmillError as error:
            self._again_at[name] = time.monotonic() + RETRY_S
            self._roll.coming(name, machine.address, str(error))
            if isinstance(error, PreflightError):
                self._refused[name] = error
            self._say("node", f"no node on this machine: {error}", name, "warn", error.fix or "ray status")
            return
        self._nodes[name] = node
        self._say("node", f"joined, at {machine.address}", name)
        if self._met is None:
            self._joined.put_nowait(node)
        else:
            self._met.append(node)
        if self._stop is not None:
            await node.stop(*self._stop)

    async def _place(self, node: FarNode, machine: Machine) -> None:
        """Until Ray has started it: what it takes is Ray's to give, and other jobs may have it for hours."""
        self._unplaced[node.name] = node
        try:
            if not await node.placed(PENDING_S):
                needs = (
                    f"its {machine.gpus} GPUs, which other jobs of Ray may have" if machine.gpus else "Ray to start it"
                )
                self._roll.coming(node.name, machine.address, f"waits for {needs}")
                self._say("node", f"waits for {needs}", node.name, "warn", "ray status")
                while not await node.placed(PENDING_S):
                    pass
        finally:
            del self._unplaced[node.name]

    def _actor(self, machine: Machine) -> Any:
        """The actor that lives there, or a new one."""
        options = {
            "name": self._title(machine.name),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "num_gpus": machine.gpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(machine.id, soft=False),
            "runtime_env": {"env_vars": VARIABLES},
        }
        return ray.remote(Post).options(**options).remote()

    async def _sort_out(self) -> None:
        """Nodes that have ended leave; one that is lost may come again, one in trouble of its own does not."""
        for name, task in list(self._coming.items()):
            if task.done():
                del self._coming[name]
                task.result()
        for name, node in list(self._nodes.items()):
            if not node.done.is_set():
                continue
            del self._nodes[name]
            self._roll.gone(node.last, *self._end_of(node))
            self._again_at[name] = time.monotonic() + RETRY_S
            if node.trouble is not None:
                self._say("node", str(node.trouble), name, "error", node.trouble.fix)
                await node.kill()
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

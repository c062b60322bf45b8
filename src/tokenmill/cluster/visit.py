"""What is asked of a Ray cluster from outside a run: what its machines would run, what doctors find there, and the end
of nodes whose run is dead."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from ray import exceptions
from tokenmill.checks.base import Context, Finding
from tokenmill.cluster.connection import connect, words_of
from tokenmill.cluster.machines import fitting
from tokenmill.config import Config
from tokenmill.doctor import NODE_CHECKS, examine
from tokenmill.errors import PreflightError, boundary
from tokenmill.leftovers import survivors
from tokenmill.machine.threads import ask
from tokenmill.outpost import folder_of
from tokenmill.plan import of_node
from tokenmill.planning.answer import NodePlan

VISIT_S = 90.0
"""For all of it: a process that loads ray, servers that end in good order (20 s), and as much again."""

MARGIN_S = 5.0
"""Before that, what is known is told."""

ALL_CARDS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""A task that takes no GPUs is to see those that a node would take."""


def dismissed(config: Config) -> dict[str, str]:
    """Ends the nodes of a run that is dead, with their servers: each node's name, and empty or why it has not ended.
    Raises PreflightError where no cluster answers, UnreachedError where none runs here."""
    return dict(_visited(lambda deadline: _dismissed(config, deadline)))


def plans(config: Config) -> list[NodePlan]:
    """Each machine's part of a plan, as it says itself. Raises as `dismissed` does."""
    return list(_visited(lambda deadline: _plans(config, deadline)))


def findings(config: Config, skip: tuple[str, ...]) -> dict[str, list[Finding]]:
    """What a doctor finds on each machine. Raises as `dismissed` does."""
    return dict(_visited(lambda deadline: _findings(config, skip, deadline)))


def _visited(visit: Any) -> Any:
    """On a thread that no exit waits for: Ray's head may accept a call and never answer."""
    deadline = time.monotonic() + VISIT_S
    try:
        return ask(lambda: list(visit(deadline - MARGIN_S))).result(VISIT_S)
    except TimeoutError:
        raise PreflightError(f"Ray has not answered for {VISIT_S:.0f} s", fix="ray status") from None


@contextmanager
def _connected(config: Config) -> Iterator[None]:
    connect(config.fleet.address, or_start=False)
    with boundary("ray"):
        try:
            yield
        finally:
            ray.shutdown()


def _dismissed(config: Config, deadline: float) -> Iterator[tuple[str, str]]:
    mark = f"{config.folder} "
    with _connected(config):
        asked: dict[str, Any] = {}
        for title in list_named_actors():
            if title.startswith(mark):
                with suppress(ValueError):  # it has left meanwhile
                    asked[title.removeprefix(mark)] = ray.get_actor(title).dismiss.remote()
        for name, answer in asked.items():
            try:
                ray.get(answer, timeout=max(deadline - time.monotonic(), 0.0))
                yield name, ""
            except exceptions.GetTimeoutError:
                yield name, "it has not ended in time"
            except exceptions.ActorUnavailableError:
                yield name, "it cannot be reached"
            except exceptions.RayActorError:
                yield name, ""  # it has left
            except exceptions.RayError as error:
                yield name, words_of(error)


def _plans(config: Config, deadline: float) -> Iterator[NodePlan]:
    bare = config.model_copy(update={"engine": config.engine.model_copy(update={"env": {}})})  # no secret goes out
    for name, found, trouble in _asked(bare, deadline, _plan):
        yield msgspec.json.decode(found, type=NodePlan) if found else NodePlan(name, trouble=trouble)


def _findings(config: Config, skip: tuple[str, ...], deadline: float) -> Iterator[tuple[str, list[Finding]]]:
    for name, found, trouble in _asked(config, deadline, _examine, skip):
        untold = [Finding("nodes", "unknown", "", f"its machine is not examined: {trouble}", "ray status")]
        yield name, msgspec.json.decode(found, type=list[Finding]) if found else untold


def _asked(config: Config, deadline: float, question: Any, *words: Any) -> Iterator[tuple[str, bytes, str]]:
    """Each machine's name with its answer, or why there is none."""
    with _connected(config):
        rows: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        asked: dict[str, Any] = {}
        for machine in fitting(rows, config.gpus):
            bound = NodeAffinitySchedulingStrategy(machine.id, soft=False)
            how = {
                "num_cpus": 0,
                "scheduling_strategy": bound,
                "runtime_env": {"env_vars": ALL_CARDS},
                "max_retries": 0,
            }
            task = ray.remote(question).options(**how)
            asked[machine.name] = task.remote(config.model_dump_json(exclude_none=True), machine.name, *words)
        if not asked:
            raise PreflightError(f"no machine of the cluster has what fleet.gpus = {config.fleet.gpus!r} asks for")
        for name, answer in asked.items():
            try:
                yield name, ray.get(answer, timeout=max(deadline - time.monotonic(), 0.0)), ""
            except exceptions.RayError as error:
                yield name, b"", words_of(error)


def _plan(config: str, node: str) -> bytes:
    """On the machine itself, as the next."""
    return msgspec.json.encode(of_node(Config.model_validate_json(config), node))


def _examine(config: str, node: str, skip: tuple[str, ...]) -> bytes:
    asked = Config.model_validate_json(config)
    folder = folder_of(asked, node)
    return msgspec.json.encode(examine(Context(asked, folder, survivors(folder)), skip, checks=NODE_CHECKS))

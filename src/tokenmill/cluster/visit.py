"""What is asked of a Ray cluster from outside a run: the end of nodes whose run is dead. With ray.py the only file that
imports ray."""

import logging
import time
from collections.abc import Iterator
from typing import Any

from ray.util import list_named_actors

import ray
from ray import exceptions
from tokenmill.config import Config
from tokenmill.errors import PreflightError, boundary
from tokenmill.machine.ports import answers
from tokenmill.machine.threads import ask

NAMESPACE = "tokenmill"

VISIT_S = 90.0
"""For all of it: a process that loads ray, servers that end in good order (20 s), and as much again."""

MARGIN_S = 5.0
"""Before that, what is known is told."""


def dismissed(config: Config) -> dict[str, str]:
    """Ends the nodes of a run that is dead, with their servers: each node's name, and empty or why it has not ended.
    Raises PreflightError where no cluster answers."""
    deadline = time.monotonic() + VISIT_S
    try:
        return ask(lambda: dict(_dismissed(config, deadline - MARGIN_S))).result(VISIT_S)
    except TimeoutError:
        raise PreflightError(f"Ray has not answered for {VISIT_S:.0f} s", fix="ray status") from None


def _dismissed(config: Config, deadline: float) -> Iterator[tuple[str, str]]:
    address, mark = config.fleet.address, f"{config.folder} "
    if address != "auto" and not answers(address):
        raise PreflightError(f"nobody answers at fleet.address = {address!r}", fix="ray status --address ADDRESS")
    with boundary("ray"):
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise PreflightError("no Ray cluster runs here", fix="ray status") from error
        try:
            found = [title for title in list_named_actors() if title.startswith(mark)]
            asked: dict[str, Any] = {title.removeprefix(mark): ray.get_actor(title).dismiss.remote() for title in found}
            for name, answer in asked.items():
                try:
                    ray.get(answer, timeout=max(deadline - time.monotonic(), 0.0))
                    yield name, ""
                except exceptions.GetTimeoutError:
                    yield name, "it has not ended in time"
                except exceptions.RayActorError:
                    yield name, ""  # it has left
        finally:
            ray.shutdown()

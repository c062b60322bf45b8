"""The way into a Ray cluster, for a run (ray.py) and for whoever asks a cluster from outside one (visit.py)."""

import logging
from typing import Any

from ray._private import worker as ray_worker

import ray
from ray import exceptions
from tokenmill.errors import PluginError, PreflightError, UnreachedError, boundary
from tokenmill.machine.ports import answers

NAMESPACE = "tokenmill"
"""Ray's names of actors hold within it."""

REFUSALS = {
    "AuthToken": "RAY_AUTH_MODE=token here, and the ~/.ray/auth_token of its head on every machine",
    "ersion mismatch": "the same Ray and the same Python on every machine",
}
"""What Ray says to a process that it does not let in, and what helps."""

WANTED = "fleet.address = HOST:PORT of Ray's head, where `ray status --address HOST:PORT` answers; or auto"
"""Where nobody answers: ray://… and a name alone are no such addresses."""


def connect(address: str, *, or_start: bool) -> bool:
    """Joins the cluster at an address, with "auto" the one that runs here. With `or_start`, "auto" starts one of this
    machine where none runs: then True. Raises PreflightError; UnreachedError where "auto" finds none."""
    # Whatever log_to_driver says, Ray prints other machines' deaths, with stack traces, over our view of the run.
    # Nothing public turns that off.
    ray_worker.print_to_stdstream = lambda *_, **__: None
    more: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if address != "auto" and not answers(address):
        raise PreflightError(f"nobody answers at fleet.address = {address!r}", fix=WANTED)
    try:
        with boundary(f"Ray at {address}"):
            try:
                ray.init(address=address, **more)
            except ConnectionError as error:
                if address == "auto" and not or_start:
                    raise UnreachedError("no Ray cluster runs here", fix="ray status") from error
                if address != "auto":
                    raise PreflightError(f"no Ray cluster runs at {address!r}: {error}", fix="ray status") from error
                ray.init(address="local", include_dashboard=False, **more)
                return True
    except PluginError as error:
        fix = next((fix for words, fix in REFUSALS.items() if words in str(error)), "ray status")
        raise PreflightError(str(error), fix=fix) from error
    return False


def words_of(error: exceptions.RayError) -> str:
    """Ray's words in a line. It tells what a task or an actor raised with a stack trace, whose last line says what."""
    lines = str(error).strip().splitlines() or ["it does not answer"]
    return lines[-1 if isinstance(error, exceptions.RayTaskError) else 0]

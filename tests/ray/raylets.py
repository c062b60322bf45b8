"""A real Ray cluster of several raylets on this machine, each a machine to Ray, and their deaths."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from tests import bynumber
from tests.harness import Case
from tokenmill.folder import RunFolder

STORE = 80_000_000
"""Bytes of Ray's object store, the least that it takes."""

NOTICED = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""So that Ray sees within seconds that a machine is gone: by itself it takes 15."""


class Raylets:
    """`names` are the machines; the first has Ray's head, and is no machine with a node unless it is among `nodes`."""

    def __init__(self, *names: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tmr-", dir="/tmp"))  # Ray's sockets have 107 characters in all
        self._cluster: Any = None
        self._nodes: dict[str, Any] = {}
        self.start(*names)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def start(self, *names: str) -> None:
        """A head with the first name, and the others, all at once."""
        os.environ["RAY_TMPDIR"] = str(self.folder)
        first, *others = names
        own = {"object_store_memory": STORE, "num_cpus": 1, "num_gpus": 0}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"node_name": first, "include_dashboard": False, "_system_config": NOTICED, **own},
        )
        self._nodes = {first: self._cluster.head_node}
        for name in others:
            self.add(name, wait=False)
        self._cluster.wait_for_nodes()
        del os.environ["RAY_TMPDIR"]

    def add(self, name: str, *, wait: bool = True, gpus: int = 0, env: dict[str, str] | None = None) -> None:
        """One machine more, with so many of Ray's GPUs; `env` is the shell's where its raylet starts."""
        own = {"object_store_memory": STORE, "num_cpus": 1, "num_gpus": gpus, "env_vars": env}
        self._nodes[name] = self._cluster.add_node(wait=wait, node_name=name, **own)

    def kill(self, name: str, case: Case | None = None) -> None:
        """SIGKILL to a machine's raylet, actors and agents, and to the servers of a case's node there; without a case
        they live on."""
        pids = [process.pid for kind in self._nodes.pop(name).all_processes.values() for process in map(_popen, kind)]
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = [psutil.Process(pid), *psutil.Process(pid).children()]
                for process in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        if case is not None:
            kill_servers(case, name)

    def kill_all(self) -> None:
        """SIGKILL to every raylet, to the head and to the actors; the servers live on."""
        for name in list(self._nodes):
            self.kill(name)

    def close(self) -> None:
        self.kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)


def _popen(info: Any) -> Any:
    return info.process


@contextmanager
def raylets(*names: str) -> Iterator[Raylets]:
    """A cluster for the scope."""
    made = Raylets(*names)
    try:
        yield made
    finally:
        made.close()


def node_folder(case: Case, name: str) -> RunFolder:
    return RunFolder(case.run_path / "nodes" / name)


def kill_servers(case: Case, name: str) -> None:
    for entry in node_folder(case, name).state().servers:
        bynumber.signal_all(bynumber.members(-1, entry.nonce), signal.SIGKILL)


def server_pids(case: Case, name: str) -> list[int]:
    """The servers of a node by its state.json, living or not."""
    return [entry.process.pid for entry in node_folder(case, name).state().servers]


def actor_pid(case: Case, name: str) -> int:
    """The process that owns a node's folder."""
    owner = node_folder(case, name).owner()
    assert owner is not None
    return owner.process.pid


def wait_for(what: Any, timeout_s: float = 30.0) -> None:
    """Until that is so."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def clean_up(case: Case, *names: str) -> None:
    """Ends whatever a case has left on the machines."""
    for name in names:
        owner = node_folder(case, name).owner()
        if owner is not None:
            bynumber.signal_all([owner.process.pid], signal.SIGKILL)
        kill_servers(case, name)
    case.cleanup()

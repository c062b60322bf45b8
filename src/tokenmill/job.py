"""What all servers of a node have in common, and the start of one server's process."""

import dataclasses
import errno
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from tokenmill import caches, launch
from tokenmill.config import Config
from tokenmill.core.capacity import Forecast
from tokenmill.core.server import Failure, FailureKind
from tokenmill.ending import Sensors
from tokenmill.engines.base import Engine, Sampling, Spec
from tokenmill.errors import PluginError, PreflightError, boundary
from tokenmill.events import Event
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.generate import Pump
from tokenmill.launch import Place
from tokenmill.machine import logtail, ports, processes
from tokenmill.machine.processes import ProcessId
from tokenmill.render import Renderer
from tokenmill.staging.staged import Staged
from tokenmill.tuning import Tuning

_NO_PROGRAM = frozenset({errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR})
"""No restart mends these; a full table of processes may have room again."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""For its log or its TMPDIR."""


@dataclass(slots=True)
class LastStart:
    """The phases of the node's last whole start; `write` keeps them for the next tokenmill."""

    phases: tuple[tuple[str, float], ...]
    write: Callable[[tuple[tuple[str, float], ...]], None]

    def keep(self, phases: tuple[tuple[str, float], ...]) -> None:
        """A start has ended well."""
        self.phases = phases
        self.write(phases)


@dataclass(frozen=True, slots=True)
class Job:
    """What all servers of a node have in common.

    `model_files` is the fingerprint of what they load; `most_in_flight` is what open files allow each of them,
    `forecast` what each is expected to say of itself, `sensors` read the machine.
    """

    node: str
    config: Config
    folder: RunFolder
    engine: Engine
    staged: Staged
    python: str
    version: str
    model_files: str
    renderer: Renderer
    sampling: Sampling
    pump: Pump
    api_key: str
    most_in_flight: int
    tell: Callable[[Event], None]
    changed: Callable[[], None]
    last_start: LastStart
    tuning: Tuning
    forecast: Forecast = field(default_factory=Forecast)
    sensors: Sensors = field(default_factory=Sensors)


def spawn(
    job: Job,
    place: Place,
    where: ports.Ports,
    gpu_bases: tuple[int | None, ...],
    announce: Callable[[ServerEntry], None],
) -> tuple[Spec, ServerEntry, subprocess.Popen[bytes]]:
    """Starts a server's process; raises OSError where its program cannot be run, PluginError. `gpu_bases`: see
    ServerEntry.

    `announce` is told of it before it lives, by its nonce alone: killed in between, we would leave one behind that
    nobody knows of and that holds a GPU.
    """
    configured = spec_for(job, place, where, launch.new_nonce())
    spec = dataclasses.replace(configured, args={**configured.args, **job.tuning.args})
    with boundary(f"engine {job.engine.kind}"):
        command = job.engine.command(spec)
    tmp = launch.tmp_folder(job.folder.path, place.index)
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True, mode=0o700)
    cache = cache_folder(job, place)
    if job.engine.cache_variables:
        cache.mkdir(parents=True, exist_ok=True)
        cache.parent.touch()  # used now: pruned last
    env = launch.environment(job.config, place, job.engine, command, tmp, cache)
    log = job.folder.log(place.index)
    entry = ServerEntry(
        node=job.node,
        index=place.index,
        process=ProcessId(0, 0, processes.boot_id()),
        group=processes.NO_GROUP,
        port=spec.port,
        internal_port=spec.internal_port,
        gpu=place.label,
        nonce=spec.nonce,
        launch=launch.made_of(job.engine, configured, job.config, place, job.model_files),
        log_start=logtail.size(log),
        gpu_bases=gpu_bases,
    )
    announce(entry)
    process = processes.spawn(command.argv, env, log, spec.nonce, job.staged.descriptors)
    # A process that is gone already has no start time: its watcher says so at once.
    identity = processes.identify(process.pid) or ProcessId(process.pid, 0, "")
    return spec, replace(entry, process=identity, group=process.pid), process


def not_started(error: OSError | PluginError | PreflightError) -> Failure:
    """Why a server's process could not be started: what `spawn` raised, or the search for ports."""
    if not isinstance(error, OSError):
        return Failure(FailureKind.CONFIG, str(error), error.fix)
    if error.errno in _FULL:
        return Failure(FailureKind.DISK, f"{error.filename or 'its log'} cannot be written: {error.strerror}", "df -h")
    cause = f"{error.filename or 'the engine'} cannot be started: {error.strerror}"
    kind = FailureKind.CONFIG if error.errno in _NO_PROGRAM else FailureKind.CRASH
    return Failure(kind, cause, "see engine.python and engine.command")


def cache_folder(job: Job, place: Place) -> Path:
    """Where the kernels lie that a server compiles."""
    args = spec_for(job, place, ports.Ports(0, 0), "").args
    return caches.folder_for(job.engine.kind, job.version, place.gpu_name, place.index, args)


def spec_for(job: Job, place: Place, where: ports.Ports, nonce: str) -> Spec:
    return launch.spec(job.config, place, where, nonce, model=job.staged.path, python=job.python, version=job.version)

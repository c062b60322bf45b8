"""The run folder: its files, its one owner, and what it remembers of the servers. On a local disk.

    config.toml    as resolved, secrets out        state.json     owner and servers: enough to adopt or to end them
    status.json    what `status` shows             events.jsonl   all that happened, append-only
    run.log        what a terminal would have seen  history.jsonl  the run in numbers, every ten seconds
    logs/          each server's own output        environment.jsonl  what it ran on
    data/          the store's                     report.html, report.json

The lock is an flock on `.lock`: the kernel frees it however its owner dies.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tokenmill.core.peak import Peak
from tokenmill.core.status import RunStatus, name_of
from tokenmill.errors import PreflightError, UsageError
from tokenmill.machine import filesystems, processes
from tokenmill.machine.group import Group
from tokenmill.machine.processes import ProcessId
from tokenmill.machine.shm import Claim


class ServerEntry(msgspec.Struct, frozen=True):
    """A launched server: `launch` are the parts of its command, `nonce` its identity for this life,
    `log_start` the byte of its log where this life begins. Pid 0: it was about to be started, and may live.

    By what was seen of it, all that it leaves can be told from others': `members` are its processes so far, `segments`
    what they had of /dev/shm, `gpu_bases` the bytes that its cards held before it, None where unknown. `peak`: the
    fastest that it has been seen.
    """

    node: str
    index: int
    process: ProcessId
    group: int
    port: int
    internal_port: int
    gpu: str
    nonce: str
    launch: dict[str, str]
    log_start: int = 0
    state: str = ""
    phase: str = ""
    members: tuple[ProcessId, ...] = ()
    segments: tuple[Claim, ...] = ()
    gpu_bases: tuple[int | None, ...] = ()
    peak: Peak | None = None

    @property
    def name(self) -> str:
        """As the server is called everywhere."""
        return name_of(self.node, self.index)

    @property
    def processes(self) -> Group:
        """By what its processes are known."""
        return Group(self.process, self.group, self.nonce, self.members)

    @property
    def cards(self) -> tuple[int | str, ...]:
        """As CUDA_VISIBLE_DEVICES has them."""
        names = self.gpu.split(",") if self.gpu not in ("", "none") else []
        return tuple(int(name) if name.isdigit() else name for name in names)


class Owner(msgspec.Struct, frozen=True):
    """Who runs this folder."""

    process: ProcessId
    host: str
    command: str
    since: float


class State(msgspec.Struct, frozen=True):
    """`keep`: the servers are meant to outlive their owner, until `down` or the next run.

    `home` is the folder that it was written for: in a copy of the folder it speaks of somebody else's processes.
    `start` are the phases of the last whole start, with their seconds. `changed` are engine arguments that servers get
    in place of those of the launch `changed_from`, which ran out of memory.
    """

    owner: Owner | None = None
    servers: tuple[ServerEntry, ...] = ()
    keep: bool = False
    home: str = ""
    start: tuple[tuple[str, float], ...] = ()
    changed: dict[str, Any] = {}
    changed_from: dict[str, str] = {}


class RunFolder:
    """Paths and small files. Nothing is created until it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.state_file = path / "state.json"
        self.status_file = path / "status.json"
        self.events = path / "events.jsonl"
        self.history = path / "history.jsonl"
        self.environment = path / "environment.jsonl"
        self.run_log = path / "run.log"
        self.data = path / "data"
        self.logs = path / "logs"
        self._lock = path / ".lock"
        self._owner: Owner | None = None

    @property
    def exists(self) -> bool:
        """Whether a run was started here: its lock is there even where somebody has deleted state.json."""
        return self.state_file.exists() or self._lock.exists()

    def log(self, index: int) -> Path:
        """One server's own output."""
        return self.logs / f"server-{index}.log"

    def create(self) -> None:
        """Makes the folders; raises PreflightError with the system's own words where that is not possible."""
        try:
            for folder in (self.path, self.data, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> PreflightError:
        fix = f"df -h {filesystems.existing(self.path)}   or set output.dir to another disk"
        return PreflightError(f"the run folder {self.path} cannot be written: {error.strerror}", fix=fix)

    def write_config(self, text: str) -> None:
        """Keeps the resolved config; raises PreflightError where the disk does not take it."""
        try:
            write_aside(self.config, text.encode())
        except OSError as error:
            raise self._unwritable(error) from error

    def state(self) -> State:
        """What the last owner wrote; empty where there is nothing readable, or where it came with a copy."""
        try:
            found = msgspec.json.decode(self.state_file.read_bytes(), type=State)
        except (OSError, msgspec.DecodeError):
            return State()
        return found if found.home in ("", self._home()) else State()

    def _home(self) -> str:
        """The lock's own file: a folder that is renamed keeps it, a copy has another."""
        try:
            lock = self._lock.stat()
        except OSError:
            return ""
        return f"{lock.st_dev}:{lock.st_ino}"

    def write_state(self, state: State) -> None:
        """Replaces what the folder remembers of owner and servers; its owner stays known though it was lost."""
        state = replace(state, home=self._home(), owner=state.owner or self._owner)
        write_aside(self.state_file, msgspec.json.format(msgspec.json.encode(state), indent=1))

    def write_servers(self, servers: tuple[ServerEntry, ...], *, keep: bool) -> None:
        """Replaces the servers, and leaves the rest as it is."""
        self.write_state(replace(self.state(), servers=servers, keep=keep))

    def write_start(self, phases: tuple[tuple[str, float], ...]) -> None:
        """Keeps how long a start took, for the next one's sake."""
        self.write_state(replace(self.state(), start=phases))

    def write_changed(self, changed: dict[str, Any], changed_from: dict[str, str]) -> None:
        """Keeps what servers get in place of a launch's arguments, so that no start fails of the same again."""
        self.write_state(replace(self.state(), changed=changed, changed_from=changed_from))

    def status(self) -> RunStatus | None:
        """The last status that was written, None where there is none."""
        try:
            return msgspec.json.decode(self.status_file.read_bytes(), type=RunStatus)
        except (OSError, msgspec.DecodeError):
            return None

    def write_status(self, status: RunStatus) -> None:
        write_aside(self.status_file, msgspec.json.encode(status))

    def owner(self) -> Owner | None:
        """The living owner, if the folder has one."""
        owner = self.state().owner
        return owner if owner and owner.host == socket.gethostname() and processes.alive(owner.process) else None

    @contextmanager
    def own(self, command: str) -> Iterator[None]:
        """Takes the folder for the scope; raises UsageError that says who has it."""
        self.create()
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(handle)
            process = processes.identify(os.getpid())
            if process is None:
                raise UsageError("/proc does not show this process; tokenmill needs Linux")
            try:
                self._write_owner(Owner(process, socket.gethostname(), command, time.time()))
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                yield
            finally:
                try:
                    self._write_owner(None)
                except OSError:
                    pass  # a full disk: the owner's pid, start time and boot id tell that it is gone
        finally:
            os.close(handle)

    def _take(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{self.path} is in use by {self._holder()}", fix=self._way_out()) from error

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keeps every run out for the scope and writes nothing; raises UsageError that says who has the folder."""
        try:
            handle = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield  # a copy that came without it: nobody runs here
            return
        try:
            self._take(handle)
            yield
        finally:
            os.close(handle)

    def _write_owner(self, owner: Owner | None) -> None:
        self._owner = owner
        self.write_state(replace(self.state(), owner=owner))

    def _holder(self) -> str:
        owner = self.state().owner
        if owner is None:
            return "another process"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
        return f"tokenmill {owner.command}, pid {owner.process.pid} on {owner.host}, since {since}"

    def _way_out(self) -> str:
        return f"tokenmill watch {self.path}   follows it; tokenmill down {self.path}   ends it"


def write_aside(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Writes a small file whole or not at all: beside it, then renamed. With `sync` it outlives a power failure."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise

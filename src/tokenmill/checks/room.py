"""Room: shared memory, memory, the output's disk, open files, and what takes shared memory away."""

from collections.abc import Iterator

from tokenmill.checks.base import Context, Finding
from tokenmill.machine.room import WANTED_FILES, Room

DOCKER_SHM = 64 << 20
"""Docker's own size of /dev/shm: NCCL, torch and the engines' messages need more."""

WANTED_SHM = 4 * 10**9
"""Free bytes of /dev/shm that one machine's servers may use among themselves."""

LEAST_MEMORY = 8 * 10**9
"""Bytes of memory that a server takes on the host while it loads: 5 to 10 GB."""

SMALL_LEAK = 64 << 20
"""Bytes below which leaked segments are not worth a word: every crash leaves a few semaphores."""


def check_room(context: Context) -> Iterator[Finding]:
    """Servers find shared memory, memory and open files enough, and nothing takes them away."""
    if context.config.engine.addresses:
        return
    room = context.read_room()
    if context.config.engine.kind not in ("fake", "llamacpp"):
        yield from _shared(context, room)
        yield from _memory(context, room)
    yield from _leaks(room)
    if room.files < WANTED_FILES:
        words = f"at most {room.files} files may be open: fewer requests will be in flight"
        yield Finding("room", "warn", "open files", words, "ulimit -H -n 65536, or LimitNOFILE= of the service")
    if room.removes_ipc and context.config.fleet.keep_servers != "no":
        words = "systemd removes your shared memory when you log out (RemoveIPC): servers that are kept would lose it"
        yield Finding("room", "warn", "RemoveIPC", words, "sudo loginctl enable-linger $USER")


def _servers(context: Context) -> int:
    return context.config.fleet.servers or len(context.cards) or 1


def _shared(context: Context, room: Room) -> Iterator[Finding]:
    values = {"total": room.shm_total, "free": room.shm_free}
    if room.shm_total <= DOCKER_SHM:
        words = f"/dev/shm has {room.shm_total >> 20} MB, as docker makes it: NCCL and torch die there of a bus error"
        yield Finding("room", "warn", "/dev/shm", words, "docker run --shm-size=16g, or --ipc=host", values)
    elif room.shm_free < min(WANTED_SHM, room.shm_total // 2):
        words = f"/dev/shm has {room.shm_free / 1e9:.1f} of {room.shm_total / 1e9:.1f} GB free"
        yield Finding("room", "warn", "/dev/shm", words, "du -sh /dev/shm/* | sort -h", values)
    else:
        words = f"{room.shm_free / 1e9:.0f} of {room.shm_total / 1e9:.0f} GB free"
        yield Finding("room", "ok", "/dev/shm", words, values=values)


def _memory(context: Context, room: Room) -> Iterator[Finding]:
    """What the servers' host side needs while they load; with `stagger` one loads at a time."""
    at_once = 1 if context.config.fleet.stagger == "first" else _servers(context)
    wanted = LEAST_MEMORY * at_once
    if context.ours:
        return  # they have theirs already
    values = {"available": room.memory, "machine": room.machine, "wanted": wanted}
    limit = " under this control group's limit" if room.memory < room.machine // 4 else ""
    if room.memory < wanted:
        words = f"{room.memory / 1e9:.0f} GB of memory may be taken{limit}; {at_once} servers that load at once take"
        yield Finding("room", "warn", "memory", f"{words} about {wanted / 1e9:.0f} GB", "free -g", values)
    else:
        yield Finding("room", "ok", "memory", f"{room.memory / 1e9:.0f} GB may be taken", values=values)


def _leaks(room: Room) -> Iterator[Finding]:
    size = sum(segment.size for segment in room.leaked)
    if size < SMALL_LEAK:
        return
    largest = sorted(room.leaked, key=lambda segment: segment.size, reverse=True)
    named = ", ".join(
        f"{segment.path.name}" + (f" (of pid {segment.pid}, dead)" if segment.pid else "") for segment in largest[:3]
    )
    more = f" and {len(largest) - 3} more" if len(largest) > 3 else ""
    words = f"{size / 1e9:.1f} GB of /dev/shm are held by segments that no process here has open: {named}{more}"
    fix = f"rm {' '.join(str(segment.path) for segment in largest[:20])}   if no other container uses them"
    yield Finding("room", "warn", "/dev/shm", words, fix, {"bytes": size, "segments": len(largest)})

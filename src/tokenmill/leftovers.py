"""Servers of an earlier tokenmill on a run folder: which of them still live, and their end."""

import shutil

from tokenmill import launch
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.life import VERIFY_S
from tokenmill.machine import processes
from tokenmill.supervise import STOP_GRACE_S


def survivors(folder: RunFolder) -> list[ServerEntry]:
    """The servers of a run folder of which any process still lives."""
    return [entry for entry in folder.state().servers if is_alive(entry)]


def sweep(folder: RunFolder) -> None:
    """Removes the TMPDIR of servers that are gone: whoever ended them may have been killed before it came to that."""
    for entry in folder.state().servers:
        if not is_alive(entry):
            shutil.rmtree(launch.tmp_folder(folder.path, entry.index), ignore_errors=True)


async def end_survivor(folder: RunFolder, entry: ServerEntry, *, grace_s: float = STOP_GRACE_S) -> str:
    """Ends what lives of a server of an earlier tokenmill; says what cannot be ended, empty where all is gone."""
    # Where its main process is gone, the group's number may be a stranger's by now; the mark never is.
    group = entry.group if processes.alive(entry.process) else processes.NO_GROUP
    left = await processes.end_group(group, entry.nonce, grace_s=grace_s, verify_s=VERIFY_S)
    shutil.rmtree(launch.tmp_folder(folder.path, entry.index), ignore_errors=True)
    return ", ".join(map(processes.describe, left))


def is_alive(entry: ServerEntry) -> bool:
    """Whether any process of a launched server still lives, its main one or one it left behind."""
    if entry.process.boot != processes.boot_id():
        return False
    return processes.alive(entry.process) or bool(processes.members(processes.NO_GROUP, entry.nonce))


async def end_servers(folder: RunFolder, living: list[ServerEntry], log: EventLog) -> None:
    """Ends servers of an earlier life that nobody needs any more."""
    for entry in living:
        log.say("run", f"ends server {entry.index}, pid {entry.process.pid}, of an earlier start")
        if left := await end_survivor(folder, entry):
            log.say("run", f"cannot be ended: {left}", "error")
    folder.write_servers((), keep=False)

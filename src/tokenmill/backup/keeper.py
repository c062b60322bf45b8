"""Keeps a run's copy while it goes: begins it, makes a round every `copy_every`, and a last one at the end.

A copy never slows or ends a run: a round is a process of its own at low priority, and one that fails is told and tried
again, later each time. Only a start can be refused, where going on would pay twice or mix two runs.
"""

import asyncio
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from tokenmill.backup import restore
from tokenmill.backup.round import Order, Reply
from tokenmill.config import Config
from tokenmill.errors import GuardError, PreflightError, StoreError, UsageError
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder
from tokenmill.machine import processes
from tokenmill.plain import duration
from tokenmill.progress import Progress

LEASES = 3
"""Rounds that a lease outlives: two may fail before another machine can take over."""

STALL_S = 180.0
"""Without a sign of life, before a round is given up. Object stores take tens of seconds for a file's last byte."""

LAST_S = 900.0
"""For the last round. All else is done by then, and what it cannot copy lies in the run folder."""

MOST_WAIT_S = 3600.0
"""Between two tries of a copy that fails: a mount that comes back is used within the hour."""

END_S = 5.0
"""For a killed round to go; one that hangs in a mount cannot, and ends by itself when the mount answers."""

READ_BYTES = 65536
"""At a time from a round's pipe: a pipe's own size."""

_REFUSALS = {kind.__name__: kind for kind in (UsageError, GuardError, StoreError)}


@asynccontextmanager
async def kept(config: Config, folder: RunFolder, log: EventLog, progress: Progress) -> AsyncIterator[None]:
    """Keeps the copy for the scope. Raises UsageError, GuardError, StoreError or PreflightError before it begins."""
    if not config.output.copy_to:
        yield
        return
    keeper = Keeper(config, folder, log, progress)
    await keeper.begin()
    rounds = asyncio.create_task(keeper.run())
    try:
        yield
    finally:
        rounds.cancel()
        await asyncio.gather(rounds, return_exceptions=True)
        await keeper.end()


def wait_s(every_s: float, failures: int) -> float:
    """Until the next round, after so many failed ones in a row."""
    return float(min(every_s * 2.0 ** min(failures, 30), max(every_s, MOST_WAIT_S)))


class Keeper:
    """One life's copy."""

    def __init__(self, config: Config, folder: RunFolder, log: EventLog, progress: Progress) -> None:
        self._every_s = config.output.copy_every
        self._target = config.copy_folder
        self._run = config.name
        self._life = secrets.token_hex(4)
        self._folder = folder
        self._log = log
        self._progress = progress
        self._failures = 0
        self._rounds = 0

    async def begin(self) -> None:
        """Takes the copy and restores an empty run folder from it; raises where the run must not begin."""
        reply = await self._visit("begin")
        if reply.kind in _REFUSALS:
            raise _REFUSALS[reply.kind](reply.text, fix=reply.fix)
        if reply.kind not in ("done", "restored"):
            if restore.is_empty(self._folder.data):
                raise PreflightError(
                    f"{self._folder.path} is empty, and cannot be restored from {self._target}: {reply.text}",
                    fix=f"ls -l {self._target}; df -h {self._folder.path}   or begin anew: --set output.copy_to=''",
                )
            self._failed(reply)
            return
        self._progress.copied = reply.time
        if reply.kind == "restored":
            self._log.say("copy", reply.text)

    async def run(self) -> None:
        """Rounds until it is cancelled."""
        while True:
            await asyncio.sleep(wait_s(self._every_s, self._failures))
            reply = await self._visit("round")
            if reply.kind != "done":
                self._failed(reply)
                continue
            if self._failures or not self._rounds:
                self._log.say("copy", f"copied {reply.size / 1e6:,.1f} MB to {self._target}, verified")
            self._failures, self._rounds = 0, self._rounds + 1
            self._progress.copied = reply.time

    async def end(self) -> None:
        """The last round, with a deadline: what is sealed and reported by now is in it."""
        began = time.monotonic()
        self._log.say("copy", f"copying what is new to {self._target}")
        try:
            async with asyncio.timeout(LAST_S):
                reply = await self._visit("end")
        except TimeoutError:
            reply = Reply("TimeoutError", f"not done after {duration(LAST_S)}")
        if reply.kind != "done":
            self._failed(reply)
        else:
            self._progress.copied = reply.time
            self._log.say("copy", f"the copy is whole after {duration(time.monotonic() - began)}: {self._target}")

    def _failed(self, reply: Reply) -> None:
        self._failures += 1
        age = time.time() - self._progress.copied
        last = f"the last whole copy is {duration(age)} old" if self._progress.copied else "there is no copy yet"
        words = f"cannot copy to {self._target}: {reply.text}; {last}"
        self._log.say("copy", words, "warn", reply.fix or f"df -h {self._target.parent}; ls -l {self._target}")

    async def _visit(self, visit: Literal["begin", "round", "end"]) -> Reply:
        """One visit in a process of its own; its last reply, or why there is none."""
        order = Order(visit, str(self._folder.path), str(self._target), self._run, self._life, LEASES * self._every_s)
        words = [sys.executable, "-m", "tokenmill.backup.round", msgspec.json.encode(order).decode()]
        last: Reply | None = None

        def hear(line: bytes) -> None:
            nonlocal last
            if line.strip():
                last = msgspec.json.decode(line, type=Reply)
                if last.kind == "warn":
                    self._log.say("copy", last.text, "warn")

        with tempfile.TemporaryFile() as errors:
            try:
                await _listen(words, errors.fileno(), hear)
            except TimeoutError:
                return Reply("TimeoutError", f"no sign of life for {duration(STALL_S)}")
            if last is not None:
                return last
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
            return Reply("CrashError", said[-1] if said else "the round ended without a word")


async def _listen(words: list[str], errors: int, hear: Callable[[bytes], None]) -> None:
    """Runs a command to its end and hands over its lines; raises TimeoutError after a silence of STALL_S.

    A bare pid and a bare pipe: a process that hangs in a mount outlives the kill, and the loop. asyncio's transports
    and Popen cannot be left behind in peace.
    """
    reading, writing = os.pipe()
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, writing, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
        ]
        try:
            pid = os.posix_spawn(words[0], words, os.environ, file_actions=actions, setsid=True)  # noqa: ASYNC221
        finally:
            os.close(writing)
        try:
            await _lines(reading, hear)
        finally:
            os.kill(pid, signal.SIGKILL)  # ours, and not reaped: the pid is its own still
            await _reap(pid)
    finally:
        os.close(reading)


async def _lines(pipe: int, hear: Callable[[bytes], None]) -> None:
    loop, readable, rest = asyncio.get_running_loop(), asyncio.Event(), b""
    loop.add_reader(pipe, readable.set)
    try:
        while True:
            await asyncio.wait_for(readable.wait(), STALL_S)
            readable.clear()
            chunk = os.read(pipe, READ_BYTES)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                hear(line)
    finally:
        loop.remove_reader(pipe)


async def _reap(pid: int) -> None:
    """Waits END_S at most; one that hangs on is left to init."""
    process = processes.identify(pid)
    try:
        if process is not None:
            await asyncio.wait_for(processes.ended(process), END_S)
    except TimeoutError:
        return
    os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  (returns at once)

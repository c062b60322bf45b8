"""Keeps a run's copy while it goes: begins it, makes a round every `copy_every`, and a last one at the end.

A copy never slows or ends a run: a round is a process of its own at low priority, and one that fails is told and tried
again, later each time. Only a start can be refused, where going on would pay twice or mix two runs.
"""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from tokenmill.backup import restore
from tokenmill.backup.round import Order, Reply
from tokenmill.config import Config
from tokenmill.errors import GuardError, PreflightError, StoreError, UsageError
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder
from tokenmill.progress import Progress
from tokenmill.view import duration

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
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenmill.backup.round", msgspec.json.encode(order).decode()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        last: Reply | None = None
        try:
            while line := await asyncio.wait_for(process.stdout.readline(), STALL_S):
                if line.strip():
                    last = msgspec.json.decode(line, type=Reply)
                    if last.kind == "warn":
                        self._log.say("copy", last.text, "warn")
            if last is not None:
                return last
            errors = (await asyncio.wait_for(process.stderr.read(), STALL_S)).decode("utf-8", "replace")
            return Reply("CrashError", (errors.strip().splitlines() or ["the round ended without a word"])[-1])
        except TimeoutError:
            return Reply("TimeoutError", f"no sign of life for {duration(STALL_S)}")
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            pass
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        # It hangs in the mount and cannot be killed: without this its pipes would stay open beyond the loop.
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001

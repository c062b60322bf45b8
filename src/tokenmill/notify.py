"""Tells somebody who does not look: a command or a webhook at done, gate stop, no servers, disk low, and failure.

Each once in a run's whole life, restarts included (notified.json). What is sent never holds the run up while it goes
on, and never ends it: it has a deadline, and a failure is one event. No text of a prompt or a completion is sent.
"""

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tokenmill.config import Config, Notify
from tokenmill.core.server import LIVE, SERVING
from tokenmill.core.status import PromptCounts, ServerStatus
from tokenmill.errors import GateError, NoServerError, TokenmillError
from tokenmill.events import EventLog, now
from tokenmill.folder import RunFolder, write_aside
from tokenmill.machine import filesystems
from tokenmill.machine.threads import reading
from tokenmill.plain import duration
from tokenmill.progress import Progress
from tokenmill.untrusted import harmless

DEADLINE_S = 15.0
"""For one message, which the end of a run waits for: a mail or a webhook takes a second."""

LOOK_S = 5.0
"""Between two looks at disk and servers."""

WITHOUT_S = 600.0
"""Without any server that serves, before it is told: two restarts with their loading take less."""

LOW_BYTES = 4 * 10**9
"""Free on the run folder's disk: twice what a run needs to begin, so that there is time to free some."""

MOST_CHARS = 1000
"""Of a message: chats cut longer ones. And of what a command said last, however much it was."""


class Message(msgspec.Struct, frozen=True):
    """What is sent, as JSON. `text` is a whole sentence with the run's name, as chats show it."""

    text: str
    run: str
    event: str
    folder: str
    host: str
    time: float


class Notifier:
    """Sends each kind of message once: `watch` looks at disk and servers, `of` at how a run ends."""

    def __init__(self, wanted: Notify, folder: RunFolder, log: EventLog, *, deadline_s: float = DEADLINE_S) -> None:
        self._wanted = wanted
        self._folder = folder
        self._log = log
        self._deadline_s = deadline_s
        self._file = folder.path / "notified.json"
        self._begun: set[str] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._served = False
        self._without_since: float | None = None

    def tell(self, event: str, text: str) -> None:
        """Begins to send it, unless it was sent before in this run, or begun in this life."""
        if event in self._begun or event in _read(self._file) or not (self._wanted.command or self._wanted.webhook):
            return
        self._begun.add(event)
        name = self._folder.path.name
        words = harmless(f"tokenmill {name}: {text}")
        words = words if len(words) <= MOST_CHARS else f"{words[: MOST_CHARS - 1]}…"
        message = Message(words, name, event, str(self._folder.path), socket.gethostname(), now())
        task = asyncio.create_task(self._send(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def of(self, running: Coroutine[None, None, int], progress: Progress) -> int:
        """The exit code of a run, whose end is told, but not where it ends at once: whoever started it reads that."""
        try:
            code = await running
        except TokenmillError as error:
            if progress.ledger is not None:
                kind = {GateError: "gate", NoServerError: "no_servers"}.get(type(error), "failed")
                self.tell(kind, str(error).partition("\n")[0])  # the other lines may quote completions
            raise
        if code == 0:
            counts = progress.ledger.counts() if progress.ledger else PromptCounts()
            self.tell("done", f"done: {counts.verdicts}")
        return code

    async def finish(self) -> None:
        """Waits for what is being sent; each has its deadline."""
        await asyncio.gather(*self._sending, return_exceptions=True)

    # -- while it goes on --------------------------------------------------------------------------------------------
    async def watch(self, progress: Progress) -> None:
        """Looks at disk and servers until it is cancelled."""
        while True:
            free = await reading(lambda: filesystems.free_bytes(self._folder.path), None)
            if free is not None:
                self.look_at_disk(free)
            self.look_at_servers(progress.servers, time.monotonic())
            await asyncio.sleep(LOOK_S)

    def look_at_disk(self, free: int) -> None:
        """Bytes free: an event and a message where they are few, once."""
        if free >= LOW_BYTES or "disk_low" in self._begun:
            return
        words = f"only {free / 1e9:.1f} GB are free on the disk of {self._folder.path}: the run stops where it is full"
        self._log.say("disk", words, "warn", f"df -h {self._folder.path}; du -sh {self._folder.path}/*")
        self.tell("disk_low", words)
        self._begun.add("disk_low")

    def look_at_servers(self, servers: tuple[ServerStatus, ...], moment: float) -> None:
        """None serves for too long; the first start may take its time as long as anything starts."""
        serving = any(server.state in SERVING for server in servers)
        starting = any(server.state in LIVE for server in servers)
        self._served = self._served or serving
        if serving or not servers or (starting and not self._served):
            self._without_since = None
            return
        self._without_since = self._without_since or moment
        if moment - self._without_since >= WITHOUT_S:
            last = next((server for server in servers if server.last_problem), None)
            why = f"; server {last.name}: {last.last_problem}" if last else ""
            words = f"no server has served for {duration(moment - self._without_since)}{why}"
            self.tell("no_servers", f"{words}. It tries on until fleet.give_up")

    # -- sending -----------------------------------------------------------------------------------------------------
    async def _send(self, message: Message) -> None:
        ways = []
        if self._wanted.command:
            ways.append(self._run(message))
        if self._wanted.webhook:
            ways.append(self._post(message))
        troubles = [trouble for trouble in await asyncio.gather(*ways) if trouble]
        for trouble in troubles:
            words = f"could not notify of {message.event}: {trouble}; the run goes on"
            self._log.say("notify", words, "warn", "see [notify] in the config; it is tried again at the next start")
        if len(troubles) < len(ways):
            try:
                write_aside(self._file, msgspec.json.encode({**_read(self._file), message.event: message.time}))
            except OSError:
                pass  # then a restart tells it once more

    async def _run(self, message: Message) -> str:
        """Runs the command to its end or its deadline; what went wrong, empty where nothing did.

        Files instead of pipes: a child of its own that lives on could hold a pipe open.
        """
        command, env = self._wanted.command, dict(os.environ)
        env |= {"TOKENMILL_RUN": message.run, "TOKENMILL_EVENT": message.event, "TOKENMILL_TEXT": message.text}
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:
            asked.write(msgspec.json.encode(message) + b"\n")
            asked.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asked, stdout=said, stderr=said, env=env, start_new_session=True
                )
            except OSError as error:
                return f"notify.command {command[0]}: {error.strerror}"
            try:
                async with asyncio.timeout(self._deadline_s):
                    code = await process.wait()
            except TimeoutError:
                return f"notify.command {command[0]} had not ended after {self._deadline_s:g} s, and was killed"
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)  # its own session, and not reaped: the number is its own
                    await process.wait()
            said.seek(max(said.seek(0, os.SEEK_END) - MOST_CHARS, 0))
            last = said.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            return f"notify.command {command[0]} ended with exit code {code}: {''.join(last)}" if code else ""

    async def _post(self, message: Message) -> str:
        """Posts it; what went wrong, without the address's path, which is its secret.

        It follows nowhere: to where a 301 or 302 leads, an HTTP client asks for a page and sends nothing.
        """
        url = self._wanted.webhook
        host = urlsplit(url).netloc.rpartition("@")[2]
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                aiohttp.ClientSession(trust_env=True) as session,
                session.post(url, json=msgspec.to_builtins(message), allow_redirects=False) as reply,
            ):
                status = reply.status
        except TimeoutError:
            return f"the webhook at {host} did not answer within {self._deadline_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"the webhook at {host}: {type(error).__name__}: {str(error).replace(url, host)}"
        return f"the webhook at {host} answered HTTP {status}" if status >= 300 else ""


@asynccontextmanager
async def notifying(config: Config, folder: RunFolder, log: EventLog, progress: Progress) -> AsyncIterator[Notifier]:
    """Watches for the scope; at its end, waits for what is being sent."""
    notifier = Notifier(config.notify, folder, log)
    watching = asyncio.create_task(notifier.watch(progress))
    try:
        yield notifier
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await notifier.finish()


def _read(path: Path) -> dict[str, float]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError):
        return {}

"""One server's signs of work, as its processes and cards show them; its children that died; its shared memory.

Looks are cheap, all in threads: a reading of a process that hangs in a mount, or of a card that is ill, may not come.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as with_fields

from tokenmill.core import server as core
from tokenmill.core.server import Failure, FailureKind, State
from tokenmill.ending import Sensors
from tokenmill.folder import ServerEntry
from tokenmill.machine import evidence, group, processes, shm, threads
from tokenmill.machine.evidence import Reading, Work
from tokenmill.machine.filesystems import mount_of
from tokenmill.machine.group import Members
from tokenmill.machine.processes import ProcessId
from tokenmill.machine.shm import Claims
from tokenmill.machine.threads import reading

LOOK_S = 2.0
"""Between two looks at a server: a few files of /proc for each of its processes."""

CLOSE_LOOK_S = 1.0
"""The same before READY: children that died must be known within 5 s."""

FIRST_LOOK_S = 0.5
"""And between the first two, from which its work is known."""

CLOSER_S = 10.0
"""The most between two looks at every thread of a server that does nothing; less where stall_timeout is short."""

CLOSER_LOOKS = 9
"""Such looks within stall_timeout: every 10 s of the default 90 s."""

SILENT_S = 2.0
"""A log line so young says more of a server than its processes do."""

SILENCE_TELLS = frozenset({State.STARTING, State.ANSWERING, State.CANARY, State.SUSPECT})
"""States in which silence means something: there a closer look is worth its price."""

MEMBERS_S = 15.0
"""How often the members of its group are counted anew: that reads all of /proc."""

SEEN = 128
"""Processes of a server that are remembered: helpers come and go by the thousand, engines have dozens."""

STEADY_S = 2.0
"""For so long, dead children must be all there is: a launcher that is about to reap them needs milliseconds."""

STEADY_ZERO_S = 3.0
"""The same where they ended with exit code 0: a helper that did its work may wait for its parent, which then sleeps in
its next step, and the answer is only a guess."""

Dead = tuple[tuple[ProcessId, processes.Stat], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found. `dead` are children that nobody waits for, with nobody else alive."""

    moment: Reading
    members: Members
    counted_at: float
    claims: Claims
    closer_at: float = float("-inf")
    dead: Dead = ()


class Signs:
    """`note` takes the server's entry when something was seen that helps to find its leftovers later. `fresh`: it was
    launched a moment ago, so the segments that are there now are others'. `model` is what it loads, `tmp` its TMPDIR,
    `stall_s` how long it may do nothing. `burning`: its processes or cards were at work at the last look.
    """

    def __init__(
        self,
        entry: ServerEntry,
        sensors: Sensors,
        note: Callable[[ServerEntry], None],
        model: Path | None,
        tmp: Path,
        stall_s: float,
        *,
        fresh: bool,
    ) -> None:
        self.entry = entry
        self.work: Work | None = None
        self.dead: Dead = ()
        self.burning = False
        self._model, self._tmp = model, tmp
        self._source = "the disk"
        self._spoke_at = self._worked_at = time.monotonic()
        self._sensors = sensors
        self._note = note
        self._closer_s = min(CLOSER_S, max(FIRST_LOOK_S, stall_s / CLOSER_LOOKS))
        self._last: Look | None = None
        self._asker: threads.Asker[Look] = threads.Asker()
        before = shm.present(sensors.shm) if fresh else frozenset[shm.Claim]()
        self._claims = Claims(frozenset(entry.segments), before)
        self._dead_since = 0.0

    def spoke(self) -> None:
        """Its log has a new line."""
        self._spoke_at = time.monotonic()

    async def watch(self, post: Callable[[core.Event], None], state: Callable[[], State]) -> None:
        """Looks again and again, until cancelled; tells of work, and of dead children that it waits for."""
        if (model := self._model) is not None:  # a path on a mount that is away does not answer at all
            mount = await reading(lambda: mount_of(model), None)
            self._source = "the mount" if mount is None or mount.is_network else "the disk"
        try:
            while True:
                closely = state() in SILENCE_TELLS
                await self.look(closely=closely)
                await self._tell(post, state)
                await asyncio.sleep(self.pause(closely=closely))
        finally:
            self._asker.close()

    async def _tell(self, post: Callable[[core.Event], None], state: Callable[[], State]) -> None:
        self.burning = self.work is not None and not self.work.is_idle
        if self.burning:
            self._worked_at = time.monotonic()
            post(core.Progress(strong=False))
        silent = time.monotonic() - self._spoke_at > SILENT_S
        if self.dead and silent and state() is State.STARTING:
            failure = await reading(lambda: self.failure(self._tmp), None)
            if failure is not None:
                post(core.Failed(failure))

    def doing(self, state: State) -> str:
        """What it does while it says nothing, in words; empty while its log or its answers tell."""
        now = time.monotonic()
        if self.work is None or state not in SILENCE_TELLS or now - self._spoke_at < SILENT_S:
            return ""
        if words := self.work.words(self._source):
            return words
        stopped = ", stopped by a signal" if self.is_stopped else ""
        return f"silent and idle for {now - max(self._spoke_at, self._worked_at):.0f} s{stopped}"

    async def look(self, *, closely: bool) -> None:
        """Reads the machine; `closely` where silence would mean something."""
        last = self._last
        found = await self._asker.reading(lambda: self._read(last, closely=closely), None)
        if found is None:
            self.work = None  # whatever keeps the reading, nothing is known of this moment
            return
        self._last = found
        if last is not None and found.moment.at > last.moment.at:
            self.work = evidence.between(last.moment, found.moment)
        self._claims = found.claims
        if not self.dead or {each for each, _ in found.dead} != {each for each, _ in self.dead}:
            self._dead_since = found.moment.at
        self.dead = found.dead
        self._remember(found)

    def pause(self, *, closely: bool) -> float:
        """Seconds until the next look."""
        if not closely:
            return LOOK_S
        return FIRST_LOOK_S if self.work is None else CLOSE_LOOK_S

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped a process of it."""
        closer = self._last.moment.closer if self._last else None
        return closer is not None and closer.stopped

    @property
    def dead_for(self) -> float:
        """Seconds for which dead children have been all there is."""
        return self._last.moment.at - self._dead_since if self.dead and self._last else 0.0

    def _read(self, last: Look | None, *, closely: bool) -> Look:
        """One look. A closer one only where nothing was done: it reads every thread."""
        now = time.monotonic()
        counted_at, claims = last.counted_at if last else float("-inf"), self._claims
        if last is None or now - counted_at > MEMBERS_S:
            members, counted_at = self._count(FIRST_LOOK_S if last is None else group.FRESH_S), now
        else:
            members = last.members
        if closely or counted_at == now:
            claims = shm.claim(claims, (each.pid for each in members.living), self._sensors.shm)
        cards = self._sensors.cards.use(self.entry.cards) if closely else None
        used = evidence.read(tuple(members.living))
        look = Look(Reading(time.monotonic(), used, cards), members, counted_at, claims)
        if not closely or last is None:
            return look
        work = evidence.between(last.moment, look.moment)
        return self._look_closer(last, look, work) if work.is_idle else look

    def _look_closer(self, last: Look, look: Look, work: Work) -> Look:
        """At its threads, and for children that died: at all of /proc once a second, for all servers together."""
        now, old = look.moment.at, last.moment.closer
        if now - look.counted_at > CLOSE_LOOK_S:
            look = replace(look, members=self._count(CLOSE_LOOK_S), counted_at=now)
        dead = evidence.abandoned(look.members) if work.cores < evidence.SLEEPING else ()
        if old is not None and old.is_sure and not dead and now - last.closer_at < self._closer_s:
            return replace(look, moment=replace(look.moment, closer=old), closer_at=last.closer_at)
        closer = evidence.confirmed(old, evidence.look_closer(tuple(look.members.living)), work)
        moment = replace(look.moment, closer=closer)
        return replace(look, moment=moment, closer_at=now, dead=dead if closer.asleep else ())

    def _count(self, fresh_s: float) -> Members:
        return group.look(self.entry.processes, self._sensors.table, fresh_s)

    def _remember(self, look: Look) -> None:
        """Also those that have ended: what they leave bears their numbers."""
        living, segments = look.members.living, tuple(sorted(look.claims.mine, key=lambda each: each.name))
        fresh = [each for each in look.members.all if each not in self.entry.members]
        if fresh or segments != self.entry.segments:
            known = [*self.entry.members, *fresh]
            ended = [each for each in known if each not in living][-SEEN:]
            members = (*ended, *(each for each in known if each in living))
            self.entry = with_fields(self.entry, members=members, segments=segments)
            self._note(self.entry)

    def failure(self, tmp: Path) -> Failure | None:
        """Why a launcher whose children are dead will never answer; None where that is not so, or not yet sure."""
        if not self.dead:
            return None
        status = next((stat.status for _, stat in self.dead if stat.status), 0)
        if self.dead_for < (STEADY_S if status else STEADY_ZERO_S):
            return None
        child, stat = next(((each, stat) for each, stat in self.dead if stat.status == status), self.dead[0])
        others = f" and {len(self.dead) - 1} more" if len(self.dead) > 1 else ""
        how = evidence.ending_of(status)
        parent = processes.describe(stat.parent)
        cause = (
            f"its child pid {child.pid}{others} died ({how}), and {parent} waits for ever: it sleeps and says nothing"
        )
        return Failure(FailureKind.CHILD, cause, fix(tmp))


def fix(tmp: Path) -> str:
    """What keeps a child from starting, where that can be seen."""
    for folder in (tmp, Path("/tmp")):
        mount = mount_of(folder)
        if "noexec" in mount.options:
            return f"{mount.point} is mounted noexec: mount -o remount,exec {mount.point}"
    return ""

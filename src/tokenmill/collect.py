"""From the nodes to the store: writes judged records, counts them, lets the gate judge, and hands new prompts out.

Nothing is counted that is not written. A gate alarm or a failed write ends the run: no new prompts go out, and what is
in flight is cut (the gate: it would be more of the same) or still comes in (a failed write: it is paid for).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tokenmill import settings
from tokenmill.cluster.base import Cluster, Node, Results
from tokenmill.core import judge
from tokenmill.core.dispatch import Dispatch, Id, id_of
from tokenmill.core.gate import Alarm
from tokenmill.core.hours import Hours
from tokenmill.core.judge import Verdict
from tokenmill.core.records import FAILURES, PROMPT_FAULTS, Again, Prompt, Record
from tokenmill.core.rendering import Rendering
from tokenmill.core.turns import goes_on, why_broken_off
from tokenmill.earlier import Earlier
from tokenmill.errors import GuardError, NodeLostError, StoreError, TokenmillError, UsageError, VanishedError
from tokenmill.events import Event, EventLog, now
from tokenmill.explain import Examples
from tokenmill.folder import RunFolder
from tokenmill.resume import Accounts
from tokenmill.shelf import STORE_PATIENCE_S, Shelf
from tokenmill.store import Store

TOLD = 5
"""Of the attempts of a retry that failed: the first few, each in a line; the others are as they are."""

BATCH = 512
"""Prompts handed out between two looks at the results."""

HANDING_S = 0.1
"""Prompts mostly come at once; a prompt file that is slower holds up no answers."""

READ_ON = 2048
"""Prompts that are read on to find what nodes have brought, beyond as many as they brought: what was in hand lies at
the beginning of what is left. 20 MB, where each is a long conversation; what lies farther off waits for the feed."""

HOURS_FIX = "are the prompts others? tokenmill inspect RUN shows examples; the report compares the servers"
"""Of a run that changes from hour to hour."""

Stop = Callable[[float | None], Awaitable[None]]
"""Asks the nodes to stop; how long what is in flight may take, None for all the time it takes."""


async def _nothing_to_stop(grace_s: float | None) -> None:
    """No node runs yet."""


class Collector:
    """Takes what the nodes give to the store, tallies it, and asks the nodes to stop where the run must end.

    `stop` is set once a node runs. `alarm` and `failure` are what ended the run, None while nothing has;
    `draining`: no new prompts go out. `in_vain` are attempts of a retry that failed: no records, the older ones count.
    """

    def __init__(
        self,
        accounts: Accounts,
        store: Store,
        folder: RunFolder,
        log: EventLog,
        *,
        patience_s: float = STORE_PATIENCE_S,
    ) -> None:
        self.examples = Examples()
        self.alarm: Alarm | None = None
        self.failure: TokenmillError | None = None
        self.draining = False
        self.in_vain = 0
        self.stop: Stop = _nothing_to_stop
        self._accounts = accounts
        self._folder = folder
        self._log = log
        self._shelf = Shelf(accounts, store, folder.data, log, patience_s, self._written)
        self._dispatch = Dispatch()
        self._earlier = Earlier(accounts, self._dispatch, folder.data)
        self._left = accounts.ledger.left
        self._unwritten: set[Id] = set()
        self._feeding = asyncio.Lock()
        """One node at a time reads on: the feed's order is the cohorts'. Held until what was brought is stored."""
        self._replaced: dict[tuple[str, int, int], list[Again]] = {}
        self._broken_off = 0
        self._unusable: Counter[str] = Counter()
        self._first_unusable = ""
        self._hours = Hours()

    async def run(self, cluster: Cluster) -> None:
        """Until all nodes have ended, or until every prompt has its record: then it ends the nodes."""
        async with asyncio.TaskGroup() as serving:
            while (node := await cluster.joined()) is not None:
                serving.create_task(self._serve(node))
        self.failure = await self._shelf.write_the_rest(self.failure)
        if self._broken_off:
            words = f"{self._broken_off:,} turns were not asked for: one before them was rejected, cut off or failed"
            self._log.say("prompts", words, "warn")
        if self._unusable:
            counts = ", ".join(f"{label} {count:,}" for label, count in self._unusable.most_common())
            self._log.say(
                "prompts",
                f"prompts that could not be used, stored as failed: {counts}; the first: {self._first_unusable}",
                "warn",
            )

    async def _serve(self, node: Node) -> None:
        """Until this node has ended or is lost: what it had then goes to the others."""
        self._dispatch.join(node)
        why = "has ended"
        handing: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as beside:
            try:
                while not (results := await node.results()).ended:
                    knows = handing is None or handing.done()  # else its credits are of before it was given some
                    await self._take_in(node, results)
                    if knows and results.credits and not self.draining:
                        handing = beside.create_task(self._in_spite_of_the_prompts(self._hand_out(node, results)))
                        await asyncio.wait([handing], timeout=HANDING_S)
            except NodeLostError as error:
                why = str(error)
        lost = self._dispatch.leave(node)
        self._earlier.leave(node)
        if node.name and not self.draining:
            self._log.add(Event(now(), "node", f"{why}; {lost} prompts go to others", level="warn", node=node.name))

    async def _take_in(self, node: Node, results: Results) -> None:
        for event in results.events:
            self._log.add(event)
        await self._check_rendering(results.rendering)
        for old in results.again:
            if id_of(old) in self._earlier:
                continue  # not counted so far: the record that is made anew comes in its place
            if self._dispatch.again(node, old):
                self._replaced.setdefault(id_of(old), []).append(old)
        records: list[Record] = []
        strays: list[Record] = []
        for record in (*results.handed, *results.records):  # a head that was silent is handed what it has asked for
            ours = record.settings == self._accounts.row.id
            counts = self._dispatch.returned(node, record) if ours else None
            (strays if counts is None else records).append(counts or record)
        self._unwritten.update(map(id_of, records))
        if strays or results.held:
            await self._take_from_before(node, strays, results.held)
        if records:
            await self._keep(records)
        is_busy = self._dispatch.outstanding or self._dispatch.waiting or self._feeding.locked()
        if self.draining:
            if self._shelf.is_over:
                await self.stop(0.0)
        elif self._accounts.feed.ended and not is_busy:
            self.draining = True
            await self.stop(0.0)

    async def _take_from_before(self, node: Node, strays: list[Record], held: tuple[Prompt, ...]) -> None:
        """What a node made for an earlier life of this run, or was believed lost with. The set is read on to it, so
        that its records are stored before the node gives them up."""
        before = len(self._earlier)
        counting = self._earlier.bring(node, [x for x in strays if id_of(x) not in self._unwritten], held)
        brought = len(self._earlier) - before + len(counting)
        if brought > 0:
            words = f"brings {len(strays)} records from before, and has {len(held)} prompts in hand"
            self._log.add(Event(now(), "node", f"{words}: {brought} are asked for", node=node.name))
        await self._keep_earlier(counting)
        await self._in_spite_of_the_prompts(self._read_on())

    async def _keep_earlier(self, records: list[Record]) -> None:
        if records:
            self._unwritten.update(map(id_of, records))
            await self._keep(records)

    async def _in_spite_of_the_prompts(self, reading: Awaitable[None]) -> None:
        """Prompts that cannot be read any more end the run; what is in flight still comes in."""
        try:
            await reading
        except UsageError as error:
            self.failure = error
        except OSError as error:
            self.failure = UsageError(f"the prompts cannot be read any more: {error}")
        if self.failure is not None and not self.draining:
            await self._end(None)

    async def _read_on(self) -> None:
        """To all that nodes have brought, where it is near; what is read on the way waits for a node."""
        for _ in range(-(-(len(self._earlier) + READ_ON) // BATCH)):
            async with self._feeding:
                if not len(self._earlier) or self._accounts.feed.ended:
                    return
                usable, records, made = await self._take(BATCH)
                self._dispatch.waiting.extend(usable)
                await self._keep_earlier(made)
            if records:
                await self._keep(records)

    async def _hand_out(self, node: Node, results: Results) -> None:
        """As many as the node has room for; where it is lost, its results say so."""
        left = self._left + len(self._dispatch.waiting)
        count = min(self._dispatch.allowed(node, results.credits, results.capacity, left), BATCH)
        if not count:
            return
        async with self._feeding:
            usable, unusable, made = await self._next(count)
            self._dispatch.offered(node, usable)
            await self._keep_earlier(made)
        if unusable:
            await self._keep(unusable)
        self._size_the_cohorts()
        if usable:
            with suppress(NodeLostError):  # what it was offered goes to the others with the rest of what it has
                await node.offer(usable)

    def _size_the_cohorts(self) -> None:
        """The last one, and what a killed run left short, may be smaller than the gate takes them to be."""
        for number, size in self._accounts.feed.final_sizes().items():
            self._accounts.gate.expect(number, size)

    async def _next(self, count: int) -> tuple[list[Prompt], list[Record], list[Record]]:
        """What lost nodes left, then the set's next prompts."""
        waiting = self._dispatch.waiting
        usable = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        return (usable, [], []) if usable else await self._take(count)

    async def _take(self, count: int) -> tuple[list[Prompt], list[Record], list[Record]]:
        """Of the feed: prompts, rows that cannot be used as records, and records of before in prompts' places."""
        items = await self._accounts.feed.take(count)
        self._left -= len(items)
        fresh, made = self._earlier.met(items)
        return [x for x in fresh if isinstance(x, Prompt)], [x for x in fresh if isinstance(x, Record)], made

    @property
    def finished(self) -> bool:
        """Whether this start has made all that it was to make."""
        return self._accounts.ledger.left <= self.in_vain

    async def _keep(self, records: list[Record]) -> None:
        """Stores what ended; turns that can never be asked for after it end with it."""
        if self._accounts.retry is not None:
            records = [record for record in records if not self._is_in_vain(record)]
        feed, rules = self._accounts.feed, self._accounts.rules
        ended = []
        for record in records:
            why = why_broken_off(record, rules)
            ended += [record, *(feed.broken_off(record, why) if why else ())]
        try:
            await self._shelf.keep(ended)
        except VanishedError as error:
            self.failure = error
            await self._end(0.0)
        except StoreError as error:
            if self.failure is None:
                self.failure = error
                await self._end(None)
            await self._shelf.pause()
        else:
            if self.alarm is not None and not self.draining:
                await self._end(0.0)

    def _is_in_vain(self, record: Record) -> bool:
        """An attempt of a retry that failed is no reason to lose what there is."""
        if FAILURES.isdisjoint(record.labels) or not self._accounts.ledger.is_again(record):
            return False
        self.in_vain += 1
        if self.in_vain <= TOLD:
            words = f"{record.key}: {', '.join(record.labels)}: {record.error}; its older record goes on counting"
            self._log.say("retry", words, "warn")
        return True

    async def _check_rendering(self, rendering: Rendering | None) -> None:
        """Once a server has rendered: nothing is asked of it where records were rendered otherwise."""
        if rendering is None or rendering in self._shelf.renderings:
            return
        self._shelf.renderings.append(rendering)
        try:
            dated = settings.guard_rendering(rendering, settings.read(self._folder.data))
        except GuardError as error:
            self.failure = error
            await self._end(0.0)
            return
        for words in dated:
            self._log.say("render", f"another date, it seems: {words}", "warn")
        self._log.say("render", rendering.told)

    def _written(self, records: list[Record]) -> None:
        for record in records:
            self._count(record)
        self._unwritten.difference_update(map(id_of, records))

    def _count(self, record: Record) -> None:
        accounts = self._accounts
        self._take_back_older(record)
        verdict, _ = judge.judged(record, accounts.rules)
        accounts.ledger.mark(record, verdict)
        self._broken_off += "broken_off" in record.labels
        if goes_on(verdict, record.finish_reason):
            accounts.feed.answered(record)
        if not PROMPT_FAULTS.isdisjoint(record.labels):
            self._unusable.update(record.labels)
            self._first_unusable = self._first_unusable or record.error
        if verdict is not Verdict.ACCEPTED or not judge.TRUNCATED.isdisjoint(record.labels):
            self.examples.add(record, record.labels)
        self._note(accounts.gate.observe(record.cohort, verdict, record.labels))
        if FAILURES.isdisjoint(record.labels):
            for change in self._hours.observe(record.started + record.seconds, record.labels, record.output_tokens):
                self._log.say("drift", f"drift: {change}", "warn", HOURS_FIX)

    def _take_back_older(self, record: Record) -> None:
        """What was counted for an id whose record is replaced by this one, since its server had gone bad."""
        own = (record.key, record.sample, record.turn)
        for old in self._replaced.get(own, ()):
            if old.attempt < record.attempt:
                self._accounts.ledger.take_back(old.labels, old.output_tokens)
                verdict = judge.verdict(old.labels, self._accounts.rules)
                self._accounts.gate.take_back(old.cohort, verdict, old.labels)
        if left := [old for old in self._replaced.pop(own, ()) if old.attempt >= record.attempt]:
            self._replaced[own] = left

    def check_cohorts(self) -> None:
        """Judges every cohort by what is known of it now: at a start with stored rows, and at the end."""
        self._size_the_cohorts()
        for cohort in list(self._accounts.gate.tallies):
            self._note(self._accounts.gate.check(cohort))

    def _note(self, alarm: Alarm | None) -> None:
        """Takes note of an alarm; the first that stops is the run's."""
        if alarm is None:
            return
        then = "the run stops" if alarm.stops else 'the run goes on, by gate.later = "warn"'
        self._log.say("gate", f"gate: {alarm}; {then}", "error" if alarm.stops else "warn")
        if alarm.stops and self.alarm is None:
            self.alarm = alarm

    async def _end(self, grace_s: float | None) -> None:
        self.draining = True
        await self.stop(grace_s)

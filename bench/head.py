"""What one head can take, and how long nodes wait for one another at the end: real collector, feed, ledger and store,
simulated nodes whose messages pass through JSON as over the wire. What the nodes do is not counted as the head's."""

import asyncio
import random
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokenmill import prompts as prompt_set
from tokenmill.cluster.base import Node, Results
from tokenmill.collect import Collector
from tokenmill.core.gate import Gate, Limits
from tokenmill.core.judge import Rules
from tokenmill.core.records import Prompt, Record
from tokenmill.core.status import NodeStatus
from tokenmill.events import EventLog
from tokenmill.feed import Feed
from tokenmill.folder import RunFolder
from tokenmill.ledger import Ledger
from tokenmill.outpost import LINGER_S, Parcel
from tokenmill.resume import Accounts
from tokenmill.settings import Settings
from tokenmill.store import Store

TEXT = "They counted the stones again and wrote the number down. " * 210
IDS = msgspec.Raw(msgspec.json.encode([1000 + number % 90_000 for number in range(3000)]))
"""A completion of 3,000 tokens: 12 KB of text and 18 KB of ids."""


@dataclass(eq=False)
class SimNode:
    """`slots` answers at once, each after `seconds` ÷ `speed`. `cost_s` is the processor time of its own side."""

    name: str
    slots: int
    seconds: tuple[float, float]
    rng: random.Random
    speed: float = 1.0
    cost_s: float = 0.0
    running: int = 0
    number: int = 0
    stopped: bool = False
    queue: list[Prompt] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    something: asyncio.Event = field(default_factory=asyncio.Event)

    async def credits(self) -> int:
        return self.slots + max(16, self.slots) - self.running - len(self.queue)

    async def offer(self, prompts: list[Prompt]) -> None:
        message = msgspec.json.encode(prompts)
        began = time.thread_time()
        self.queue += msgspec.json.decode(message, type=list[Prompt])
        self._begin()
        self.cost_s += time.thread_time() - began

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        while self.queue and self.running < self.slots:
            self.running += 1
            seconds = self.rng.uniform(*self.seconds) / self.speed
            loop.call_later(seconds, self._done, self.queue.pop(0), seconds)

    def _done(self, asked: Prompt, seconds: float) -> None:
        began = time.thread_time()
        self.running -= 1
        own = (asked.key, asked.sample, asked.turn, asked.row, asked.cohort, asked.digest, "s", asked.messages)
        self.records.append(Record(*own, output_ids=IDS, text=TEXT, seconds=seconds, output_tokens=3000))
        self.something.set()
        self._begin()
        self.cost_s += time.thread_time() - began

    async def results(self) -> Results:
        if not self.records and not self.stopped:
            self.something.clear()
            try:
                async with asyncio.timeout(1.0):
                    await self.something.wait()
            except TimeoutError:
                pass
        await asyncio.sleep(LINGER_S)
        began = time.thread_time()
        records, self.records = self.records, []
        self.number += 1
        ended = self.stopped and not records
        results = Results(records, [], await self.credits(), None, ended, capacity=self.slots)
        message = msgspec.json.encode(Parcel(self.number, results))
        self.cost_s += time.thread_time() - began
        return msgspec.json.decode(message, type=Parcel).results

    async def status(self) -> NodeStatus:
        return NodeStatus(self.name, ())

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        self.stopped = True
        self.something.set()


class SimCluster:
    def __init__(self, nodes: list[SimNode]) -> None:
        self.nodes = nodes
        self._left: list[Node] = [*nodes]

    async def run(self) -> None:
        """Its nodes have no life of their own."""

    async def joined(self) -> Node | None:
        return self._left.pop() if self._left else None

    async def status(self) -> list[NodeStatus]:
        return []

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        for node in self.nodes:
            await node.stop(grace_s, keep)


@dataclass
class Took:
    """One simulated run: seconds, the head's processor seconds, the loop's lags in seconds, records by key."""

    seconds: float
    cpu_s: float
    lags: list[float]
    keys: list[str]


def simulate(scratch: Path, nodes: list[SimNode], rows: int) -> Took:
    """A whole run over these nodes."""
    shutil.rmtree(scratch / "sim", ignore_errors=True)
    folder = RunFolder(scratch / "sim")
    folder.create()
    path = scratch / "sim.jsonl"
    lines = (msgspec.json.encode({"id": f"k{number}", "prompt": f"Question {number}? " * 20}) for number in range(rows))
    path.write_bytes(b"\n".join(lines) + b"\n")
    gate = Gate(Limits(max_rejected=1.0, max_truncated=1.0))
    ledger = Ledger(prompt_set.scan(path), samples=1)
    feed = Feed(path, ledger, "s", cohort=200, held={}, dedup=False)
    accounts = Accounts(Settings("s", {}, "fake", "", {}), Rules(), gate, ledger, feed)
    cluster = SimCluster(nodes)
    lags: list[float] = []

    async def listen() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - began - 0.01)

    async def run() -> tuple[float, float]:
        store = Store(folder.data, 1 << 40, lambda text, level: None)
        collector = Collector(accounts, store, folder, EventLog(folder.events))

        async def stop(grace_s: float | None) -> None:
            await cluster.stop(grace_s, keep=False)

        collector.stop = stop
        listening = asyncio.create_task(listen())
        began, cpu = time.perf_counter(), time.process_time()
        await collector.run(cluster)
        took = time.perf_counter() - began, time.process_time() - cpu
        listening.cancel()
        await store.close(seal=False)
        return took

    seconds, cpu = asyncio.run(run())
    feed.close()
    keys = []
    for journal in folder.data.glob("journal-*.jsonl"):
        with journal.open("rb") as data:
            keys += [line[8 : line.index(b'"', 8)].decode() for line in data]
    return Took(seconds, cpu - sum(node.cost_s for node in nodes), lags, keys)


def head(scratch: Path, *, rows: int, nodes: int, seconds: float) -> tuple[str, str, str]:
    """16 nodes of 512 requests in flight."""
    rng = random.Random(1)
    fleet = [SimNode(f"n{number}", 512, (0.5 * seconds, 1.5 * seconds), rng) for number in range(nodes)]
    took = simulate(scratch, fleet, rows)
    once = len(took.keys) == len(set(took.keys)) == rows
    per_record = took.cpu_s / rows
    p99 = statistics.quantiles(took.lags, n=100)[98]
    rate = rows / took.seconds
    here = (
        f"{'keys once' if once else 'KEYS WRONG'}; {rate:,.0f} records/s, {rate * 30.5 / 1000:.1f} MB/s; "
        f"{1000 * per_record:.2f} s of CPU per 1,000, so full at {1 / per_record:,.0f}/s; lag p99 {1000 * p99:.0f} ms"
    )
    return f"one head, {nodes} nodes × 512 in flight, 30 KB", "keys once, lag < 200 ms", here


def end_of_set(scratch: Path, *, rows: int) -> tuple[str, str, str, str]:
    """4 nodes, one of them at 0.3 of the others' speed, against a quarter of the prompts for each."""
    speeds, slots, seconds = (1.0, 1.0, 1.0, 0.3), 8, (0.15, 0.25)
    rng = random.Random(1)
    fleet = [SimNode(f"n{number}", slots, seconds, rng, speed) for number, speed in enumerate(speeds)]
    work = rows * sum(seconds) / 2
    bound = work / (slots * sum(speeds))
    took = simulate(scratch, fleet, rows)
    quarters = work / 4 / (slots * min(speeds))
    words = f"{took.seconds / bound:.3f} × the lower bound of {bound:.1f} s"
    return "end of a set, speeds 1, 1, 1, 0.3", "≤ 1.05 ×", words, f"quarters {quarters / bound:.2f} ×"

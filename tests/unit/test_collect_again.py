"""Records that a node makes anew: stored beside the old ones, counted in their place, and the same after a restart."""

import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests.unit.make import jsonl
from tokenmill import dataset, prompts
from tokenmill.cluster.base import Node, Results
from tokenmill.cluster.local import Alone, Encoded
from tokenmill.collect import Collector
from tokenmill.core.gate import Gate, Limits, Tally
from tokenmill.core.judge import Rules
from tokenmill.core.records import Again, Prompt, Record
from tokenmill.core.status import NodeStatus, PromptCounts
from tokenmill.events import Event, EventLog
from tokenmill.feed import Feed
from tokenmill.folder import RunFolder
from tokenmill.ledger import Ledger
from tokenmill.resume import Accounts
from tokenmill.settings import Settings
from tokenmill.store import Store

ROWS = 200


class Moody:
    """A node whose answers are bad now and then, and who makes some of the bad ones anew: at once, later, or twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name = ""
        self.waiting: list[Prompt] = []
        self.records: list[Record] = []
        self.again: list[Again] = []
        self.stopped = False
        self.most_made = 0
        self.told = 0

    async def credits(self) -> int:
        return 7

    async def offer(self, prompts: list[Prompt]) -> None:
        self.waiting += prompts

    def _make(self) -> None:
        prompt = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        labels = self.rng.choice([(), (), ("repetition",), ("truncated_in_answer",), ("empty", "truncated_in_answer")])
        made = Record(
            **{
                name: getattr(prompt, name) for name in ("key", "sample", "turn", "row", "cohort", "digest", "messages")
            },
            settings="s",
            labels=labels,
            finish_reason="length" if "truncated_in_answer" in labels else "stop",
            attempt=prompt.attempt,
            output_tokens=self.rng.randrange(100),
            repetition=9.0 if "repetition" in labels else 1.0,
        )
        self.records.append(made)
        if {"repetition", "empty"} & set(labels) and prompt.attempt < 4 and self.rng.random() < 0.7:
            own = (made.key, made.sample, made.turn, made.cohort, made.attempt)
            self.again.append(Again(*own, made.labels, made.output_tokens))
            self.waiting.append(msgspec.structs.replace(prompt, attempt=prompt.attempt + 1))
            self.most_made = max(self.most_made, prompt.attempt + 1)

    async def results(self) -> Results:
        await asyncio.sleep(0)
        for _ in range(min(self.rng.randrange(9), len(self.waiting))):
            self._make()
        records, self.records = self.records, []
        again, self.again = tuple(self.again), []
        ended = self.stopped and not records
        self.told += not ended
        events = [] if ended else [Event(0.0, "moody", str(self.told), "")]
        return Results(records, events, 0 if self.stopped else 7, None, ended, again)

    async def status(self) -> NodeStatus:
        return NodeStatus("", ())

    async def run(self) -> None:
        """It has no life of its own."""

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        self.stopped = True
        self.waiting.clear()


LENIENT = Limits(cohort=20, max_rejected=1.0, max_truncated=1.0)


def accounts_of(folder: RunFolder, path: Path, samples: int, limits: Limits = LENIENT) -> Accounts:
    """As a start finds them."""
    rules, gate = Rules(), Gate(limits)
    ledger = Ledger(prompts.scan(path, every_turn=True), samples)
    found = ledger.load(dataset.briefs(folder.data), rules, gate)
    feed = Feed(path, ledger, "s", cohort=20, held=found.cohorts, dedup=False)
    return Accounts(Settings("s", {}, "fake", "", {}), rules, gate, ledger, feed)


def collected(folder: RunFolder, accounts: Accounts, node: Moody, seen: Node) -> None:
    """A whole run with one node; `seen` is how the collector meets it."""

    async def collect() -> None:
        store = Store(folder.data, 1 << 30, lambda text, level: None)
        collector = Collector(accounts, store, folder, EventLog(folder.events))

        async def stop(grace_s: float | None) -> None:
            await node.stop(grace_s, keep=False)

        collector.stop = stop
        async with asyncio.timeout(60):
            await collector.run(Alone(seen, node.run))
        await store.close(seal=False)

    asyncio.run(collect())


def whole(tallies: dict[int, Tally]) -> dict[int, Tally]:
    return {number: replace(tally, size=0, warned=False) for number, tally in tallies.items()}


@pytest.mark.parametrize(("turns", "samples"), [(1, 1), (4, 1), (3, 2)])
def test_totals_add_up_while_rows_are_made_anew_and_are_the_same_after_a_restart(
    tmp_path: Path, turns: int, samples: int
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    node = Moody(random.Random(seed))
    assert_totals_add_up(tmp_path, node, Encoded(node), seed, turns, samples)


def assert_totals_add_up(tmp_path: Path, node: Moody, seen: Node, seed: int, turns: int, samples: int) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    said = [[{"role": "user", "content": f"q{n}.{turn}"} for turn in range(1 + n % turns)] for n in range(ROWS)]
    path = jsonl(tmp_path / "prompts.jsonl", [{"id": f"k{n}", "messages": own} for n, own in enumerate(said)])
    ids = sorted((n, sample, turn) for n in range(ROWS) for sample in range(samples) for turn in range(1 + n % turns))
    accounts = accounts_of(folder, path, samples)
    collected(folder, accounts, node, seen)
    accounts.feed.close()
    assert node.most_made > 2, "the test made too few rows anew"
    records = list(dataset.records(folder.data))
    assert [(record.row, record.sample, record.turn) for record in records] == ids
    briefs = list(dataset.briefs(folder.data))
    assert len(briefs) > len(ids)
    current = list(dataset.current(folder.data, dataset.Brief))
    assert sorted((brief.key, brief.turn, brief.labels) for brief in current) == sorted(
        (record.key, record.turn, list(record.labels)) for record in records
    )
    rejected = sum(bool({"repetition", "empty"} & set(record.labels)) for record in records)
    failed = sum("broken_off" in record.labels for record in records)
    assert bool(failed) == (turns > 1)
    counts = accounts.ledger.counts()
    assert counts == PromptCounts(len(ids), len(ids) - rejected - failed, rejected, failed, 0)
    # A turn was asked for behind good ones only, and behind each of them.
    for before, after in pairwise(records):
        if after.turn:
            assert ("broken_off" in after.labels) == bool(before.labels), f"seed {seed}: {before} {after}"
    # What was counted on the way is what a new start counts.
    again = accounts_of(folder, path, samples)
    again.feed.close()
    assert again.ledger.counts() == counts
    assert again.ledger.labels == accounts.ledger.labels
    assert again.ledger.tokens == accounts.ledger.tokens == sum(record.output_tokens for record in records)
    assert whole(again.gate.tallies) == whole(accounts.gate.tallies)

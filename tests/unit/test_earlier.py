"""Nodes that outlive their run, again and again: what they made meanwhile is stored once, where it was asked for just
so, and nothing is generated twice. The run itself, its conversations, and its retries."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from tests.chaos.test_turns import assert_conversations, write_conversations
from tests.unit.make import jsonl
from tokenmill import dataset, prompts, resume, retry, settings
from tokenmill.cluster.base import Node, Results
from tokenmill.collect import Collector
from tokenmill.core.dispatch import Id, id_of
from tokenmill.core.gate import Gate, Limits
from tokenmill.core.judge import Rules
from tokenmill.core.records import Parts, Prompt, Record
from tokenmill.core.status import NodeStatus
from tokenmill.errors import NodeLostError
from tokenmill.events import EventLog
from tokenmill.feed import Feed
from tokenmill.folder import RunFolder
from tokenmill.ledger import Ledger
from tokenmill.resume import Accounts
from tokenmill.settings import Settings
from tokenmill.store import Store, plain

ROWS = 60
RUN = Settings("run", {"seed": 1, "sampling": {}}, "fake", "", {})


class Survivor:
    """A node as its heads see it: it goes on without them, spools, and introduces itself to the next."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.rng = rng
        self.settings = ""
        self.hand: list[Prompt] = []
        self.spool: list[Record] = []
        self.sent: list[Record] = []
        self.forged: list[Record] = []
        self.made: dict[str, Id] = {}
        self.met = False
        self.stopped = False
        self.asked: Callable[[], None] = lambda: None

    def make(self, most: int) -> list[Record]:
        """Answers some of what it has in hand."""
        records = []
        for _ in range(min(self.rng.randrange(most + 1), len(self.hand))):
            prompt = self.hand.pop(self.rng.randrange(len(self.hand)))
            text = f"{self.name}'s answer {len(self.made)} to {prompt.key}"
            self.made[text] = id_of(prompt)
            records.append(answer(prompt, text, self.settings, bad=self.rng.random() < 0.2))
        return records

    def is_alone(self) -> None:
        """Its head is gone: what it sent may not have arrived. It tells the next one of answers, too, that do not
        count: of other settings, of the run in a retry, to another history, to turns that nobody asks for."""
        self.spool += [*self.sent, *self.make(9)]
        self.sent, self.met, self.stopped = [], False, False
        wrong: list[dict[str, Any]] = [{"settings": "x"}, {"messages": Raw(b"[1]")}, {"turn": 9}]
        wrong += [{"settings": "run"}] if self.settings != "run" else []
        forged = [answer(prompt, "forged", self.settings, bad=False) for prompt in self.hand]
        self.forged = [replace(one, **self.rng.choice(wrong)) for one in forged]

    async def credits(self) -> int:
        return 0

    async def offer(self, prompts: list[Prompt]) -> None:
        assert {id_of(one) for one in prompts}.isdisjoint(map(id_of, self.hand)), "it has them in hand already"
        self.hand += prompts

    async def results(self) -> Results:
        await asyncio.sleep(0)
        self.asked()
        credits = 0 if self.stopped else max(0, 6 - len(self.hand))
        if not self.met:
            self.met = True
            handed, held = (*self.forged, *self.spool), tuple(self.hand)
            return Results([], [], credits, handed=handed, held=held, capacity=4)
        self.spool, self.sent = [], self.make(3)
        return Results(self.sent, [], credits, ended=self.stopped and not self.sent, capacity=4)

    async def status(self) -> NodeStatus:
        return NodeStatus("", ())

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        self.stopped = True
        self.hand.clear()


def answer(prompt: Prompt, text: str, settings: str, *, bad: bool) -> Record:
    names = ("key", "sample", "turn", "row", "cohort", "digest", "messages", "tools")
    own = {name: getattr(prompt, name) for name in names}
    said = {"text": text, "parts": Parts(0, 0, 0, len(text)), "finish_reason": "stop", "output_tokens": 1}
    labels = {"labels": ("repetition",) if bad else (), "repetition": 9.0 if bad else 1.0}
    return Record(**{**own, **said, **labels, "settings": settings})


class Together:
    """A cluster of them."""

    def __init__(self, nodes: list[Survivor]) -> None:
        self.joining: list[Node | None] = [*nodes, None]

    async def run(self) -> None:
        """They have no life of their own."""

    async def joined(self) -> Node | None:
        return self.joining.pop(0)

    async def status(self) -> list[NodeStatus]:
        return []

    async def stop(self, grace_s: float | None, keep: bool) -> None:
        """See below."""


def accounts_of(folder: RunFolder, path: Path, words: tuple[str, ...]) -> Accounts:
    """As a start finds them."""
    recorded = settings.read(folder.data)
    row, again = retry.begin(RUN, words, recorded) if words else (RUN, None)
    rules, gate = Rules(), Gate(Limits(cohort=20, max_rejected=1.0))
    ledger = Ledger(prompts.scan(path, every_turn=True), 2, retry=again)
    found = ledger.load(dataset.briefs(folder.data), rules, gate)
    begun = resume._begun(folder.data, ledger, rules) if again is None else None
    before = resume._before(folder.data, ledger)
    feed = Feed(path, ledger, row.id, cohort=20, held=found.cohorts, dedup=False, begun=begun, before=before)
    return Accounts(row, rules, gate, ledger, feed, again)


async def life(folder: RunFolder, path: Path, nodes: list[Survivor], words: tuple[str, ...], calls: int) -> bool:
    """One start of the run, killed at a moment; whether it came to its end before."""
    accounts = accounts_of(folder, path, words)
    store = Store(folder.data, 1 << 30, lambda text, level: None)
    collector = Collector(accounts, store, folder, EventLog(folder.events))
    left = calls

    async def stop(grace_s: float | None) -> None:
        for node in nodes:
            await node.stop(grace_s, keep=False)

    def asked() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            running.cancel()

    for node in nodes:
        node.asked, node.settings = asked, accounts.row.id
    collector.stop = stop
    running = asyncio.create_task(collector.run(Together(nodes)))
    async with asyncio.timeout(30):
        await asyncio.wait([running])
    await store.close(seal=False)
    accounts.feed.close()
    for node in nodes:
        node.is_alone()
    return not running.cancelled() and (running.result(), True)[1]


def test_what_nodes_made_without_their_run_counts_once_and_is_not_made_again(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder, path = RunFolder(tmp_path / "run"), tmp_path / "prompts.jsonl"
    folder.create()
    asked = write_conversations(path, rng, ROWS)
    nodes = [Survivor(name, rng) for name in ("a", "b", "c")]
    begun = 0
    assert not asyncio.run(life(folder, path, nodes, (), 3)), "the first is killed before anything is stored"
    for words in ((), ("repetition",), ("repetition",)):
        while not asyncio.run(life(folder, path, nodes, words, rng.randrange(5, 40))):
            begun += 1
        stored = [record for record in rows(folder) if record.text]
        texts = {record.text for record in stored}
        assert len(texts) == len(stored), "an answer is stored twice"
        made = {text: own for node in nodes for text, own in node.made.items()}
        assert texts <= made.keys()
        never_asked = {id_of(record) for record in rows(folder) if not record.text}
        lost = {own for text, own in made.items() if text not in texts}
        # A turn whose conversation a retry has mended is asked for by that start alone, and by the run itself later on.
        assert lost <= (never_asked if words else set()), "answers are lost"
        records = list(dataset.records(folder.data))
        assert {(one.key, one.sample, one.turn) for one in records} == {
            (key, sample, turn) for key, turns in asked.items() for sample in range(2) for turn in range(turns)
        }
        if words:
            settings.end_retry(folder.data, max(row.retry for row in settings.read(folder.data)))
        else:
            assert_conversations(records, asked, Rules(), samples=2)
    assert begun > 5, "the test killed too few"


def test_what_a_node_brings_while_the_run_ends_is_stored(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path / "run"), tmp_path / "prompts.jsonl"
    folder.create()
    jsonl(path, [{"id": f"k{n}", "prompt": f"{n}?"} for n in range(ROWS)])
    node = Survivor("a", random.Random(1))
    assert not asyncio.run(life(folder, path, [node], (), 2))
    node.spool += [answer(prompt, f"of {prompt.key}", RUN.id, bad=False) for prompt in node.hand]
    node.hand.clear()
    node.stopped = True
    stored = {record.text for record in rows(folder)}
    brought = {record.text for record in node.spool} - stored

    async def ending() -> None:
        accounts = accounts_of(folder, path, ())
        store = Store(folder.data, 1 << 30, lambda text, level: None)
        collector = Collector(accounts, store, folder, EventLog(folder.events))
        collector.draining = True
        await collector.run(Together([node]))
        await store.close(seal=False)
        accounts.feed.close()

    asyncio.run(ending())
    assert brought
    assert {record.text for record in rows(folder)} == stored | brought


class Lost(Survivor):
    """It dies as soon as it is asked for something."""

    lost = False

    async def offer(self, prompts: list[Prompt]) -> None:
        self.lost = True
        raise NodeLostError("it is lost")

    async def results(self) -> Results:
        if self.lost:
            raise NodeLostError("it is lost")
        return await super().results()


def test_rows_that_cannot_be_used_are_stored_though_the_node_is_lost_that_they_were_read_for(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path / "run"), tmp_path / "prompts.jsonl"
    folder.create()
    jsonl(path, [{"id": f"k{n}", "prompt": f"{n}?" if n % 3 else ""} for n in range(ROWS)])
    rng = random.Random(1)
    assert asyncio.run(life(folder, path, [Lost("a", rng), Survivor("b", rng)], (), 10_000))
    assert len(rows(folder)) == 2 * ROWS, "prompts have no record"


def rows(folder: RunFolder) -> list[Record]:
    """Every row of the store, superseded ones as well."""
    lines = [line for path in folder.data.glob("journal-*.jsonl") for line in path.read_bytes().splitlines(True)]
    return [msgspec.json.decode(plain(line), type=Record) for line in lines]

"""The seam between a run and its node: credits, prompts, records, stop; the same through encode and decode.

Two scripted servers take seconds to start, so one story is played on them, once for each way through the seam, and
most tests look at what it left.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from tests import bynumber
from tests.conftest import free_port
from tests.harness import Case, requests
from tokenmill import configfile
from tokenmill.cluster.base import Node, Results
from tokenmill.cluster.local import Encoded
from tokenmill.core.records import NULL, Prompt, Record
from tokenmill.core.status import NodeStatus
from tokenmill.errors import StoppedError
from tokenmill.folder import ServerEntry
from tokenmill.generate import LOOKAHEAD
from tokenmill.machine import processes, threads
from tokenmill.node import LocalNode
from tokenmill.staging.staged import Staged
from tokenmill.testing.script import fingerprint

WAIT_S = 30.0
SERVERS, SLOTS = 2, 4
EASY, MORE, LATE = 48, 20, 4
"""Prompts that are answered, that meet a stop with grace, and that are offered after it."""

SEAMS: dict[str, Callable[[LocalNode], Node]] = {"directly": lambda node: node, "encoded": Encoded}

each_way = pytest.mark.parametrize("way", SEAMS)


class Driver:
    """A run's side of the seam: hands prompts out against credits and keeps what comes back."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.offered: list[Prompt] = []
        self.records: list[Record] = []
        self.last = Results([], [], 0)
        self.most_granted = 0

    @property
    def outstanding(self) -> int:
        return len(self.offered) - len(self.records)

    async def turn(self) -> Results:
        self.last = await self.node.results()
        self.records += self.last.records
        self.most_granted = max(self.most_granted, self.outstanding + self.last.credits)
        return self.last

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                await self.turn()

    async def until_ended(self) -> None:
        await self.until(lambda: self.last.ended)

    async def offer(self, prompts: list[Prompt]) -> None:
        self.offered += prompts
        await self.node.offer(prompts)

    async def work(self, prompts: list[Prompt]) -> None:
        """Hands all of them out, as credits allow, and waits for their records."""
        left = list(prompts)
        async with asyncio.timeout(WAIT_S):
            while left or self.outstanding:
                count = min((await self.turn()).credits, len(left))
                if count:
                    await self.offer(left[:count])
                    left = left[count:]


@dataclass
class Story:
    """What was seen while a node lived, and the servers it had."""

    records: list[Record] = field(default_factory=list)
    drained: list[Record] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    at_once: dict[int, int] = field(default_factory=dict)
    credits_at_first: list[int] = field(default_factory=list)
    most_granted: int = 0
    at_work: NodeStatus | None = None
    after_the_end: Results | None = None
    servers: tuple[ServerEntry, ...] = ()


def make_case(folder: Path, **args: Any) -> Case:
    case = Case(folder, free_port())
    args = {"slots": SLOTS, "requests": str(folder / "requests.jsonl"), **args}
    case.write(engine={"args": args}, fleet={"servers": SERVERS})
    return case


def make_node(case: Case) -> LocalNode:
    made = configfile.load(case.config)
    case.run_folder.create()
    return LocalNode(made, case.run_folder, "settings-1", [])


def drive(node: LocalNode, scene: Coroutine[Any, Any, None]) -> None:
    """Plays a scene while the node lives; then the node is stopped, whatever happened."""

    async def both() -> None:
        living = asyncio.create_task(node.run())
        playing = asyncio.create_task(scene)
        await asyncio.wait([living, playing], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([playing], timeout=WAIT_S)
        await node.stop(0.0, keep=False)
        async with asyncio.timeout(WAIT_S):
            await living
        await playing

    asyncio.run(both())


def prompts(count: int, start: int = 0) -> list[Prompt]:
    return [
        Prompt(
            key=f"p{n}",
            sample=n % 2,
            row=n,
            cohort=n // 20,
            digest=f"{n:016x}",
            messages=msgspec.Raw(msgspec.json.encode([{"role": "user", "content": question(n)}])),
            tools=msgspec.Raw(b'[{"type":"function"}]') if n % 3 == 0 else NULL,
        )
        for n in range(start, start + count)
    ]


def question(n: int) -> str:
    return f"Question number {n}: »ü🙂\u2028«?"


def play(case: Case, seam: Callable[[LocalNode], Node]) -> Story:
    """48 prompts; 20 more and, once some of them are begun, a stop with grace; then 4 that come too late."""
    node, story = make_node(case), Story()
    driver = Driver(seam(node))

    async def scene() -> None:
        story.credits_at_first = [await driver.node.credits(), (await driver.turn()).credits]
        await driver.work(prompts(EASY))
        story.records = list(driver.records)
        story.most_granted = driver.most_granted
        story.servers = case.run_folder.state().servers
        await driver.offer(prompts(MORE, EASY))
        await until_begun(case, EASY + SLOTS)
        story.at_work = await driver.node.status()
        await driver.node.stop(None, False)
        await driver.offer(prompts(LATE, EASY + MORE))
        await driver.until_ended()
        story.drained = driver.records[EASY:]
        story.after_the_end = await driver.node.results()

    try:
        drive(node, scene())
        look_at_requests(case, story)
    finally:
        case.cleanup()
    return story


def look_at_requests(case: Case, story: Story) -> None:
    """How often each question was begun, and how many a server had at once, as the servers saw it."""
    at_once: Counter[int] = Counter()
    for entry in requests(case.folder / "requests.jsonl"):
        at_once[entry["port"]] += ("begin" in entry) - ("end" in entry)
        story.at_once[entry["port"]] = max(story.at_once.get(entry["port"], 0), at_once[entry["port"]])
        story.begun[entry["prompt"]] += is_begin(entry)


def is_begin(entry: dict[str, Any]) -> bool:
    return "begin" in entry and entry["prompt"].startswith("Question")


async def until_begun(case: Case, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while sum(map(is_begin, requests(case.folder / "requests.jsonl"))) < count:  # noqa: ASYNC110 the file is another's
            await asyncio.sleep(0.02)


Tell = Callable[[str], Story]


@pytest.fixture(scope="module")
def tell(tmp_path_factory: pytest.TempPathFactory) -> Tell:
    """The story by the way through the seam, played when it is first asked for."""
    told: dict[str, Story | Exception] = {}

    def story(way: str) -> Story:
        if way not in told:
            try:
                told[way] = play(make_case(tmp_path_factory.mktemp("node"), **{"latency-ms": 120}), SEAMS[way])
            except Exception as error:  # noqa: BLE001 told to every test that asks
                told[way] = error
        found = told[way]
        if isinstance(found, Exception):
            raise found
        return found

    return story


# -- prompts and records -----------------------------------------------------------------------------------------------
@each_way
def test_every_prompt_comes_back_once_with_the_answer_to_itself(tell: Tell, way: str) -> None:
    records = {record.key: record for record in tell(way).records}
    assert len(tell(way).records) == EASY
    for prompt in prompts(EASY):
        record = records[prompt.key]
        assert (record.sample, record.row, record.cohort) == (prompt.sample, prompt.row, prompt.cohort)
        assert (bytes(record.messages), bytes(record.tools)) == (bytes(prompt.messages), bytes(prompt.tools))
        assert (record.digest, record.settings) == (prompt.digest, "settings-1")
        assert fingerprint(question(prompt.row)) in record.answer
        assert bytes(record.output_ids).startswith(b"[")


def test_records_are_the_same_through_encode_and_decode(tell: Tell) -> None:
    assert [content(r) for r in by_row(tell("encoded"))] == [content(r) for r in by_row(tell("directly"))]


def by_row(story: Story) -> list[Record]:
    return sorted(story.records, key=lambda record: record.row)


def content(record: Record) -> dict[str, Any]:
    """What of a record does not depend on which server answered, and when."""
    fields = msgspec.structs.asdict(record)
    return {k: v for k, v in fields.items() if k not in ("server", "started", "seconds", "accept_length")}


# -- credits -----------------------------------------------------------------------------------------------------------
@each_way
def test_there_are_no_credits_before_a_server_is_ready(tell: Tell, way: str) -> None:
    assert tell(way).credits_at_first == [0, 0]


@each_way
def test_credits_fill_the_slots_and_a_waiting_room_and_no_more(tell: Tell, way: str) -> None:
    slots = SERVERS * SLOTS
    assert slots < tell(way).most_granted <= slots + max(LOOKAHEAD, slots)


@each_way
def test_no_server_is_asked_for_more_at_once_than_it_can_run(tell: Tell, way: str) -> None:
    assert list(tell(way).at_once.values()) == [SLOTS] * SERVERS


@each_way
def test_status_tells_what_the_node_is_at(tell: Tell, way: str) -> None:
    status = tell(way).at_work
    assert status is not None
    assert [server.state for server in status.servers] == ["ready", "ready"]
    assert sum(server.in_flight for server in status.servers) == status.in_flight > 0
    assert (status.capacity, status.tokens > 0) == (SERVERS * SLOTS, True)


# -- the end -----------------------------------------------------------------------------------------------------------
@each_way
def test_a_stop_with_grace_gives_every_prompt_that_was_begun_its_record(tell: Tell, way: str) -> None:
    story = tell(way)
    begun = {question(n) for n in range(EASY, EASY + MORE + LATE)} & set(+story.begun)
    assert len(story.drained) == len(begun)
    assert all(record.finish_reason == "stop" for record in story.drained)
    assert max(story.begun.values()) == 1


@each_way
def test_a_stop_with_grace_begins_nothing_more(tell: Tell, way: str) -> None:
    keys = {record.key for record in tell(way).drained}
    assert SLOTS <= len(keys) < MORE


@each_way
def test_prompts_that_come_after_a_stop_are_not_begun(tell: Tell, way: str) -> None:
    """A run takes credits, then reads prompts, then offers them: Ctrl-C may come in between."""
    story = tell(way)
    assert not late_keys() & {record.key for record in story.drained}
    assert not {question(n) for n in range(EASY + MORE, EASY + MORE + LATE)} & set(+story.begun)


def late_keys() -> set[str]:
    return {prompt.key for prompt in prompts(LATE, EASY + MORE)}


@each_way
def test_the_end_is_told_and_told_again(tell: Tell, way: str) -> None:
    again = tell(way).after_the_end
    assert again is not None
    assert (again.ended, again.records, again.credits) == (True, [], 0)


@each_way
def test_the_servers_are_gone_afterwards(tell: Tell, way: str) -> None:
    servers = tell(way).servers
    assert len(servers) == SERVERS
    assert [pid for entry in servers for pid in bynumber.members(-1, entry.nonce)] == []


@each_way
def test_a_stop_without_grace_cuts_even_a_stop_with_it(tmp_path: Path, way: str) -> None:
    case = make_case(tmp_path, **{"hang-after": SLOTS})  # each server answers its canary, and then nothing more
    node = make_node(case)
    driver = Driver(SEAMS[way](node))
    took: list[float] = []

    async def scene() -> None:
        await driver.until(lambda: driver.last.credits)
        await driver.offer(prompts(SLOTS))
        await until_begun(case, SLOTS)
        await driver.node.stop(None, False)
        await asyncio.sleep(0.2)
        assert not (await driver.turn()).ended, "it had all the time it took"
        began = time.monotonic()
        await driver.node.stop(0.0, False)
        await driver.until_ended()
        took.append(time.monotonic() - began)

    try:
        drive(node, scene())
        servers = case.run_folder.state().servers
        assert [pid for entry in servers for pid in bynumber.members(-1, entry.nonce)] == []
    finally:
        case.cleanup()
    assert driver.records == []
    assert took[0] < 10.0


@pytest.mark.parametrize(
    "what", ["what staging reads", "tokenizer_config.json", "model.safetensors.index.json", "generation_config.json"]
)
def test_a_stop_ends_a_node_though_the_mount_of_its_model_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A pipe that nobody writes into is read for as long as a file on such a mount is."""
    monkeypatch.setattr(threads, "STOPPED_S", 0.2)
    model = tmp_path / "model"
    model.mkdir()
    pipe = model / what
    os.mkfifo(pipe)

    def staged(*_: object) -> Staged:
        if what == "what staging reads":
            pipe.read_bytes()
        return Staged(model)

    monkeypatch.setattr("tokenmill.node.stage", staged)
    case = Case(tmp_path, free_port())
    case.write(model={"path": str(model)}, stage={"to": "off"})
    node = make_node(case)
    driver = Driver(node)

    async def story() -> None:
        living = asyncio.create_task(node.run())
        await asyncio.sleep(0.2)
        await node.stop(None, keep=False)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(living)
        finally:
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # lets the reader go
        assert any("is its mount away" in event.text for event in (await driver.turn()).events)

    try:
        asyncio.run(story())
    finally:
        case.cleanup()


def stopped_at_once(case: Case, *, keep: bool) -> LocalNode:
    """A node that meets servers of `up` and is stopped before it adopts them."""
    assert case.wait(case.command("up", str(case.config))) == 0
    earlier = case.run_folder.state().servers
    node = LocalNode(configfile.load(case.config), case.run_folder, "settings-1", earlier)
    late = Driver(node)

    async def stop() -> None:
        await node.stop(0.0, keep=keep)
        await late.until_ended()

    drive(node, stop())
    assert [processes.alive(entry.process) for entry in earlier] == [keep] * len(earlier)
    assert case.run_folder.state().servers == (earlier if keep else ())
    return node


@pytest.mark.parametrize("keep", [False, True])
def test_servers_of_an_earlier_start_are_ended_by_a_node_that_is_stopped_while_it_stages_unless_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    def staging(*_: object) -> NoReturn:
        raise StoppedError("stopped while it was staged")

    monkeypatch.setattr("tokenmill.node.stage", staging)
    case = make_case(tmp_path)
    try:
        node = stopped_at_once(case, keep=keep)
        assert node.supervisors == []
    finally:
        case.cleanup()


def test_servers_that_are_kept_outlive_a_node_that_is_stopped_before_it_adopts_them(tmp_path: Path) -> None:
    case = make_case(tmp_path)
    try:
        node = stopped_at_once(case, keep=True)
        assert len(node.supervisors) == SERVERS
    finally:
        case.cleanup()

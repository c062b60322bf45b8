"""A node that outlives its head: what it makes meanwhile is spooled, handed over once, and never forgotten."""

import asyncio
import os
import random
import resource
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import bynumber
from tests.contract.test_node_seam import make_case, prompts
from tests.harness import Case
from tests.unit.make import record
from tests.unit.test_collect_again import Moody, assert_totals_add_up
from tokenmill import __version__, configfile, events
from tokenmill import outpost as outpost_module
from tokenmill.cluster import far
from tokenmill.cluster.base import Results
from tokenmill.cluster.far import FarNode
from tokenmill.core.records import Again, Prompt, Record
from tokenmill.core.status import NodeStatus
from tokenmill.errors import UnreachedError
from tokenmill.outpost import Order, Outpost, Parcel, folder_of
from tokenmill.spool import Spool

WAIT_S = 30.0
SILENT_S = 0.3
COUNT = 12


class Head:
    """A head's side of one outpost: takes parcels and acknowledges them."""

    def __init__(self, outpost: Outpost) -> None:
        self.outpost = outpost
        self.acknowledged = 0
        self.records: list[Record] = []
        self.handed: list[Record] = []

    async def turn(self, *, acknowledge: bool = True) -> Parcel:
        found = await self.outpost.results(self.acknowledged)
        parcel = msgspec.json.decode(found, type=Parcel)
        if acknowledge:
            self.acknowledged = parcel.number
            self.records += parcel.results.records
            self.handed += parcel.results.handed
        return parcel

    async def until(self, done: Callable[[Parcel], object]) -> Parcel:
        async with asyncio.timeout(WAIT_S):
            while not done(parcel := await self.turn()):
                pass
        return parcel


def order_of(case: Case, head: str = "", version: str = __version__) -> bytes:
    config = configfile.load(case.config)
    words = config.model_dump_json(exclude_none=True), "settings-1", "n0", ()
    return msgspec.json.encode(Order(*words, head, version))


def spooled(case: Case) -> int:
    path = folder_of(configfile.load(case.config), "n0").path / "spool.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not done():  # noqa: ASYNC110 it is a file that is looked at
            await asyncio.sleep(0.05)


async def ready(outpost: Outpost, case: Case) -> Head:
    await outpost.begin(order_of(case))
    head = Head(outpost)
    await head.until(lambda parcel: parcel.results.credits)
    return head


async def end(outpost: Outpost, head: Head) -> None:
    await outpost.stop(0.0, False)
    await head.until(lambda parcel: parcel.results.ended)


def test_what_is_made_while_no_head_asks_is_handed_to_the_next_one_once(tmp_path: Path) -> None:
    case = make_case(tmp_path, **{"latency-ms": 100})

    async def story() -> None:
        outpost = Outpost(SILENT_S)
        head = await ready(outpost, case)
        message = msgspec.json.encode(prompts(COUNT))
        await outpost.offer(message)
        await outpost.offer(message)  # its answer was lost: it counts once
        await until(lambda: spooled(case) == COUNT)
        await outpost.begin(order_of(case))
        late = Head(outpost)
        lost = await late.turn(acknowledge=False)
        assert len(lost.results.handed) == COUNT
        brought = (await late.turn()).results.handed
        assert sorted(record.key for record in brought) == sorted(prompt.key for prompt in prompts(COUNT))
        await late.turn()
        assert spooled(case) == 0
        assert not (await late.turn()).results.handed
        await end(outpost, late)
        assert head.records == late.records == []

    run(case, story())


def test_a_new_head_hears_what_a_node_has_in_hand(tmp_path: Path) -> None:
    case = make_case(tmp_path, **{"latency-ms": 1500})

    async def story() -> None:
        outpost = Outpost(SILENT_S, quiet_s=1.5)  # a full machine has kept its status waiting for 0.3 s
        await ready(outpost, case)
        await outpost.offer(msgspec.json.encode(prompts(COUNT)))
        await outpost.begin(order_of(case))
        late = Head(outpost)
        await late.turn(acknowledge=False)  # it was lost
        held = (await late.turn()).results.held
        assert {prompt.key for prompt in held} == {prompt.key for prompt in prompts(COUNT)}
        assert not (await late.turn()).results.held
        await late.until(lambda parcel: len(late.records) == COUNT)
        await end(outpost, await followed(outpost, case))

    run(case, story())


async def followed(outpost: Outpost, case: Case) -> Head:
    """A run on another machine, of the same name, may not have the node while its own asks, and may once it is dead."""

    async def live() -> None:
        while True:
            await outpost.status()
            await asyncio.sleep(0.01)

    own = asyncio.create_task(live())
    refused = await outpost.begin(order_of(case, "another"))
    assert b"works for another run of the same folder" in (refused or b"")
    own.cancel()
    assert b"9.9 at the run's head" in (await outpost.begin(order_of(case, "another", "9.9")) or b"")
    assert await outpost.begin(order_of(case, "another")) is None
    return Head(outpost)


def test_a_node_without_a_head_ends_its_servers_in_time_and_keeps_its_records_for_later(tmp_path: Path) -> None:
    case = make_case(tmp_path, **{"latency-ms": 100})
    text = case.config.read_text().replace("[fleet]", '[fleet]\nwait_for_head = "1500ms"')
    case.config.write_text(text)

    async def story() -> None:
        outpost = Outpost(SILENT_S)
        await ready(outpost, case)
        servers = folder_of(configfile.load(case.config), "n0").state().servers
        await outpost.offer(msgspec.json.encode(prompts(COUNT)))
        async with asyncio.timeout(WAIT_S):
            await outpost.deserted.wait()
        assert [pid for entry in servers for pid in bynumber.members(-1, entry.nonce)] == []
        assert spooled(case) == COUNT
        again = Outpost(SILENT_S)
        late = await ready(again, case)
        assert len(late.handed) == COUNT
        await again.stop(0.0, False)  # and this head does not live to hear that it has ended
        async with asyncio.timeout(WAIT_S):
            await again.deserted.wait()

    run(case, story())


def test_what_ends_a_node_by_a_bug_is_told_to_its_head(tmp_path: Path) -> None:
    case = make_case(tmp_path)

    async def story() -> None:
        (folder_of(configfile.load(case.config), "n0").path / "spool.jsonl").mkdir(parents=True)
        outpost = Outpost()
        await outpost.begin(order_of(case))
        last = await Head(outpost).until(lambda parcel: parcel.results.ended)
        assert last.trouble is not None
        assert (last.trouble.kind, last.trouble.text[:24]) == ("PluginError", "node: IsADirectoryError:")

    run(case, story())


def test_a_node_that_is_dismissed_keeps_what_it_made_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` of a run that is dead. Until then it says what its machine is, and what its doctor found."""
    case = make_case(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(tmp_path)))))

    async def story() -> None:
        outpost = Outpost(SILENT_S)
        await ready(outpost, case)
        status = msgspec.json.decode(await outpost.status(), type=NodeStatus)
        assert status.environment is not None
        assert (status.environment.node, status.environment.engine) == ("n0", "fake")
        assert any("PYTHONPATH" in finding.text for finding in status.doctor)
        servers = folder_of(configfile.load(case.config), "n0").state().servers
        await outpost.offer(msgspec.json.encode(prompts(COUNT)))
        await until(lambda: spooled(case) > 0)
        async with asyncio.timeout(WAIT_S):
            await outpost.dismiss()
            await outpost.deserted.wait()
        assert [pid for entry in servers for pid in bynumber.members(-1, entry.nonce)] == []
        assert 0 < spooled(case) <= COUNT

    run(case, story())


def test_a_node_whose_head_dies_while_it_ends_leaves_by_itself_and_keeps_its_records(tmp_path: Path) -> None:
    """Its process would hold GPUs of Ray's for ever."""
    case = make_case(tmp_path, **{"latency-ms": 600})

    async def story() -> None:
        outpost = Outpost(SILENT_S)
        await ready(outpost, case)
        await outpost.offer(msgspec.json.encode(prompts(2)))
        async with asyncio.timeout(WAIT_S):
            while msgspec.json.decode(await outpost.status(), type=NodeStatus).in_flight < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await outpost.stop(None, False)
            await outpost.deserted.wait()
        assert spooled(case) == 2

    run(case, story())


def test_a_spool_that_a_full_disk_or_a_death_tore_holds_every_record_once(tmp_path: Path) -> None:
    records = [record(f"k{n}", row=n) for n in range(3)]
    path = tmp_path / "spool.jsonl"
    Spool(path).append(records[:1])
    with path.open("ab") as torn:
        torn.write(b'{"key":"k1","sam')
    spool = Spool(path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 400, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            spool.append(records[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    spool.append(records[1:])
    assert [row.key for row in Spool(path).read()] == ["k0", "k1", "k2"]
    assert spool.rows == 3


class Alike(Outpost):
    """An outpost of a node that needs no server."""

    def __init__(self, node: Moody, spool: Path) -> None:
        super().__init__(SILENT_S / 6)
        self.moody = node
        self.path = spool

    async def _serve(self, order: Order) -> None:
        self._spool = Spool(self.path)
        self._node = self.moody
        while not self.moody.stopped:  # noqa: ASYNC110 it has no event
            await asyncio.sleep(0.01)


class Telling(Moody):
    """Gives what it is told to give, once."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.next = Results([], [], 0)

    async def results(self) -> Results:
        found, self.next = self.next, Results([], [], 0)
        return found

    async def offer(self, prompts: list[Prompt]) -> None:
        """They are in hand."""


def test_a_new_head_is_told_of_rows_made_anew_that_it_counts_alone(tmp_path: Path) -> None:
    """Of those that were in hand, spooled or made anew before it came it has another account: the first one stays."""

    def anew(key: str, attempt: int, sample: int = 0) -> Again:
        return Again(key, sample, 0, 1, attempt, ("empty",), 1)

    node = Telling()
    (tmp_path / "case").mkdir()
    order = order_of(make_case(tmp_path / "case"))
    outpost = Alike(node, tmp_path / "spool.jsonl")

    async def story() -> None:
        await outpost.begin(order)
        first = Head(outpost)
        await first.turn()
        in_hand, sent = prompts(2)
        await outpost.offer(msgspec.json.encode([in_hand, sent]))
        node.next = Results([record(sent.key, sample=sent.sample)], [], 0, again=(anew("told", 1),))
        assert [old.key for old in (await first.turn(acknowledge=False)).results.again] == ["told"]
        await outpost.begin(order)
        late = Head(outpost)
        assert [one.key for one in (await late.turn()).results.held] == [in_hand.key]
        assert [one.key for one in late.handed] == [sent.key]
        node.next = Results(
            [], [], 0, again=(anew(in_hand.key, 1), anew(sent.key, 1, sent.sample), anew("told", 2), anew("its own", 1))
        )
        assert [old.key for old in (await late.turn()).results.again] == ["its own"]
        node.stopped = True

    asyncio.run(story())


class BadLine:
    """An Actor: its calls or their answers are lost, or come twice, and its head stops for longer than it is waited
    for."""

    def __init__(self, outpost: Outpost, order: bytes, rng: random.Random) -> None:
        self.outpost = outpost
        self.order = order
        self.rng = rng
        self.begun = False
        self.late: list[asyncio.Task[Any]] = []

    async def ask(self, limit_s: float | None, method: str, *words: Any) -> Any:
        if not self.begun:
            self.begun = True
            await self.outpost.begin(self.order)
        call = getattr(self.outpost, method)
        what = self.rng.random()
        if what < 0.1:
            raise UnreachedError("it cannot be reached")
        answer = await call(*words)
        if method == "results":
            if what < 0.3:
                raise UnreachedError("its answer was lost")
            if what < 0.4:
                self.late.append(asyncio.create_task(call(*words)))
            if what > 0.93:
                await asyncio.sleep(SILENT_S / 2)
        return answer

    async def kill(self) -> None:
        """Nothing to end."""


def test_what_a_bad_line_or_a_head_that_stops_for_a_moment_lost_comes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, events, and which rows of a sick server are made anew."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    monkeypatch.setattr(far, "AGAIN_S", 0.01)
    monkeypatch.setattr(outpost_module, "LINGER_S", 0.0)
    node = Moody(random.Random(seed))
    (tmp_path / "case").mkdir()
    order = order_of(make_case(tmp_path / "case"))
    line = BadLine(Alike(node, tmp_path / "spool.jsonl"), order, random.Random(seed))
    assert_totals_add_up(tmp_path, node, FarNode("n0", line), seed, 2, 1)
    told = [event.text for event, _ in events.read(tmp_path / "run" / "events.jsonl") if event.kind == "moody"]
    assert sorted(set(told), key=int) == [str(number + 1) for number in range(node.told)]


def run(case: Case, story: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(story)
    finally:
        for entry in folder_of(configfile.load(case.config), "n0").state().servers:
            bynumber.signal_all(bynumber.members(-1, entry.nonce), signal.SIGKILL)
        case.cleanup()

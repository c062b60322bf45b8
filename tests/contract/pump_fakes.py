"""A pump's surroundings without a network: servers that do as they are told, on a clock that jumps ahead."""

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from tokenmill.attempt import Lane, Orders
from tokenmill.client import Client, Take
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import NULL, Completion, Prompt, Record
from tokenmill.core.server import Failure, FailureKind
from tokenmill.engines.base import Engine, Launch, Probes, Rendered, Request, Sampling, ServerInfo, Spec
from tokenmill.errors import BrokenError, RequestError
from tokenmill.generate import Pump

T = TypeVar("T")

TEXT = "<think>\nA thought of some length, so that nothing is wrong with it.\n</think>\n\nAn answer."


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a timer it moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout else timeout)
        if timeout and not found:
            self.now += timeout
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """Sleeps and timeouts take no time: where nothing is ready, the clock jumps to the next timer."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def play(scene: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(scene)


async def settle() -> None:
    """Lets everything run that can run without the clock."""
    for _ in range(50):
        await asyncio.sleep(0)


class Dialect(Engine):
    """Sends a prompt's key and the request's id, takes {"finish": …} back. "dead" in an error: the server is lost."""

    kind = "dialect"
    renders = "chat"

    def command(self, spec: Spec) -> Launch:
        return Launch(())

    def probes(self, spec: Spec) -> Probes:
        return Probes("/", "/", "/")

    def stranger(self, spec: Spec, identity: bytes) -> str:
        return ""

    def info(self, spec: Spec, page: bytes, log: str = "") -> ServerInfo:
        return ServerInfo()

    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        return Failure(FailureKind.CRASH, "it died")

    def lost(self, body: str) -> bool:
        return "dead" in body

    def encode(
        self, spec: Spec, rendered: Rendered, sampling: Sampling, *, request_id: str, thinking: bool, seed: int | None
    ) -> Request:
        key = msgspec.json.decode(rendered.messages)[0]["content"]
        return Request("/complete", json.dumps({"id": request_id, "key": key, "seed": seed}).encode())

    def decode(self, body: bytes) -> Completion:
        try:
            finish = json.loads(body)["finish"]
        except ValueError as error:
            raise BrokenError("unreadable") from error
        return Completion(TEXT, finish, output_tokens=40)

    def abort(self, request_id: str) -> Request | None:
        return Request("/abort", json.dumps({"id": request_id}).encode())


DONE = b'{"finish":"stop"}'
Behaviour = Callable[[str, int], Awaitable[bytes]]
"""What a server does with a prompt: its key, and how often this key has been asked anywhere, from 1 on."""


class Board:
    """What all servers of a scene saw, in order: begin, end, abort. Refuses a prompt that another server is at."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.at_work: dict[str, str] = {}
        self.begun: dict[str, int] = {}
        self.ids: set[str] = set()

    def where(self, key: str) -> list[str]:
        """The servers that a prompt was begun on, in order."""
        return [server for what, server, name in self.log if what == "begin" and name == key]


class Server(Client):
    """Stands for a server and its HTTP client."""

    def __init__(self, name: str, board: Board, behaviour: Behaviour) -> None:
        self.name = name
        self.address = f"http://{name}"
        self.behaviour = behaviour
        self._board = board

    async def post(self, path: str, body: bytes, *, timeout_s: float, take: Take | None = None) -> bytes:
        asked = json.loads(body)
        board, key = self._board, asked["key"]
        assert key not in board.at_work, f"{key} is with {board.at_work[key]} already"
        assert asked["id"] not in board.ids, "an id is used twice"
        board.ids.add(asked["id"])
        board.at_work[key] = asked["id"]
        board.begun[key] = board.begun.get(key, 0) + 1
        board.log.append(("begin", self.name, key))
        try:
            return await self.behaviour(key, board.begun[key])
        finally:
            del board.at_work[key]
            board.log.append(("end", self.name, key))

    async def post_fresh(self, path: str, body: bytes, *, timeout_s: float, take: Take | None = None) -> bytes:
        self._board.log.append((path.strip("/"), self.name, json.loads(body)["id"]))
        return b""

    async def close(self) -> None:
        pass


async def answers(key: str, times: int) -> bytes:
    """A server that works, a second a prompt."""
    await asyncio.sleep(1.0)
    return DONE


async def hangs(key: str, times: int) -> bytes:
    await asyncio.sleep(1e9)
    return DONE


def fails(error: RequestError, *, first: int = 10**9) -> Behaviour:
    """A server that fails the first so many times that a prompt is asked; then it answers."""

    async def behave(key: str, times: int) -> bytes:
        await asyncio.sleep(0.1)
        if times <= first:
            raise error
        return DONE

    return behave


async def render(messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
    return Rendered(messages, tools)


class Scene:
    """A pump, its records, and the troubles that servers were reported with."""

    def __init__(
        self, *, attempts: int = 3, renders: Any = render, room: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.board = Board()
        self.records: list[Record] = []
        self.troubles: list[str] = []
        orders = Orders(Sampling(100), thinking=True, rules=Rules(), settings="s", attempts=attempts)
        self._came = asyncio.Event()
        self._slots: set[asyncio.Task[None]] = set()
        self.pump = Pump(orders, renders, self._take, clock=lambda: 1_700_000_000.0, room=room)

    def _take(self, record: Record) -> None:
        self.records.append(record)
        self._came.set()

    def lane(self, index: int, behaviour: Behaviour = answers, capacity: int = 2, engine: Engine | None = None) -> Lane:
        """A ready server, opened."""
        name = f"s{index}"
        spec = Spec(index, "", "m", 1, 2, "n", "")
        server = Server(name, self.board, behaviour)
        lane = Lane(
            name=name,
            index=index,
            engine=engine or Dialect(),
            spec=spec,
            client=server,
            info=ServerInfo(),
            reading=Reading(thinking=True),
            capacity=capacity,
            on_trouble=lambda error: self.troubles.append(f"{name}: {error}"),
        )
        self.pump.open(lane)
        self._slots |= lane.slots
        return lane

    async def until(self, records: int, within_s: float = 100_000.0) -> None:
        """Waits for so many records; gives up after a long time of the jumping clock."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.records) < records:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            pass

    def outcome(self) -> dict[str, tuple[str, int]]:
        """Key → first label or finish reason, and the attempt; fails where a prompt has two records."""
        assert len({record.key for record in self.records}) == len(self.records), "two records of a prompt"
        return {r.key: (r.labels[0] if r.labels else r.finish_reason, r.attempt) for r in self.records}

    async def __aenter__(self) -> "Scene":
        return self

    async def __aexit__(self, *error: object) -> None:
        for index in list(self.pump.lanes):
            self.pump.close(index)
        await asyncio.gather(*self._slots, return_exceptions=True)


def prompts(count: int, start: int = 0) -> list[Prompt]:
    return [
        Prompt(f"p{n}", 0, n, 0, "d", msgspec.Raw(b'[{"role":"user","content":"p%d"}]' % n), NULL)
        for n in range(start, start + count)
    ]

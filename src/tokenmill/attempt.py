"""One attempt at one prompt: rendered, sent, waited for, read, judged. Whose fault a failure is, is the pump's to say.

A prompt's own fault (it cannot be rendered, it does not fit, the server will never accept it) is a failed record;
everything else is a RequestError.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import xxhash
from msgspec.structs import replace

from tokenmill.client import Client
from tokenmill.core import agree, judge
from tokenmill.core.agree import Agreement
from tokenmill.core.judge import Measured, Reading, Rules
from tokenmill.core.occupancy import Slots
from tokenmill.core.pace import Answers
from tokenmill.core.records import NULL, Completion, Label, Parts, Prompt, Record
from tokenmill.core.records import failed as failed_record
from tokenmill.core.stream import Streaming
from tokenmill.engines.base import PARSED, Engine, Rendered, Sampling, ServerInfo, Spec
from tokenmill.errors import BadPromptError, BrokenError, RefusedError, RequestError
from tokenmill.render import fit
from tokenmill.tokens import spelling
from tokenmill.tokens.spelling import Speller

MIN_TIMEOUT_S = 600.0
"""A request is never given up earlier, whatever the rates seen: nothing is lost by waiting in a healthy server."""

TIMEOUT_FACTOR = 3.0
"""Slots slow down as a batch fills: the slowest rate seen so far is not the slowest there will be."""

MIN_RATE_TOKENS = 32
"""A shorter output's time is mostly the prompt's and says nothing of the rate."""

FORGETTING = 1.01
"""At each answer the slowest rate fades by so much: an hour in which the machine was frozen is forgotten after 500."""

ACCEPT_WEIGHT = 0.05
"""Of one answer in a server's accept length: the last twenty decide."""


@dataclass(slots=True)
class Lane:
    """One ready server's side of the pump. The supervisor opens and closes it; counters only grow.

    `refused_since` is when it began to refuse whatever it is asked, None while it does not. `died`: it is closed
    because it did, with what it had in flight. `leaving`: it has gone bad, and takes no prompt any more.
    `streams`: its answers come in pieces, `seen` counts those that carried tokens, `begun` the requests in flight of
    which one has come. `answered` adds up tokens and seconds of its answers. `broken` are prompts whose requests failed
    of the server itself, until it is known whether it died. `work` is told all that its slots do.
    """

    name: str
    index: int
    engine: Engine
    spec: Spec
    client: Client
    info: ServerInfo
    reading: Reading
    capacity: int
    on_trouble: Callable[[RequestError], None]
    streams: bool = False
    seen: int = 0
    begun: int = 0
    answered: Answers = field(default_factory=Answers)
    answers: int = 0
    broken_in_row: int = 0
    refused_since: float | None = None
    held: bool = False
    died: bool = False
    leaving: bool = False
    accept_length: float | None = None
    broken: list[Prompt] = field(default_factory=list)
    slots: set["asyncio.Task[None]"] = field(default_factory=set)
    work: Slots = field(default_factory=lambda: Slots(time.monotonic(), 0.0))

    @property
    def in_flight(self) -> int:
        """Prompts that a slot has."""
        return self.work.asked

    def until_now(self) -> float:
        """What its slots do was so until now; to be called before that changes. The time by the monotonic clock."""
        moment = time.monotonic()
        self.work.until(moment, self.capacity, self.held)
        return moment

    def begins(self) -> None:
        """A slot has a prompt."""
        self.until_now()
        self.work.asked += 1

    def ends(self) -> None:
        """A slot is done with its prompt."""
        self.until_now()
        self.work.asked -= 1


class _Pieces:
    """Counts what comes of one streamed answer into its lane, until `end`."""

    __slots__ = ("_begun", "_lane")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._begun = 0

    def came(self) -> None:
        if not self._begun:
            self._begun = 1
            self._lane.begun += 1
        self._lane.seen += 1

    def end(self) -> None:
        self._lane.begun -= self._begun


@dataclass(frozen=True, slots=True)
class Orders:
    """What every request of a run has in common; `patience_s`: a server that only refuses for so long is in trouble.
    `speller` tells what ids spell, for some of the answers."""

    sampling: Sampling
    thinking: bool
    rules: Rules
    settings: str
    attempts: int = 3
    seed: int | None = None
    timeout_s: float | None = None
    patience_s: float = 90.0
    speller: Speller | None = None


CALLS_TAKEN = (
    "the server took tool calls out of the text, so what came is no whole answer: start it without a tool-call parser; "
    'behind vLLM, generation.extra.tool_choice = "none" leaves them in'
)

Render = Callable[[msgspec.Raw, msgspec.Raw, Client], Awaitable[Rendered]]
"""Messages, tools and the server's client → what to send; see render.py."""


class Attempts:
    """Makes them. `clock` is Unix time.

    `room` is waited for before an answer is read: as long as the store is behind, answers stay the bytes they came as.
    """

    def __init__(
        self, orders: Orders, render: Render, clock: Callable[[], float], room: Callable[[], Awaitable[None]] | None
    ) -> None:
        self.orders = orders
        self._render = render
        self._clock = clock
        self._room = room
        self._slowest: float | None = None

    async def make(self, lane: Lane, prompt: Prompt, request_id: str) -> Record:
        """One attempt. Raises RequestError; all that is the prompt's own fault comes back as a failed record."""
        started = self._clock()
        begun = time.monotonic()
        orders = self.orders
        try:
            rendered = await self._render(prompt.messages, prompt.tools, lane.client)
            sampling = fit(orders.sampling, rendered, lane.info)
        except BadPromptError as error:
            label: Label = "prompt_too_long" if error.label == "prompt_too_long" else "bad_prompt"
            return self.failed(prompt, label, str(error), lane, started)
        request = lane.engine.encode(
            lane.spec,
            rendered,
            sampling,
            request_id=request_id,
            thinking=orders.thinking,
            seed=_seed(orders.seed, prompt),
        )
        asked, stream, pieces = request.body, None, _Pieces(lane)
        if lane.streams and isinstance(lane.engine, Streaming):
            asked, stream = lane.engine.streamed(asked, pieces.came)
        limit_s = self.limit_s(sampling.max_tokens)
        sent = lane.until_now()
        lane.work.begins(sent)
        body = None
        try:
            take = stream.feed if stream is not None else None
            body = await lane.client.post(request.path, asked, timeout_s=limit_s, take=take)
        except RefusedError as error:
            refused: Label = "prompt_too_long" if lane.engine.too_long(str(error)) else "request_refused"
            return self.failed(prompt, refused, str(error), lane, started)
        finally:
            pieces.end()
            came = lane.until_now()
            lane.work.ends(came, sent, lost=body is None)
        seconds = came - begun
        if self._room is not None:
            lane.work.stored += 1
            try:
                await self._room()
            finally:
                lane.until_now()
                lane.work.stored -= 1
        completion = lane.engine.decode(body) if stream is None else stream.completion()
        if completion.finish_reason == PARSED:
            return self.failed(prompt, "request_refused", CALLS_TAKEN, lane, started)
        if completion.finish_reason not in ("stop", "length"):
            raise BrokenError(f"finish reason {completion.finish_reason!r}")
        if rendered.ids != NULL:
            completion = replace(completion, prompt_ids=rendered.ids)
        completion = _counted(completion)
        self._note(lane, completion, seconds)
        context = completion.prompt_tokens + completion.output_tokens / 2
        lane.work.answer(came, sent, completion.output_tokens, context)
        measured = judge.measure(completion, lane.reading, orders.rules)
        labels = measured.labels
        if "ids_disagree" in labels:
            _raise_if_no_ids(completion)
        elif await self._spells_another(lane, prompt, completion, measured.parts):
            labels = (*labels, "ids_disagree")
        return self._record(lane, prompt, completion, measured, labels, started, seconds)

    async def _spells_another(self, lane: Lane, prompt: Prompt, completion: Completion, parts: Parts) -> bool:
        """Whether the ids spell another text, as far as anybody looks. A chat server that parses tool calls takes
        them out of the text."""
        speller = self.orders.speller
        parsed = prompt.tools != NULL and lane.engine.renders == "chat"
        if speller is None or parsed or not spelling.is_due(prompt):
            return False
        return await spelling.agreement(completion, parts, speller, lane.client) is Agreement.OTHER

    def limit_s(self, max_tokens: int) -> float:
        """How long a request may take: as the config says, or by the slowest rate that a slot has shown."""
        if self.orders.timeout_s is not None:
            return self.orders.timeout_s
        if self._slowest is None:
            return max(MIN_TIMEOUT_S, float(max_tokens))  # nothing seen yet: a token a second
        return max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * max_tokens / self._slowest)

    def _note(self, lane: Lane, completion: Completion, seconds: float) -> None:
        lane.answered = lane.answered.plus(completion.output_tokens, seconds)
        if (now := completion.accept_length) is not None:
            previous = lane.accept_length
            lane.accept_length = now if previous is None else previous + ACCEPT_WEIGHT * (now - previous)
        if seconds > 0 and completion.output_tokens >= MIN_RATE_TOKENS:
            rate = completion.output_tokens / seconds
            self._slowest = rate if self._slowest is None else min(rate, self._slowest * FORGETTING)

    def _record(
        self,
        lane: Lane,
        prompt: Prompt,
        completion: Completion,
        measured: Measured,
        labels: tuple[str, ...],
        started: float,
        seconds: float,
    ) -> Record:
        return Record(
            key=prompt.key,
            sample=prompt.sample,
            turn=prompt.turn,
            row=prompt.row,
            cohort=prompt.cohort,
            digest=prompt.digest,
            settings=self.orders.settings,
            messages=prompt.messages,
            tools=prompt.tools,
            prompt_ids=completion.prompt_ids,
            output_ids=completion.output_ids,
            text=completion.text,
            parts=measured.parts,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            output_tokens=completion.output_tokens,
            reasoning_tokens=measured.reasoning_tokens,
            repetition=measured.repetition,
            thinking=self.orders.thinking,
            server=lane.name,
            attempt=prompt.attempt,
            started=round(started, 3),
            seconds=round(seconds, 3),
            accept_length=completion.accept_length,
            labels=labels,
        )

    def failed(self, prompt: Prompt, label: Label, error: str, lane: Lane, started: float | None = None) -> Record:
        """A record of a prompt that got no completion."""
        began = self._clock() if started is None else started
        return failed_record(
            prompt, label, error, settings=self.orders.settings, server=lane.name, started=round(began, 3)
        )


def _counted(completion: Completion) -> Completion:
    """Of a server that sends no usage, the ids are counted."""
    if completion.output_tokens and completion.prompt_tokens:
        return completion
    return replace(
        completion,
        output_tokens=completion.output_tokens or agree.count(completion.output_ids) or 0,
        prompt_tokens=completion.prompt_tokens or agree.count(completion.prompt_ids) or 0,
    )


def _raise_if_no_ids(completion: Completion) -> None:
    for ids in (completion.output_ids, completion.prompt_ids):
        if agree.count(ids) is None:
            raise BrokenError(f"its token ids are no ids: they begin {bytes(ids)[:80]!r}")


def _seed(seed: int | None, prompt: Prompt) -> int | None:
    """Per id, so that samples of one prompt differ and a repeated run does not."""
    if seed is None:
        return None
    return xxhash.xxh32_intdigest(f"{seed}\0{prompt.key}\0{prompt.sample}\0{prompt.turn}".encode())

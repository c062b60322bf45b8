"""The canary: real completions through the production path, before a run counts on a server.

As many built-in prompts as the server can run at once, so that kernels for full batches are compiled before the run
counts on it (seen: 107 s of silence at the first full batch). It passes when a majority shows a thought (thinking on)
or none (off); being cut off is no failure. The user's prompts are never used.
"""

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Annotated

import msgspec

from tokenmill.client import Client
from tokenmill.core import causes, judge
from tokenmill.core.causes import Scene
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import NULL, Completion
from tokenmill.core.rendering import Rendering
from tokenmill.core.server import Failure, FailureKind
from tokenmill.core.stream import Streaming
from tokenmill.engines.base import Engine, Rendered, Sampling, ServerInfo, Spec, normal
from tokenmill.errors import BadPromptError, BrokenError, LateError, RefusedError, RequestError
from tokenmill.render import Renderer, fit
from tokenmill.tokens.proof import Asked, prove

MAX_TOKENS = 512
"""Enough for a thought to begin and to be seen; the whole answer is not needed."""

PROBE_TOKENS = 16
"""One token is no proof: max_new_tokens = 1 is known to have hung a speculating engine by itself."""


REFUSED = "a field of generation.extra, the model's name, or the key in api_key_env? the server's words are above"


@dataclass(frozen=True, slots=True)
class Passed:
    """How to read this server's outputs, and what the canary saw. `warnings` are for a person."""

    reading: Reading
    accept_length: float | None
    warnings: tuple[str, ...] = ()


def prompts() -> list[msgspec.Raw]:
    """The built-in prompts as messages."""
    texts = json.loads(resources.files("tokenmill").joinpath("data/canary.json").read_text(encoding="utf-8"))
    return [msgspec.Raw(msgspec.json.encode([{"role": "user", "content": text}])) for text in texts]


@dataclass(frozen=True, slots=True)
class Canary:
    """One server's canary; `width` completions at once, each limited to `timeout_s`. With `seen` they are streamed, and
    it is called for each piece that carries tokens."""

    engine: Engine
    spec: Spec
    client: Client
    info: ServerInfo
    renderer: Renderer
    sampling: Sampling
    width: int
    timeout_s: float
    seen: Callable[[], None] | None = None

    async def run(self) -> Passed | Failure:
        """The verdict. A failure of kind WRONG_MODE is the model's or the config's: a restart cannot mend it."""
        bodies = prompts()
        results = await asyncio.gather(*(self._one(bodies[n % len(bodies)]) for n in range(self.width)))
        asked = [result for result in results if isinstance(result, Asked)]
        answers = [one.completion for one in asked]
        errors = [result for result in results if not isinstance(result, Asked)]
        if len(answers) * 2 <= self.width:
            cause = f"{len(errors)} of {self.width} canary completions failed: {errors[0]}"
            said = tuple(sorted({str(error) for error in errors})[:3])
            if all(isinstance(error, RefusedError) for error in errors):  # it would refuse them for ever
                return Failure(FailureKind.CONFIG, cause, REFUSED, said)
            return Failure(FailureKind.CRASH, cause, "", said)
        if any(_cannot_be_ids(ids) for answer in answers for ids in (answer.prompt_ids, answer.output_ids)):
            words = f"its token ids are no ids: {bytes(answers[0].output_ids)[:80].decode()}"
            return Failure(FailureKind.CONFIG, words, "does it give token_ids as the OpenAI dialect does?")
        given = results[0].completion.prompt_ids if isinstance(results[0], Asked) else NULL
        try:
            other = await self.renderer.prove(bodies[0], given, self.client, self.info)
            reading = await self.renderer.reading(self.client, self.info, answers[0].prompt_ids)
            differs = await self._rendering_differs(bodies[0])
            proof = await prove(asked, reading, self.renderer, self.client)
        except (RequestError, BadPromptError) as error:
            return Failure(FailureKind.CRASH, f"the canary came back, and then: {error}")
        if other:
            cause = f"it renders prompts otherwise than the run's first server: {other}"
            return Failure(FailureKind.CONFIG, cause, "give all servers the same model and chat template")
        if (wrong := _wrong_mode(answers, reading, self._scene(reading)) or proof.failure) is not None:
            return wrong
        lengths = [answer.accept_length for answer in answers if answer.accept_length is not None]
        accept_length = sum(lengths) / len(lengths) if lengths else None
        return Passed(reading, accept_length, tuple(filter(None, (differs, *proof.warnings))))

    def _scene(self, reading: Reading) -> Scene:
        known = self.renderer.rendering or Rendering()
        parser = any(normal(name) == "reasoning-parser" for name in self.spec.args)
        # Where end tokens are known, so is the vocabulary.
        has_tag = bool(reading.close_id) if reading.end_ids else None
        return Scene(self.sampling.max_tokens, parser, known.template, known.prompt, has_tag)

    async def _one(self, messages: msgspec.Raw) -> Asked | RequestError | BadPromptError:
        sampling = replace(self.sampling, max_tokens=min(MAX_TOKENS, self.sampling.max_tokens))
        try:
            return await self._ask(messages, sampling, self.timeout_s, self.seen)
        except (RequestError, BadPromptError) as error:
            return error

    async def _ask(
        self, messages: msgspec.Raw, sampling: Sampling, timeout_s: float, seen: Callable[[], None] | None
    ) -> Asked:
        rendered = await self.renderer.render(messages, NULL, self.client)
        request = self.engine.encode(
            self.spec,
            rendered,
            fit(sampling, rendered, self.info),
            request_id=f"canary-{uuid.uuid4().hex}",
            thinking=self.renderer.thinking,
            seed=None,
        )
        asked, stream = request.body, None
        if seen is not None and isinstance(self.engine, Streaming):
            asked, stream = self.engine.streamed(asked, seen)
        take = stream.feed if stream is not None else None
        body = await self.client.post_fresh(request.path, asked, timeout_s=timeout_s, take=take)
        answer = self.engine.decode(body) if stream is None else stream.completion()
        if answer.finish_reason not in ("stop", "length"):
            raise BrokenError(f"finish reason {answer.finish_reason!r}")
        return Asked(rendered, answer)

    async def probe(self, timeout_s: float) -> RequestError | BadPromptError | None:
        """A small generation over a connection of its own; None where it came back, else what went wrong."""
        try:
            async with asyncio.timeout(timeout_s):  # rendering is asked of the server, too
                await self._ask(prompts()[0], self._small, timeout_s, self.seen)
        except TimeoutError:
            return LateError(f"no answer within {timeout_s:.0f} s")
        except (RequestError, BadPromptError) as error:
            return error
        return None

    @property
    def _small(self) -> Sampling:
        return replace(self.sampling, max_tokens=min(PROBE_TOKENS, self.sampling.max_tokens), extra={})

    async def why_not_streamed(self, seen: Callable[[], None]) -> str:
        """Why its answers are not to be streamed; empty where streamed ones hold all that whole ones do."""
        count = 0

        def noted() -> None:
            nonlocal count
            count += 1
            seen()

        try:
            pieces = (await self._ask(prompts()[0], self._small, self.timeout_s, noted)).completion
            if not count:
                return "it does not stream"
            whole = (await self._ask(prompts()[0], self._small, self.timeout_s, None)).completion
        except (RequestError, BadPromptError) as error:
            return str(error)
        for name in ("output_ids", "prompt_ids"):
            if getattr(whole, name) != NULL == getattr(pieces, name):
                return f"streamed answers hold no {name}"
        return "streamed answers hold no count of tokens" if whole.output_tokens and not pieces.output_tokens else ""

    async def _rendering_differs(self, messages: msgspec.Raw) -> str:
        """Compares our ids with the engine's own rendering of the same messages, where it can be asked."""
        rendered = await self.renderer.render(messages, NULL, self.client)
        request = self.engine.own_rendering(self.spec, rendered, self.renderer.thinking)
        if request is None or rendered.tokens is None:
            return ""
        try:
            answer = await self.client.post_fresh(request.path, request.body, timeout_s=self.timeout_s)
        except RequestError as error:
            return f"the engine's own rendering could not be asked: {error}"
        ids, count = self.engine.read_own_rendering(answer)
        return _difference(rendered, ids, count)


_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]])


def _cannot_be_ids(ids: msgspec.Raw) -> bool:
    """Asked once a server, not at every answer: reading 8,000 numbers takes longer than all else."""
    if ids == NULL:
        return False
    try:
        _ids.decode(ids)
    except msgspec.DecodeError:
        return True
    return False


def _difference(rendered: Rendered, ids: msgspec.Raw, count: int) -> str:
    if ids != NULL and bytes(ids) != bytes(rendered.ids):
        return (
            "the engine renders the same messages to other token ids than tokenmill does: is its chat template another?"
        )
    if ids == NULL and count != rendered.tokens:
        return f"the engine renders the same messages to {count} tokens, tokenmill to {rendered.tokens}"
    return ""


def _wrong_mode(answers: list[Completion], reading: Reading, scene: Scene) -> Failure | None:
    rules = Rules(min_reasoning_tokens=1)
    thoughts = 0
    for answer in answers:
        parts = judge.measure(answer, reading, rules).parts
        thoughts += parts.b > parts.a
    right = thoughts if reading.thinking else len(answers) - thoughts
    if right * 2 > len(answers):
        return None
    if reading.thinking:
        cause = f"thinking is on, but {len(answers) - thoughts} of {len(answers)} canary completions show no thought"
        label = "empty_reasoning"
    else:
        cause = f"thinking is off, but {thoughts} of {len(answers)} canary completions show a thought"
        label = "foreign_mode"
    lines = (f"the first one begins: {answers[0].text[:300]!r}",)
    return Failure(FailureKind.WRONG_MODE, cause, causes.likely(label, scene, answers), lines)

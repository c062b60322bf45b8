"""The OpenAI chat dialect: one request and one answer, as vLLM, SGLang, llama.cpp and others speak it.

The thought comes in `reasoning_content`, in `reasoning` or inside `content`, whichever the server sends. Whole or in
pieces, an answer is the same Completion.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from tokenmill.core.records import NULL, Completion, count_ids
from tokenmill.core.stream import Events, Stream
from tokenmill.engines.base import PARSED, Count, Rendered, Request, Sampling, as_ids, decode_json, text_of_fields
from tokenmill.errors import BrokenError

PATH = "/v1/chat/completions"


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = NULL


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    token_ids: msgspec.Raw = NULL
    response_token_ids: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL


class _Details(msgspec.Struct):
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    reasoning_tokens: Count | None = None
    completion_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: msgspec.Raw = NULL


class _Piece(msgspec.Struct):
    index: int = 0
    delta: _Message | None = None
    finish_reason: str | None = None
    token_ids: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL


class _Chunk(msgspec.Struct):
    choices: list[_Piece] = []
    usage: _Usage | None = None
    prompt_token_ids: msgspec.Raw = NULL
    error: msgspec.Raw = NULL
    object: str | None = None


class _Models(msgspec.Struct):
    data: list["ModelCard"] = []


class ModelCard(msgspec.Struct):
    """An entry of /v1/models; `max_model_len` and `meta` where the server says more."""

    id: str
    max_model_len: int | None = None
    aliases: list[str] = []


_reply = msgspec.json.Decoder(_Reply)
_chunk = msgspec.json.Decoder(_Chunk)
_models = msgspec.json.Decoder(_Models)


def encode(
    model: str, rendered: Rendered, sampling: Sampling, *, thinking: bool, seed: int | None, **fields: Any
) -> Request:
    """A chat request. The thinking switch stands at the top level: nested in `extra_body` servers drop it silently."""
    body: dict[str, Any] = {
        "model": model,
        "messages": _with_thoughts(rendered.messages),
        "max_tokens": sampling.max_tokens,
        "chat_template_kwargs": {"enable_thinking": thinking},
        **fields,
        **sampling.fields(),
    }
    if rendered.tools != NULL:
        body["tools"] = rendered.tools
    if seed is not None:
        body["seed"] = seed
    return Request(PATH, msgspec.json.encode(body))


def _with_thoughts(messages: msgspec.Raw) -> msgspec.Raw:
    """Thoughts of earlier turns under both of their names: vLLM from 0.20 on reads `reasoning` alone and drops the
    other without a word (vllm#38488), older versions and other servers read `reasoning_content`."""
    if b'"reasoning_content"' not in bytes(messages):
        return messages
    turns: list[dict[str, Any]] = msgspec.json.decode(messages)
    for turn in turns:
        if thought := turn.get("reasoning_content"):
            turn["reasoning"] = thought
    return msgspec.Raw(msgspec.json.encode(turns))


def decode(body: bytes) -> Completion:
    """A chat answer; token ids where the server gives them: vLLM `token_ids`, SGLang 0.5.23 `response_token_ids`."""
    reply, damaged = decode_json(body, _reply)
    if not reply.choices:
        raise BrokenError(f"an answer without a choice: {body[:200]!r}")
    return _completion(reply, damaged)


def _completion(reply: _Reply, damaged: bool) -> Completion:
    choice, usage = reply.choices[0], reply.usage or _Usage()
    message = choice.message
    # What was taken out of the text is missing there, whatever the server calls its end.
    finish = PARSED if _holds(message.tool_calls) else choice.finish_reason or ""
    details = usage.completion_tokens_details
    reasoning_tokens = usage.reasoning_tokens or (details.reasoning_tokens if details else None)
    return Completion(
        text=text_of_fields(message.reasoning_content or message.reasoning or "", message.content or "", finish),
        finish_reason=finish,
        output_ids=as_ids(choice.token_ids if choice.token_ids != NULL else choice.response_token_ids),
        prompt_ids=as_ids(reply.prompt_token_ids if reply.prompt_token_ids != NULL else choice.prompt_token_ids),
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=reasoning_tokens or None,
        damaged=damaged,
    )


def _holds(calls: msgspec.Raw) -> bool:
    return bytes(calls) not in (b"null", b"[]")


_STREAM = b',"stream":true,"stream_options":{"include_usage":true}}'


def streamed(body: bytes, seen: Callable[[], None]) -> tuple[bytes, Stream]:
    """A chat request's body that asks for pieces, and what puts them together."""
    return body.removesuffix(b"}") + _STREAM, ChatStream(seen)


class ChatStream(Stream):
    """Keeps texts and ids alone: the events of 8,000 tokens are 2 MB, and hundreds of answers are on their way."""

    def __init__(self, seen: Callable[[], None]) -> None:
        self._seen = seen
        self._begun = False
        self._events = Events()
        self._whole: list[bytes] = []
        self._content: list[str] = []
        self._reasoning_content: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[bytes] = []
        self._prompt_ids = NULL
        self._usage: _Usage | None = None
        self._finish = ""
        self._calls = NULL
        self._done = False
        self._damaged = False

    def feed(self, data: bytes) -> None:
        if not self._begun:
            data = data.lstrip()
            self._begun = bool(data)
            self.plain = data[:1] in (b"{", b"[", b"<")
        if self.plain:
            self._whole.append(data)
            return
        for event in self._events.feed(data):
            self._take(event)

    def _take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        chunk, damaged = decode_json(event, _chunk)
        if chunk.error != NULL or chunk.object == "error":
            text = event[:2000].decode("utf-8", "replace")
            raise BrokenError(f"an error in the middle of an answer: {text}", body=text)
        self._damaged |= damaged
        self._usage = chunk.usage or self._usage
        if chunk.prompt_token_ids != NULL:
            self._prompt_ids = chunk.prompt_token_ids
        for piece in chunk.choices:
            if piece.index == 0:
                self._add(piece)

    def _add(self, piece: _Piece) -> None:
        came = False
        if (delta := piece.delta) is not None:
            came = bool(delta.content or delta.reasoning or delta.reasoning_content) or _holds(delta.tool_calls)
            if _holds(delta.tool_calls):
                self._calls = delta.tool_calls
            if delta.content:
                self._content.append(delta.content)
            if delta.reasoning:
                self._reasoning.append(delta.reasoning)
            if delta.reasoning_content:
                self._reasoning_content.append(delta.reasoning_content)
        if piece.token_ids is not NULL and (ids := as_ids(piece.token_ids)) != NULL:
            if not bytes(ids).startswith(b"["):
                raise BrokenError(f"its token ids are no ids: {bytes(ids)[:80]!r}")
            self._ids.append(bytes(ids)[1:-1])
            came = True
        if piece.prompt_token_ids != NULL:
            self._prompt_ids = piece.prompt_token_ids
        self._finish = piece.finish_reason or self._finish
        if came:
            self._seen()

    def completion(self) -> Completion:
        if self.plain:
            return decode(b"".join(self._whole))
        for event in self._events.end():
            self._take(event)
        if not self._finish or not (self._done or self._usage):
            raise BrokenError("the stream ended before the answer did")
        thoughts = ("".join(self._reasoning_content), "".join(self._reasoning))
        message = _Message("".join(self._content), *thoughts, self._calls)
        ids = msgspec.Raw(b"[%b]" % b",".join(self._ids)) if self._ids else NULL
        if self._usage and self._usage.completion_tokens not in (0, count_ids(ids)):
            ids = NULL  # some were in no event: not all the ids are none
        choice = _Choice(message, self._finish, token_ids=ids)
        return _completion(_Reply([choice], self._usage, self._prompt_ids), self._damaged)


def models(body: bytes) -> list[ModelCard]:
    """The entries of /v1/models; none where the page is something else."""
    try:
        return _models.decode(body).data
    except (msgspec.DecodeError, RecursionError):
        return []


def names(cards: list[ModelCard]) -> set[str]:
    """All names that a /v1/models page offers."""
    return {name for card in cards for name in (card.id, *card.aliases)}

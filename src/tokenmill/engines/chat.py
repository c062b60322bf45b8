"""The OpenAI chat dialect: one request and one answer, as vLLM, SGLang, llama.cpp and others speak it.

The thought comes in `reasoning_content`, in `reasoning` or inside `content`, whichever the server sends.
"""

from typing import Annotated, Any

import msgspec

from tokenmill.core.records import NULL, Completion
from tokenmill.engines.base import Rendered, Request, Sampling, as_ids, decode_json, text_of_fields
from tokenmill.errors import BrokenError

PATH = "/v1/chat/completions"


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    token_ids: msgspec.Raw = NULL
    response_token_ids: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Tokens of one completion; a server that counts otherwise gives an answer that cannot be read."""


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


class _Models(msgspec.Struct):
    data: list["ModelCard"] = []


class ModelCard(msgspec.Struct):
    """An entry of /v1/models; `max_model_len` and `meta` where the server says more."""

    id: str
    max_model_len: int | None = None
    aliases: list[str] = []


_reply = msgspec.json.Decoder(_Reply)
_models = msgspec.json.Decoder(_Models)


def encode(
    model: str, rendered: Rendered, sampling: Sampling, *, thinking: bool, seed: int | None, **fields: Any
) -> Request:
    """A chat request. The thinking switch stands at the top level: nested in `extra_body` servers drop it silently."""
    body: dict[str, Any] = {
        "model": model,
        "messages": rendered.messages,
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


def decode(body: bytes) -> Completion:
    """A chat answer; token ids where the server gives them: vLLM `token_ids`, SGLang 0.5.23 `response_token_ids`."""
    reply, damaged = decode_json(body, _reply)
    if not reply.choices:
        raise BrokenError(f"an answer without a choice: {body[:200]!r}")
    choice, usage = reply.choices[0], reply.usage or _Usage()
    message = choice.message
    finish = choice.finish_reason or ""
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


def models(body: bytes) -> list[ModelCard]:
    """The entries of /v1/models; none where the page is something else."""
    try:
        return _models.decode(body).data
    except (msgspec.DecodeError, RecursionError):
        return []


def names(cards: list[ModelCard]) -> set[str]:
    """All names that a /v1/models page offers."""
    return {name for card in cards for name in (card.id, *card.aliases)}

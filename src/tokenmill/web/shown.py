"""Records as the page shows them: cut to a size, with nothing in them that hides. Pure."""

from typing import Any

import msgspec

from tokenmill.engines.base import decode_json
from tokenmill.errors import BrokenError
from tokenmill.web.catalog import Found
from tokenmill.web.visible import cut, visible

_any = msgspec.json.Decoder(Any)

LIST_CHARS = 4000
"""Of a text in a list: ten records with four texts each stay below 200 kB."""

WHOLE_CHARS = 1 << 20
"""Of a text where one record is asked for: 30 times an answer of 8,000 tokens."""


class Shown(msgspec.Struct, frozen=True):
    """A record for a person. `key` is as stored, to ask for it again; `name` as it may be shown. `raw` is the whole
    output, where one record is asked for. Tokens, seconds, Unix time."""

    key: str
    name: str
    sample: int
    turn: int
    attempt: int
    verdict: str
    labels: tuple[str, ...]
    superseded: bool
    server: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    repetition: float
    accept_length: float | None
    started: float
    seconds: float
    messages: list[tuple[str, str]]
    thought: str
    answer: str
    error: str
    raw: str = ""


def shown(found: Found, *, whole: bool = False) -> Shown:
    """One record; its last turns only, unless it is shown whole."""
    record, most = found.record, WHOLE_CHARS if whole else LIST_CHARS
    return Shown(
        key=record.key,
        name=cut(record.key, LIST_CHARS),
        sample=record.sample,
        turn=record.turn,
        attempt=record.attempt,
        verdict=found.verdict.value,
        labels=tuple(map(visible, found.labels)),
        superseded=found.superseded,
        server=visible(record.server),
        finish_reason=cut(record.finish_reason, LIST_CHARS),
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        reasoning_tokens=record.reasoning_tokens,
        repetition=round(record.repetition, 1),
        accept_length=record.accept_length,
        started=record.started,
        seconds=record.seconds,
        messages=_messages(record.messages, most)[0 if whole else -2 :],
        thought=cut(record.reasoning, most),
        answer=cut(record.answer, most),
        error=cut(record.error, most),
        raw=cut(record.text, most) if whole else "",
    )


def _messages(raw: msgspec.Raw, most: int) -> list[tuple[str, str]]:
    try:
        found, _ = decode_json(bytes(raw), _any)
    except BrokenError:
        return [("", cut(bytes(raw).decode("utf-8", "replace"), most))]
    return [
        (visible(str(message.get("role", ""))), cut(_content(message.get("content")), most))
        for message in (found if isinstance(found, list) else [])
        if isinstance(message, dict)
    ]


def _content(content: Any) -> str:
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def safe(value: Any) -> Any:
    """Any message as plain data, with every text in it made visible."""
    return _walked(msgspec.to_builtins(value))


def _walked(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): _walked(inner) for key, inner in value.items()}
    return [_walked(inner) for inner in value] if isinstance(value, list | tuple) else value

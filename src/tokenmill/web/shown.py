"""Records as the page shows them: cut to a size, with nothing in them that hides. Pure."""

from typing import Any

import msgspec

from tokenmill.dataset import turns
from tokenmill.untrusted import cut, visible
from tokenmill.web.catalog import Found

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
        name=_seen(record.key),
        sample=record.sample,
        turn=record.turn,
        attempt=record.attempt,
        verdict=found.verdict.value,
        labels=tuple(map(visible, found.labels)),
        superseded=found.superseded,
        server=visible(record.server),
        finish_reason=_seen(record.finish_reason),
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        reasoning_tokens=record.reasoning_tokens,
        repetition=round(record.repetition, 1),
        accept_length=record.accept_length,
        started=record.started,
        seconds=record.seconds,
        messages=[(visible(role), _seen(text, most)) for role, text in turns(record)[0 if whole else -2 :]],
        thought=_seen(record.reasoning, most),
        answer=_seen(record.answer, most),
        error=_seen(record.error, most),
        raw=_seen(record.text, most) if whole else "",
    )


def _seen(text: str, most: int = LIST_CHARS) -> str:
    return visible(cut(text, most))


def safe(value: Any) -> Any:
    """Any message as plain data, with every text in it made visible."""
    return _walked(msgspec.to_builtins(value))


def _walked(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): _walked(inner) for key, inner in value.items()}
    return [_walked(inner) for inner in value] if isinstance(value, list | tuple) else value

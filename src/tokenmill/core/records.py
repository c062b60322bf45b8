"""What passes between run and node, and what the store keeps. Messages only: every type here is msgspec-encodable.

A record is what became of one completion asked for, id = (key, sample, turn). Token ids stay `msgspec.Raw` (the bytes
of a JSON list, or `null`): decoding 7,500 ids costs 1.3 ms, carrying them 0.1 ms.
"""

from typing import Literal, NamedTuple

import msgspec
import numpy as np

_COMMA = np.uint8(ord(","))
NULL = msgspec.Raw(b"null")

Label = Literal[
    "empty",
    "empty_reasoning",
    "empty_answer",
    "truncated_in_thinking",
    "truncated_in_answer",
    "repetition",
    "orphan_think_tag",
    "missing_end_token",
    "foreign_mode",
    "bad_text",
    "ids_disagree",
    "short_mask",
    "prompt_too_long",
    "bad_prompt",
    "request_refused",
    "aborted",
    "duplicate",
    "broken_off",
]
"""Three are ours beyond the usual set. `bad_text`: NUL, half a surrogate pair, or many replacement characters in the
output. `ids_disagree`: token ids do not fit their count, their text, or each other (agree.py). `broken_off`: a turn
before it in the conversation was rejected, cut off or failed, and this one never asked for."""

FAILURES: frozenset[str] = frozenset(
    {"prompt_too_long", "bad_prompt", "request_refused", "aborted", "duplicate", "broken_off"}
)
"""Labels of records for which there is no completion: the verdict is `failed`."""

PROMPT_FAULTS: frozenset[str] = frozenset({"prompt_too_long", "bad_prompt", "duplicate"})
"""Failures that say something of the prompt set and nothing of the servers: the gate does not count them."""

NO_COHORT = -1
"""Of a record that nobody was asked for: its fault was counted where it lies, so the gate does not count it."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One completion asked for, as a node is offered it.

    `messages` is a JSON list of {"role", "content", …} that ends with a user or tool turn; `tools` a JSON list or null.
    `row` is the 0-based row of the prompt set; `cohort` the gate's group, by order of dispatch.
    """

    key: str
    sample: int
    row: int
    cohort: int
    digest: str
    messages: msgspec.Raw
    tools: msgspec.Raw = NULL
    turn: int = 0
    attempt: int = 1


class Again(msgspec.Struct, frozen=True, gc=False):
    """A record that its node generates anew, since its server had gone bad: the next record of this id, with a greater
    `attempt`, will count in its place. `labels` are those it was judged by."""

    key: str
    sample: int
    turn: int
    cohort: int
    attempt: int
    labels: tuple[str, ...]
    output_tokens: int


class Completion(msgspec.Struct, frozen=True, gc=False):
    """One answer of an engine, in one shape for all of them.

    `text` is the output as the engine decoded it, thought included: where a server sends thought and answer in two
    fields, they are put together again with the think tags. `finish_reason` is stop, length, or the engine's own word
    for anything else, which finishes no record. Ids are JSON lists without spaces, or null; counts are in tokens.
    `damaged` says that half surrogate pairs were replaced in `text`.
    """

    text: str
    finish_reason: str
    output_ids: msgspec.Raw = NULL
    prompt_ids: msgspec.Raw = NULL
    prompt_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    accept_length: float | None = None
    damaged: bool = False


class Parts(NamedTuple):
    """Where thought and answer lie in a completion's text: text[a:b] and text[c:d]."""

    a: int
    b: int
    c: int
    d: int


class Record(msgspec.Struct, frozen=True, gc=False):
    """What became of one completion asked for. Fields the engine gave nothing for are null, 0 or empty.

    `digest` is the hash of the prompt row's content, `settings` the id of a row in settings.jsonl. `repetition` is the
    highest zlib ratio of a stretch of it (loops.py); `reasoning_tokens` is exact where `</think>` is one token, else by
    share of characters. `started` is Unix time, `seconds` the request's duration. `error` says why, where labels name a
    failure.
    """

    key: str
    sample: int
    turn: int
    row: int
    cohort: int
    digest: str
    settings: str
    messages: msgspec.Raw
    tools: msgspec.Raw = NULL
    prompt_ids: msgspec.Raw = NULL
    output_ids: msgspec.Raw = NULL
    text: str = ""
    parts: Parts = Parts(0, 0, 0, 0)
    finish_reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    repetition: float = 0.0
    thinking: bool = False
    server: str = ""
    attempt: int = 1
    started: float = 0.0
    seconds: float = 0.0
    accept_length: float | None = None
    labels: tuple[str, ...] = ()
    error: str = ""

    @property
    def reasoning(self) -> str:
        return self.text[self.parts.a : self.parts.b]

    @property
    def answer(self) -> str:
        return self.text[self.parts.c : self.parts.d]


def count_ids(ids: msgspec.Raw) -> int:
    """How many ids a JSON list without spaces holds; 0 for null."""
    data = bytes(ids)
    return 0 if len(data) <= 2 or data == b"null" else count_commas(data) + 1


def count_commas(data: bytes) -> int:
    """How often bytes hold a comma: numpy looks at 16 of them at once, `count` at one."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _COMMA))


def record_id(key: str, sample: int, turn: int, *, several: bool) -> str:
    """The id as exports write it: the key alone, or key#sample.turn where a prompt has several completions."""
    return f"{key}#{sample}.{turn}" if several else key


def failed(
    prompt: Prompt, label: Label, error: str, *, settings: str, server: str = "", started: float = 0.0
) -> Record:
    """The record of a prompt for which no completion could be had."""
    return Record(
        key=prompt.key,
        sample=prompt.sample,
        turn=prompt.turn,
        row=prompt.row,
        cohort=prompt.cohort,
        digest=prompt.digest,
        settings=settings,
        messages=prompt.messages,
        tools=prompt.tools,
        server=server,
        attempt=prompt.attempt,
        started=started,
        labels=(label,),
        error=error,
    )

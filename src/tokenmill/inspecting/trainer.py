"""What a trainer makes of a row, by the model's own tokenizer and chat template: ids, mask, and the text behind them.

A conversation is rendered whole and without its answer; the mask is what the first has more, up to the end token: the
boundary of prompt and completion, not the template's marks, which most templates lack.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.core.judge import CLOSE, OPEN
from tokenmill.errors import PluginError, UsageError, boundary
from tokenmill.inspecting.shapes import Bad, Ids, Talk, Tokens
from tokenmill.machine import modelfiles
from tokenmill.render import load_tokenizer

_MARKS = re.compile(r"\{%-?\s*generation\b")

_NEEDS = "name the folder that holds tokenizer.json"

PROBED_CHARS = 200
"""Of a thought, to see whether it was rendered: templates strip its ends."""


@dataclass(frozen=True, slots=True)
class Output:
    """The last stretch of supervised tokens: its text without the end token, its tokens with it.

    `ended`: it has an end token; `lost`: that stands right behind the mask; `opened`: the prompt holds `<think>`.
    `thought_tokens` are those in front of `</think>`, None where there is none.
    """

    text: str
    tokens: int
    ended: bool
    lost: bool
    opened: bool
    thought_tokens: int | None


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation as text; the answer begins at `start`."""

    text: str
    start: int


class Trainer:
    """A model's tokenizer and chat template. `marked`: the template has {% generation %} marks."""

    def __init__(self, model: Path) -> None:
        if not model.is_dir():
            raise UsageError(f"--model {model}: no such folder", fix=_NEEDS)
        try:
            with boundary(f"loading the tokenizer of {model}"):
                self._tokenizer: Any = load_tokenizer(model)
        except PluginError as error:
            raise UsageError(str(error), fix=_NEEDS) from error
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise UsageError(f"the tokenizer of {model} cannot tell where its tokens lie in a text", fix=_NEEDS)
        self.name = model.name
        self.template: str = self._tokenizer.chat_template or ""
        self.marked = bool(_MARKS.search(self.template))
        self._ends = {*modelfiles.end_tokens(model), self._tokenizer.eos_token_id} - {None}
        self._open, self._close = self._one(OPEN), self._one(CLOSE)

    def _one(self, text: str) -> int | None:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[0] if len(ids) == 1 else None

    def tokens(self, talks: Sequence[Talk]) -> "list[tuple[Tokens | Bad, bool]]":
        """Conversations as they are trained, each with whether its thought is in it; one that the template refuses is
        bad. All at once, since the tokenizer then uses every core."""
        rendered = [self._render(talk) for talk in talks]
        texts = [one.text for one in rendered if isinstance(one, _Rendered)]
        with boundary("the tokenizer"):
            encoded = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        return [
            (one, True) if isinstance(one, Bad) else self._masked(talk, one, next(encoded))
            for talk, one in zip(talks, rendered, strict=True)
        ]

    def _render(self, talk: Talk) -> "_Rendered | Bad":
        if not self.template:
            return Bad(talk.name, f"{self.name} has no chat template")
        try:
            with boundary("the chat template"):
                whole = self._rendered(talk.turns, talk.tools, generate=False)
                before = self._rendered(talk.turns[:-1], talk.tools, generate=True)
        except PluginError as error:
            return Bad(talk.name, str(error))
        # Templates that open a thought in the prompt may leave it out of the whole.
        start = len(before) if whole.startswith(before) else _common(whole, before)
        return _Rendered(whole, start)

    def _masked(self, talk: Talk, rendered: "_Rendered", encoded: Any) -> tuple[Tokens, bool]:
        text, start = rendered.text, rendered.start
        ids = np.array(encoded.ids, dtype=np.int32)
        # The newline behind the end token is the template's: no model writes it.
        first, end = _token_at(encoded, start, len(ids)), _token_at(encoded, len(text.rstrip()), len(ids))
        mask = np.zeros(len(ids), dtype=np.bool_)
        mask[first:end] = True
        inline = talk.content.partition(CLOSE)[0].rpartition(OPEN)[2] if CLOSE in talk.content else ""
        thought = (talk.thought or inline).strip()[:PROBED_CHARS]
        return Tokens(talk.name, ids, mask, talk.finish), thought in text[start:]

    def _rendered(self, turns: list[dict[str, Any]], tools: Any, *, generate: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=generate
        )
        return text

    def output(self, row: Tokens) -> Output:
        """The last stretch of supervised tokens."""
        on = np.flatnonzero(row.mask)
        start, stop = int(on[-1]), int(on[-1]) + 1
        gaps = np.flatnonzero(np.diff(on) > 1)
        start = int(on[gaps[-1] + 1]) if len(gaps) else int(on[0])
        ids: Ids = row.ids[start:stop]
        ended = int(ids[-1]) in self._ends
        text = self._decoded(ids[:-1] if ended else ids)
        opened = self._open is not None and self._open in row.ids[max(0, start - 2) : start]
        closed = int((ids == self._close).argmax()) if self._close in ids else None
        return Output(text, len(ids), ended, not ended and self._is_lost(row.ids[stop : stop + 2]), opened, closed)

    def _is_lost(self, behind: Ids) -> bool:
        """Whether one end token follows: several are padding, behind an output that may have been cut off."""
        return [int(one) in self._ends for one in behind] in ([True], [True, False])

    def _decoded(self, ids: Ids) -> str:
        with boundary("decoding"):
            text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            return text


def _common(one: str, other: str) -> int:
    """How many characters two texts share at their beginning."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _token_at(encoded: Any, at: int, count: int) -> int:
    """The first token that begins at or behind a character: one that begins in front of it belongs to what is there."""
    token = encoded.char_to_token(at)
    if token is None:  # behind the last one, or a character that the tokenizer drops
        return next((number for number, (start, _) in enumerate(encoded.offsets) if start >= at), count)
    return int(token) + int(encoded.token_to_chars(token)[0] < at)

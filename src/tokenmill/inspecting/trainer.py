"""What a trainer makes of a row, by the model's own tokenizer and chat template: ids, mask, and the text behind them.

A conversation is rendered whole and without its answer; the mask is what the first has more, up to the end token: the
boundary of prompt and completion, not the template's marks, which most templates lack.
"""

import re
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


class Trainer:
    """A model's tokenizer and chat template. `marked`: the template has {% generation %} marks."""

    def __init__(self, model: Path) -> None:
        if not model.is_dir():
            raise UsageError(f"--model {model}: no such folder", fix="name the folder that holds tokenizer.json")
        try:
            with boundary(f"loading the tokenizer of {model}"):
                self._tokenizer: Any = load_tokenizer(model)
        except PluginError as error:
            raise UsageError(str(error), fix="name the folder that holds tokenizer.json") from error
        self.name = model.name
        self.template: str = self._tokenizer.chat_template or ""
        self.marked = bool(_MARKS.search(self.template))
        self._ends = {*modelfiles.end_tokens(model), self._tokenizer.eos_token_id} - {None}
        self._open, self._close = self._one(OPEN), self._one(CLOSE)

    def _one(self, text: str) -> int | None:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[0] if len(ids) == 1 else None

    def tokens(self, talk: Talk) -> tuple[Tokens | Bad, bool]:
        """A conversation as it is trained, and whether its thought is in it. A row that the template refuses is bad."""
        if not self.template:
            return Bad(talk.name, f"{self.name} has no chat template"), True
        try:
            with boundary("the chat template"):
                whole = self._rendered(talk.turns, talk.tools, generate=False)
                before = self._rendered(talk.turns[:-1], talk.tools, generate=True) if talk.turns[:-1] else ""
                if not whole.startswith(before):  # a thought that the template opens by itself, for one
                    before = _common(whole, before)
                found = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        except PluginError as error:
            return Bad(talk.name, str(error)), True
        ids = np.array(found["input_ids"], dtype=np.int32)
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        end = len(whole.rstrip())  # the newline behind the end token is the template's: no model writes it
        mask = (offsets[:, 0] >= len(before)) & (offsets[:, 0] < end)
        thought = (talk.thought or "").strip()[:PROBED_CHARS]
        return Tokens(talk.name, ids, mask, talk.finish), thought in whole[len(before) :]

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


def _common(one: str, other: str) -> str:
    """The beginning that two texts share."""
    length = min(len(one), len(other))
    return one[: next((at for at in range(length) if one[at] != other[at]), length)]

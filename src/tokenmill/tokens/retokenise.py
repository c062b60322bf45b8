"""A record's text as token ids again, by the model's tokenizer and chat template: what a trainer gets that has no ids.

For comparing (`audit`), and for rows whose engine gave none (`export --retokenise`). It is the best that text allows:
the prompt is rendered with the run's thinking switch; where that opens the thought, the output does not open it again;
where the output ended by itself, the model's end token follows, though which one was sampled is not known.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill.core import agree
from tokenmill.core.judge import OPEN
from tokenmill.core.records import NULL, Record
from tokenmill.errors import PluginError, PreflightError, UsageError, boundary
from tokenmill.machine import modelfiles
from tokenmill.render import END_TEXTS, load_tokenizer, size_of

_NEEDS = "--model PATH   the model's folder, with tokenizer.json and its chat template, or its .gguf file"


class Again(NamedTuple):
    """Both parts of a record as ids; `problem` is why there are none, such as messages that the template refuses."""

    prompt: list[int]
    output: list[int]
    problem: str = ""


def model_of(path: str, given: Path | None) -> Path:
    """The files to take the tokenizer from: those given, else the run's own; raises UsageError where there are none."""
    model = given or Path(path)
    if (given is None and not path) or not model.exists():
        what = f"--model {given}: no such folder or file" if given else f"model.path = {path!r} is not here"
        raise UsageError(what, fix=_NEEDS)
    return model


class Retokeniser:
    """`ends` are the end tokens, `inner` padding and mask, which no output holds inside, `specials` what engines leave
    out of a text."""

    def __init__(self, model: Path) -> None:
        try:
            with boundary(f"loading the tokenizer of {model}"):
                self._tokenizer: Any = load_tokenizer(model)
        except (PluginError, PreflightError) as error:
            raise UsageError(str(error), fix=_NEEDS) from error
        self._batch: Any = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "encode_batch", None)
        self._size = size_of(self._tokenizer)
        end = self._tokenizer.eos_token_id
        added: dict[int, Any] = self._tokenizer.added_tokens_decoder
        # The end tokens of a .gguf file are llama.cpp's choice, by their texts.
        known = {number for number, token in added.items() if model.is_file() and token.content in END_TEXTS}
        self.ends = frozenset({*modelfiles.end_tokens(model), *known, end} - {None})
        self._end = end if end is not None else min(self.ends, default=None)
        self.inner = frozenset({self._tokenizer.pad_token_id, self._tokenizer.mask_token_id} - {None})
        self.specials = agree.pattern(token.content for token in added.values() if token.special)
        self.has_template = bool(self._tokenizer.chat_template)

    def again(self, records: Sequence[Record]) -> list[Again]:
        """Records as their texts give them; many at once, since the tokenizer then uses every core."""
        prompts = [self._prompt(record) for record in records]
        texts = [text for text, _ in prompts]
        outputs = [_behind(text, record.text) for text, record in zip(texts, records, strict=True)]
        ids = self._encode([*texts, *outputs])
        return [
            Again(ids[at], self._ended(ids[len(records) + at], record), prompts[at][1])
            for at, record in enumerate(records)
        ]

    def _prompt(self, record: Record) -> tuple[str, str]:
        """The prompt as text, and why there is none."""
        if not self.has_template:
            return "", "the model has no chat template"
        try:
            with boundary("the chat template"):
                text: str = self._tokenizer.apply_chat_template(
                    msgspec.json.decode(record.messages),
                    tools=None if record.tools == NULL else msgspec.json.decode(record.tools),
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=record.thinking,
                )
        except PluginError as error:
            return "", str(error)
        return text, ""

    def _encode(self, texts: list[str]) -> list[list[int]]:
        with boundary("the tokenizer"):
            if self._batch is None:
                return [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            return [encoded.ids for encoded in self._batch(texts, add_special_tokens=False)]

    def _ended(self, ids: list[int], record: Record) -> list[int]:
        return [*ids, self._end] if record.finish_reason == "stop" and self._end is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, special tokens included. Ids that are none of the vocabulary show as such: a tokenizer passes
        over them without a word, or fails."""
        if not self.knows(ids):
            return "".join(map(self._piece, ids))
        with boundary("decoding"):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text

    def _piece(self, number: int) -> str:
        return self.decode([number]) if self.knows([number]) else f"<no token {number}>"

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether all ids are of the vocabulary."""
        return not ids or 0 <= min(ids) <= max(ids) < self._size


def _behind(prompt: str, text: str) -> str:
    """An output's text as it follows a prompt that may have opened the thought: some servers write the tag then, too,
    and where a server splits the thought off, tokenmill does."""
    start = text.lstrip()
    opened = prompt.rstrip()
    if not opened.endswith(OPEN) or not start.startswith(OPEN):
        return text
    return start.removeprefix(OPEN).removeprefix(prompt[len(opened) :])

"""Messages → what is sent. One owner of rendering, in three ways, by the engine's `renders`:

    ids     the model's own tokenizer and chat template, through transformers (no torch): exact ids, sent as they are
    server  the server renders by its template and tokenizes, then gets its own ids back
    chat    messages are sent; the server renders, and says which ids it made where it can

A renderer also knows how to read outputs: end tokens, the token of `</think>`, whether the prompt opens the thought.
"""

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.client import Client
from tokenmill.core.judge import CLOSE, OPEN, Reading
from tokenmill.core.records import NULL, count_ids
from tokenmill.core.rendering import Rendering, differences, sha256_of
from tokenmill.engines.base import Engine, Rendered, Sampling, ServerInfo
from tokenmill.errors import BadPromptError, PluginError, PreflightError, RefusedError, boundary
from tokenmill.machine import ggufvocab, modelfiles, threads

RENDER_TIMEOUT_S = 60.0
"""For the two small requests with which a llama.cpp server renders: they queue behind nothing."""

END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<EOT>", "</s>", "<eos>", "<|return|>", "<|call|>", "<|eot|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|user|>"),
)
"""What llama.cpp takes for the end of a generation where the vocabulary has it as one token (src/llama-vocab.cpp)."""

PAD_TEXTS = ("<pad>", "[PAD]", "<|pad|>", "<mask>", "[MASK]", "<|mask|>")
"""What no output holds, where the vocabulary has it as one token: a llama.cpp server does not tell its own."""

SPELL_S = 10.0
"""For what a few thousand ids spell: milliseconds, on threads that a loaded machine may keep waiting."""

LOAD_S = 60.0
"""For transformers and a tokenizer: 2 s, 20 s on a cold mount. Whoever does not come by then is not asked any more."""


class Renderer(ABC):
    """`template` is the chat template's text; it and `tokenizer_sha256` are empty while unknown; `rendering` is known
    once `prove` was called. `specials` are the special tokens' texts, as far as they are known."""

    template = ""
    tokenizer_sha256 = ""
    rendering: Rendering | None = None
    specials: frozenset[str] = frozenset()

    def __init__(self, thinking: bool) -> None:
        self.thinking = thinking

    @abstractmethod
    async def render(self, messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
        """Raises BadPromptError for messages that the template refuses, RequestError where the server fails."""

    @abstractmethod
    async def example(self, messages: msgspec.Raw, client: Client) -> tuple[str, msgspec.Raw]:
        """Messages as rendered text and ids; empty and null where only the server knows."""

    async def prove(self, messages: msgspec.Raw, given: msgspec.Raw, client: Client, info: ServerInfo) -> str:
        """Renders a prompt and keeps it as the run's first. Returns how a later server renders the same messages
        otherwise, empty where it does not. `given` are the prompt's ids as this server gave them, null if it gave none.
        """
        text, ids = await self.example(messages, client)
        self.template = self.template or info.template
        template = info.template or self.template
        own = ids if ids != NULL else given
        known = (template, sha256_of(template), self.tokenizer_sha256)
        new = Rendering(*known, bytes(messages).decode(), text, own)
        self.rendering = self.rendering or new
        return "; ".join(found.text for found in differences(self.rendering, new) if not found.dated)

    @property
    def first(self) -> str:
        """The first rendered prompt, as text; empty before `prove`, and where only the server knows."""
        return self.rendering.prompt if self.rendering else ""

    @abstractmethod
    async def reading(self, client: Client, info: ServerInfo, sample: msgspec.Raw) -> Reading:
        """How to read outputs, once `prove` was called. `sample` are a prompt's ids as the engine gave them back, null
        where it does not."""

    @abstractmethod
    async def spell(self, ids: msgspec.Raw, client: Client) -> str | None:
        """See spelling.Speller."""

    def lost_by_conversations(self, conversations: Sequence[tuple[Any, str, str]]) -> str:
        """What a trainer loses that renders conversations (messages and the answer's turn, thought, answer) by the
        model's template; empty where that is nothing, or not known."""
        return ""


class TokenizerRenderer(Renderer):
    """By transformers, from the model's folder, which is read in the constructor: that takes 2 s."""

    def __init__(self, model: Path, thinking: bool) -> None:
        super().__init__(thinking)
        with boundary(f"loading the tokenizer of {model}"):
            self._tokenizer: Any = load_tokenizer(model)
        self._vocabulary = Vocabulary(self._tokenizer)
        self.specials = self._vocabulary.specials
        self.template = modelfiles.template(model)
        self._ends = modelfiles.end_tokens(model)
        if not self._tokenizer.chat_template:
            raise PreflightError(
                f"{model} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json",
                fix="add the template's file to the model folder, or use an engine that is given messages",
            )

    async def render(self, messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
        ids, _ = await self._both(messages, tools)
        return Rendered(messages, tools, msgspec.Raw(msgspec.json.encode(ids)), len(ids))

    async def example(self, messages: msgspec.Raw, client: Client) -> tuple[str, msgspec.Raw]:
        ids, text = await self._both(messages, NULL)
        return text, msgspec.Raw(msgspec.json.encode(ids))

    async def _both(self, messages: msgspec.Raw, tools: msgspec.Raw) -> tuple[list[int], str]:
        try:
            return await asyncio.to_thread(self._ids, messages, tools)
        except PluginError as error:
            raise BadPromptError(str(error)) from error

    def _ids(self, messages: msgspec.Raw, tools: msgspec.Raw) -> tuple[list[int], str]:
        with boundary("the chat template"):
            text: str = self._tokenizer.apply_chat_template(
                msgspec.json.decode(messages),
                tools=msgspec.json.decode(tools),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self.thinking,
            )
            # The template wrote the special tokens: adding them again would double the first.
            return self._tokenizer(text, add_special_tokens=False)["input_ids"], text

    def lost_by_conversations(self, conversations: Sequence[tuple[Any, str, str]]) -> str:
        lost = {"thought": 0, "answer": 0, "end token": 0}
        for turns, thought, answer in conversations:
            try:
                with boundary("the chat template"):
                    text: str = self._tokenizer.apply_chat_template(turns, tokenize=False)
            except PluginError as error:
                return f"a template that refuses the answer's turn: conversations cannot be trained on by it ({error})"
            at = text.rfind(answer.strip())
            lost["thought"] += bool(thought) and thought.strip() not in text
            lost["answer"] += at < 0
            behind = text[at + len(answer.strip()) :].strip()
            lost["end token"] += at >= 0 and not any(behind.startswith(end) for end in self.specials)
        return _lost(lost, len(conversations))

    def count(self, messages: msgspec.Raw, tools: msgspec.Raw) -> int:
        """The tokens of a rendered prompt; raises PluginError where the template refuses the messages."""
        return len(self._ids(messages, tools)[0])

    async def reading(self, client: Client, info: ServerInfo, sample: msgspec.Raw) -> Reading:
        tokenizer = self._tokenizer
        never = {getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "mask_token_id", None)}
        close = self._tokenizer(CLOSE, add_special_tokens=False)["input_ids"]
        return Reading(
            thinking=self.thinking,
            opened=self.first.rstrip().endswith(OPEN),
            end_ids=frozenset(_digits({*self._ends, tokenizer.eos_token_id})),
            close_id=str(close[0]).encode() if len(close) == 1 else b"",
            shut=self.first.rstrip().endswith(CLOSE),
            never=tuple(_digits(never)),
        )

    async def spell(self, ids: msgspec.Raw, client: Client) -> str | None:
        return await threads.reading(lambda: self._vocabulary.spell(ids), None, SPELL_S)


class Vocabulary:
    """What ids spell, by a model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.specials: frozenset[str] = frozenset(tokenizer.get_added_vocab())
        self._tokenizer = tokenizer
        self._size = size_of(tokenizer)

    def spell(self, ids: msgspec.Raw) -> str:
        """Raises PluginError for ids that are none of its own: a tokenizer would pass over them without a word."""
        with boundary("the tokenizer"):
            numbers: list[int] = msgspec.json.decode(ids, type=list[int])
            if any(not 0 <= number < self._size for number in numbers):
                raise ValueError(f"ids up to {max(numbers)} in a vocabulary of {self._size}")
            return str(self._tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def size_of(tokenizer: Any) -> int:
    """The ids of a tokenizer end below this. Its length is less where numbers are left out."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def load_tokenizer(model: Path) -> Any:
    """transformers' tokenizer of a model folder or a .gguf file; raises PreflightError for a kind that is not known.

    AutoTokenizer imports torch where torch is installed, which takes 12 s and more; tokenizer.json needs none of it.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": it is not wanted
    if model.is_file():
        with _importing:
            return ggufvocab.tokenizer(model)
    name = "PreTrainedTokenizerFast" if (model / "tokenizer.json").is_file() else "AutoTokenizer"
    with _importing:
        import transformers

        kind = getattr(transformers, name)
    return kind.from_pretrained(str(model), local_files_only=True)


_importing = threading.Lock()
"""transformers imports lazily, and breaks where two threads do it at once (seen: two checks of doctor)."""


class ServerRenderer(Renderer):
    """By a server that can render and tokenize without generating."""

    specials = frozenset((*END_TEXTS, *PAD_TEXTS))

    def __init__(self, engine: Engine, thinking: bool) -> None:
        super().__init__(thinking)
        self._engine = engine

    async def render(self, messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
        ids = await self._tokens(client, await self._text(messages, tools, client), whole=True)
        return Rendered(messages, tools, ids, count_ids(ids))

    async def _text(self, messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> str:
        request = self._engine.template_request(messages, tools, self.thinking)
        try:
            answer = await client.post(request.path, request.body, timeout_s=RENDER_TIMEOUT_S)
        except RefusedError as error:
            raise BadPromptError(f"the server's template refuses the messages: {error}") from error
        return self._engine.read_template(answer)

    async def example(self, messages: msgspec.Raw, client: Client) -> tuple[str, msgspec.Raw]:
        text = await self._text(messages, NULL, client)
        return text, await self._tokens(client, text, whole=True)

    async def _tokens(self, client: Client, text: str, *, whole: bool) -> msgspec.Raw:
        request = self._engine.ids_request(text, whole=whole)
        return self._engine.read_tokens(await client.post(request.path, request.body, timeout_s=RENDER_TIMEOUT_S))

    async def reading(self, client: Client, info: ServerInfo, sample: msgspec.Raw) -> Reading:
        ends = await self._single(client, *END_TEXTS, info.end_token) if info.end_token else []
        never = await self._single(client, *PAD_TEXTS)
        close = await self._tokens(client, CLOSE, whole=False)
        return Reading(
            thinking=self.thinking,
            opened=self.first.rstrip().endswith(OPEN),
            end_ids=frozenset(ends),
            close_id=bytes(close)[1:-1] if count_ids(close) == 1 else b"",
            shut=self.first.rstrip().endswith(CLOSE),
            never=tuple(never),
        )

    async def _single(self, client: Client, *texts: str) -> list[bytes]:
        """The ids of those texts that are one token."""
        found = [await self._tokens(client, text, whole=False) for text in dict.fromkeys(texts)]
        return [bytes(ids)[1:-1] for ids in found if count_ids(ids) == 1]

    async def spell(self, ids: msgspec.Raw, client: Client) -> str | None:
        request = self._engine.spelling_request(ids)
        if request is None:
            return None
        return self._engine.read_spelling(await client.post(request.path, request.body, timeout_s=SPELL_S))


class ChatRenderer(Renderer):
    """Messages go out as they are. What the model's folder tells, where there is one, is read in the constructor and
    without transformers, but for what ids spell."""

    def __init__(self, model: Path | None, thinking: bool) -> None:
        super().__init__(thinking)
        self._model = model if model and model.is_dir() else None
        self._spells_by: Path | None = None
        self._vocabulary: asyncio.Future[Vocabulary | None] | None = None
        if self._model is None:
            return
        self.template = modelfiles.template(self._model)
        self._tags = modelfiles.added_tokens(self._model, OPEN, CLOSE)
        self._ends = modelfiles.end_tokens(self._model)
        self._never = modelfiles.special_tokens(self._model, "pad_token", "mask_token").values()
        if (self._model / "tokenizer.json").is_file():
            self._spells_by = self._model

    async def render(self, messages: msgspec.Raw, tools: msgspec.Raw, client: Client) -> Rendered:
        return Rendered(messages, tools)

    async def example(self, messages: msgspec.Raw, client: Client) -> tuple[str, msgspec.Raw]:
        return "", NULL

    async def reading(self, client: Client, info: ServerInfo, sample: msgspec.Raw) -> Reading:
        if self._model is None:
            return Reading(self.thinking)
        tags = self._tags
        last = bytes(sample)[-64:].strip(b"[]").split(b",")[-2:]  # `<think>` and its newline end the prompt
        opened = str(tags[OPEN]).encode() in last if sample != NULL and OPEN in tags else None
        return Reading(
            thinking=self.thinking,
            opened=opened,
            end_ids=frozenset(_digits(self._ends)),
            close_id=str(tags[CLOSE]).encode() if CLOSE in tags else b"",
            shut=CLOSE in tags and str(tags[CLOSE]).encode() in last,
            never=tuple(_digits(self._never)),
        )

    async def spell(self, ids: msgspec.Raw, client: Client) -> str | None:
        model = self._spells_by
        if model is None:
            return None
        if self._vocabulary is None:
            self._vocabulary = asyncio.ensure_future(threads.reading(lambda: _vocabulary(model), None, LOAD_S))
        vocabulary = await asyncio.shield(self._vocabulary)
        if vocabulary is None:
            return None
        self.specials = vocabulary.specials
        return await threads.reading(lambda: vocabulary.spell(ids), None, SPELL_S)


def _vocabulary(model: Path) -> Vocabulary | None:
    """None where the folder's tokenizer cannot be loaded: the engine had its own way, and nothing is compared."""
    try:
        with boundary(f"loading the tokenizer of {model}"):
            return Vocabulary(load_tokenizer(model))
    except PluginError:
        return None


def renderer_for(engine: Engine, model: Path | None, thinking: bool) -> Renderer:
    """The renderer that an engine asks for; loads the tokenizer where it is needed."""
    made: Renderer
    if engine.renders == "server":
        made = ServerRenderer(engine, thinking)
    elif engine.renders == "chat":
        made = ChatRenderer(model, thinking)
    elif model is None:
        raise PreflightError(f"engine {engine.kind} needs model.path: tokenmill renders with the model's tokenizer")
    else:
        made = TokenizerRenderer(model, thinking)
    made.tokenizer_sha256 = modelfiles.tokenizer_sha256(model) if model is not None and model.exists() else ""
    return made


def _lost(lost: Mapping[str, int], of: int) -> str:
    words = ", ".join(f"the {what} of {count} of {of}" for what, count in lost.items() if count)
    if not words:
        return ""
    return (
        f"the chat template loses {words} when a conversation is rendered whole: messages and specforge-chat would be "
        "trained without; the formats of token ids hold all of it"
    )


def _digits(ids: Iterable[int | None]) -> list[bytes]:
    return [str(number).encode() for number in sorted(number for number in ids if number is not None)]


def fit(sampling: Sampling, rendered: Rendered, info: ServerInfo) -> Sampling:
    """max_tokens cut to what the context leaves; raises BadPromptError where it leaves nothing."""
    if rendered.tokens is None or info.context is None:
        return sampling
    room = info.context - info.reserve - rendered.tokens
    if room < 1:
        message = f"{rendered.tokens} prompt tokens do not fit the context of {info.context} (reserved: {info.reserve})"
        raise BadPromptError(message, label="prompt_too_long")
    return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)

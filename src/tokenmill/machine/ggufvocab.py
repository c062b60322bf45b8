"""The tokenizer that stands in a .gguf file, as transformers' own: no server and no torch is needed for it.

llama.cpp splits a text by a pattern that the file only names (`tokenizer.ggml.pre`; src/llama-vocab.cpp has them), and
then merges bytes. Patterns that are not in the table are refused: another one gives other ids.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import PreflightError
from tokenmill.machine import gguf

_NAME = "tokenizer."
_TEMPLATE = "tokenizer.chat_template"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LAST = r"\s*[\r\n]+|\s+(?!\S)|\s+"

PATTERNS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LAST}",),
    "qwen35": (
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LAST}",
    ),
    "llama-bpe": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LAST}",),
}
"""How a text is split before it is merged, one pattern after the other (llama.cpp, llm_tokenizer_bpe)."""

_WHOLE_FIRST = frozenset({"llama-bpe"})
"""A word that is a token as it stands is taken whole, whatever the merges say."""

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split."""

_FIX = "name the model's Hugging Face folder: --model PATH"


def fingerprint(file: Path) -> str:
    """sha256 of all that decides the ids, the template left out; empty where the header cannot be read."""
    try:
        found = gguf.values(file, _NAME)
    except (OSError, ValueError):
        return ""
    found.pop(_TEMPLATE, None)
    return hashlib.sha256(msgspec.json.encode(found, order="sorted")).hexdigest() if found else ""


def template(file: Path) -> str:
    """The chat template in the file; empty where there is none."""
    try:
        return str(gguf.values(file, _TEMPLATE).get(_TEMPLATE, ""))
    except (OSError, ValueError):
        return ""


def tokenizer(file: Path) -> Any:
    """transformers' tokenizer of a .gguf file; raises PreflightError where its kind is not known here."""
    try:
        found = gguf.values(file, _NAME)
    except (OSError, ValueError) as error:
        raise PreflightError(f"{file}: its tokenizer cannot be read: {error}", fix=_FIX) from error
    kind, pre = found.get("tokenizer.ggml.model", ""), found.get("tokenizer.ggml.pre", "")
    patterns = PATTERNS.get(pre)
    if kind != "gpt2" or patterns is None:
        raise PreflightError(f"{file}: a tokenizer of kind {kind!r}, {pre!r}, cannot be built from the file", fix=_FIX)
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = found["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in found.get("tokenizer.ggml.merges", [])]
    vocabulary = {text: number for number, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_FIRST))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    kinds = found.get("tokenizer.ggml.token_type", [])
    for text, what in zip(tokens, kinds, strict=False):
        if what in (CONTROL, USER_DEFINED):
            added = AddedToken(text, special=what == CONTROL, normalized=False)
            (made.add_special_tokens if what == CONTROL else made.add_tokens)([added])
    named = {
        name: tokens[number]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
        if isinstance(number := found.get(f"tokenizer.ggml.{key}_token_id"), int) and number < len(tokens)
    }
    kind_of: Any = PreTrainedTokenizerFast
    return kind_of(
        tokenizer_object=made, chat_template=found.get(_TEMPLATE) or None, clean_up_tokenization_spaces=False, **named
    )

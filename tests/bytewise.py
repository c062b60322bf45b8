"""A model folder whose tokens are single bytes, as the scripted server's are: id 256 ends an output, and padding
follows. Its template renders the last message alone, which is what the scripted server takes for a prompt."""

from pathlib import Path

from tests import models
from tokenmill.testing.script import END_ID

END, PAD = "<|im_end|>", "<|pad|>"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
PLAIN = "{{- messages[-1].content -}}"


def _alphabet() -> dict[int, str]:
    """Byte-level tokenizers write bytes as letters: those that can be seen as they are, the others from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in seen)
    return {**{byte: chr(byte) for byte in seen}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


def folder(path: Path, template: str = PLAIN, merges: tuple[tuple[str, str], ...] = ()) -> Path:
    """The model; `merges` make more tokens, of two letters each, from id 300 on."""
    path.mkdir(parents=True, exist_ok=True)
    special = {END: END_ID, PAD: END_ID + 1}
    vocabulary = {letter: byte for byte, letter in _alphabet().items()} | special
    vocabulary |= {one + other: 300 + number for number, (one, other) in enumerate(merges)}
    models.write(
        path / "tokenizer.json",
        **{
            **models.TOKENIZER,
            "added_tokens": [
                {"id": number, "content": text, "special": True, "normalized": False}
                | {"single_word": False, "lstrip": False, "rstrip": False}
                for text, number in special.items()
            ],
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": [list(pair) for pair in merges]},
        },
    )
    models.write(
        path / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=END,
        pad_token=PAD,
    )
    models.write(path / "generation_config.json", eos_token_id=END_ID)
    (path / "chat_template.jinja").write_text(template)
    return path

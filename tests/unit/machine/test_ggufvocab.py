"""The tokenizer of a .gguf file gives llama.cpp's own ids, and is refused where it could not."""

from pathlib import Path

import pytest

from tokenmill import quickstart
from tokenmill.errors import PreflightError
from tokenmill.machine import ggufvocab

SAID = {
    "12345 and 3.14": [33, 34, 35, 36, 37, 284, 216, 35, 30, 33, 36],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "naïve über 模型 🙂": [3546, 46494, 5549, 137, 593, 17097, 118, 111, 46157, 47526],
    "  spaces   here\n\n\n  x": [216, 5600, 256, 1535, 1116, 3805, 1792],
    "don't WE'LL": [12420, 982, 26587, 23, 16421],
}
"""As llama.cpp's /tokenize gave them (xllamacpp 2026.10, SmolLM2-135M)."""


def test_a_real_file_gives_llama_cpps_ids_and_reads_them_back() -> None:
    real = quickstart.find_model(print)
    tokenizer = ggufvocab.tokenizer(real)
    for text, ids in SAID.items():
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|im_end|>", ggufvocab.template(real))
    assert len(ggufvocab.fingerprint(real)) == 64


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + bytes(8) + b"\x09" + bytes(7) + b"\xff" * 9])
def test_a_header_that_cannot_be_read_gives_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    assert (ggufvocab.fingerprint(file), ggufvocab.template(file)) == ("", "")
    with pytest.raises(PreflightError, match="cannot be read") as caught:
        ggufvocab.tokenizer(file)
    assert "--model PATH" in caught.value.fix


def test_a_split_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """A header without any tokenizer: version 3, no tensor, no value."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    with pytest.raises(PreflightError, match="cannot be built from the file"):
        ggufvocab.tokenizer(file)

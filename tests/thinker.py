"""A model folder whose chat template thinks as Qwen3.6's does: the prompt opens the thought, an answer without one gets
an empty block, thoughts of earlier turns are dropped. Its tokens are words, marks and runs of space."""

import re
from collections.abc import Iterable
from pathlib import Path

from tests import models

SPECIAL = ("[UNK]", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

TEMPLATE = """\
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{%- set thought = (m.reasoning_content or '') if m.reasoning_content is defined else '' -%}
{%- set content = m.content -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
{%- if loop.index0 > last.user -%}{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' -}}{%- endif -%}
MARK
{{- content | trim + '<|im_end|>\\n' -}}
{%- else -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
PLAIN = TEMPLATE.replace("MARK\n", "")
MARKED = TEMPLATE.replace("MARK", "{% generation %}").replace(
    "<|im_end|>\\n' -}}\n{%- else", "<|im_end|>\\n' -}}\n{% endgeneration %}{%- else"
)

PIECES = re.compile("|".join([*map(re.escape, SPECIAL), r"\w+|[^\w\s]|\s+"]))


def words(texts: Iterable[str]) -> list[str]:
    """The vocabulary, by id."""
    known = dict.fromkeys(piece for text in ("user assistant system", *texts) for piece in PIECES.findall(text))
    return list(dict.fromkeys([*SPECIAL, "\n", "\n\n", " ", *known]))


def folder(path: Path, texts: Iterable[str], template: str = PLAIN) -> Path:
    """The model; it knows the words of `texts`, and takes all others for one and the same."""
    vocabulary = {word: number for number, word in enumerate(words(texts))}
    path.mkdir(parents=True, exist_ok=True)
    models.write(
        path / "tokenizer.json",
        **{
            **models.TOKENIZER,
            "added_tokens": [
                {"id": number, "content": word, "special": True, "normalized": False}
                | {"single_word": False, "lstrip": False, "rstrip": False}
                for number, word in enumerate(SPECIAL)
            ],
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"\w+|[^\w\s]|\s+"},
                "behavior": "Isolated",
                "invert": False,
            },
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        },
    )
    models.write(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>")
    models.write(path / "generation_config.json", eos_token_id=SPECIAL.index("<|im_end|>"))
    (path / "chat_template.jinja").write_text(template)
    return path

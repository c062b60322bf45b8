"""How outputs are to be read, from a model's files: end tokens, the opened or shut thought, what no output holds."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests import models, thinker
from tests.unit.make import completion
from tokenmill.client import Client
from tokenmill.core import judge
from tokenmill.core.agree import Agreement
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import NULL, Completion, Parts
from tokenmill.engines.base import ServerInfo
from tokenmill.render import ChatRenderer, TokenizerRenderer
from tokenmill.tokens.spelling import agreement

MESSAGES = msgspec.Raw(b'[{"role":"user","content":"what is it"}]')
THOUGHT, ANSWER = "one two three", "it is four"
OPENS = "{{- '<|im_start|>assistant\\n<think>\\n' -}}"

QWEN3_6 = thinker.PLAIN
QWEN3 = thinker.PLAIN.replace(OPENS, "{{- '<|im_start|>assistant\\n' -}}")
OFF = thinker.PLAIN.replace(OPENS, "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}")


def read(renderer: TokenizerRenderer | ChatRenderer, sample: msgspec.Raw) -> Reading:
    async def ask() -> Reading:
        client = Client("http://127.0.0.1:1")
        try:
            await renderer.render(MESSAGES, NULL, client)
            await renderer.prove(MESSAGES, sample, client, ServerInfo())
            return await renderer.reading(client, ServerInfo(), sample)
        finally:
            await client.close()

    return asyncio.run(ask())


def model(path: Path, template: str) -> Path:
    return thinker.folder(path, [THOUGHT, ANSWER, "what is it"], template)


def prompt_ids(folder: Path) -> msgspec.Raw:
    """As a server gives them back."""
    rendered = asyncio.run(TokenizerRenderer(folder, True).render(MESSAGES, NULL, Client("http://127.0.0.1:1")))
    return rendered.ids


TEMPLATES = [("qwen3.6", QWEN3_6, True, False), ("qwen3", QWEN3, False, False), ("off", OFF, False, True)]


@pytest.mark.parametrize(("name", "template", "opened", "shut"), TEMPLATES, ids=[row[0] for row in TEMPLATES])
def test_the_prompt_says_who_opens_the_thought(
    tmp_path: Path, name: str, template: str, opened: bool, shut: bool
) -> None:
    folder = model(tmp_path, template)
    thinking = name != "off"
    by_text = read(TokenizerRenderer(folder, thinking), NULL)
    by_ids = read(ChatRenderer(folder, thinking), prompt_ids(folder))
    assert by_text == by_ids
    assert (by_text.opened, by_text.shut) == (opened, shut)
    assert by_text.end_ids == {str(thinker.SPECIAL.index("<|im_end|>")).encode()}
    assert by_text.close_id == str(thinker.SPECIAL.index("</think>")).encode()


@pytest.mark.parametrize(
    ("template", "text"),
    [(QWEN3_6, f"{THOUGHT}\n</think>\n\n{ANSWER}"), (QWEN3, f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")],
    ids=["qwen3.6", "qwen3"],
)
def test_a_thought_is_found_whoever_opened_it(tmp_path: Path, template: str, text: str) -> None:
    reading = read(TokenizerRenderer(model(tmp_path, template), True), NULL)
    measured = judge.measure(completion(text, tokens=40), reading, Rules(min_reasoning_tokens=3))
    a, b, c, d = measured.parts
    assert (text[a:b], text[c:d], measured.labels) == (THOUGHT, ANSWER, ())
    cut = judge.measure(completion(text[:12], "length", tokens=40), reading, Rules(min_reasoning_tokens=3))
    assert cut.labels == ("truncated_in_thinking",)


def test_a_model_that_pads_with_a_token_of_its_own_never_writes_it(tmp_path: Path) -> None:
    folder = model(tmp_path, QWEN3)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
    }
    models.write(folder / "tokenizer_config.json", **config, pad_token="[UNK]", mask_token="<|im_start|>")
    (folder / "generation_config.json").unlink()
    readings = [read(TokenizerRenderer(folder, True), NULL), read(ChatRenderer(folder, True), NULL)]
    assert [reading.never for reading in readings] == [(b"0", b"1")] * 2
    assert [reading.end_ids for reading in readings] == [{b"2"}] * 2, "the tokenizer's own end token is one"


def agrees(renderer: TokenizerRenderer | ChatRenderer, ids: list[int], text: str) -> Agreement | None:
    async def ask() -> Agreement | None:
        client = Client("http://127.0.0.1:1")
        try:
            own = Completion(text, "stop", output_ids=msgspec.Raw(msgspec.json.encode(ids)))
            return await agreement(own, Parts(0, 0, 0, len(text)), renderer, client)
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", [TokenizerRenderer, ChatRenderer])
def test_ids_are_spelled_by_the_models_own_tokenizer(
    tmp_path: Path, kind: type[TokenizerRenderer] | type[ChatRenderer]
) -> None:
    folder = models.as_bytes(models.folder(tmp_path, {"model.safetensors": {"w": (8, 8)}}))
    renderer = kind(folder, False)
    text = "Grüße 🙂, 你好\n\n  x"
    ids = list(text.encode())
    assert agrees(renderer, ids, text) is Agreement.EXACT
    assert agrees(renderer, [*ids, 256], text) is Agreement.SPECIALS
    assert agrees(renderer, ids[:9], text.encode()[:9].decode("utf-8", "ignore")) is Agreement.CUT
    assert agrees(renderer, ids[::-1], text) is Agreement.OTHER
    assert agrees(renderer, [*ids, 257], text) is Agreement.OTHER, "outside the vocabulary"


def test_without_a_tokenizer_nothing_is_said(tmp_path: Path) -> None:
    assert agrees(ChatRenderer(None, False), [1], "a") is None
    folder = models.folder(tmp_path, {"model.safetensors": {"w": (8, 8)}})
    (folder / "tokenizer.json").write_text("{}")
    assert agrees(ChatRenderer(folder, False), [1], "a") is None

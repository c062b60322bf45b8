"""What lies behind a label: each sentence where the outputs or the model's files show it, and not elsewhere."""

import pytest

from tests.exports import raw
from tests.unit.make import completion
from tokenmill.core import causes
from tokenmill.core.causes import Scene
from tokenmill.core.records import Completion

QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
PLAIN = "{{ messages[-1].content }}"
CLOSED = "hi<think>\n\n</think>\n\n"
SHUT = completion("<think>\n\n</think>\n\nYes.", tokens=9)
BARE = completion("Yes, that is so.", tokens=5)
HIDDEN = completion("Yes, that is so.", tokens=900)
ENDS = completion("<think>\nWell.\n</think>", tokens=9, output_ids=raw(1, 2))
SPLIT = completion("<think>\nWell. Yes.\n</think>\n\n", tokens=9)
CUT, SHORT = (completion("x", "length", tokens=count) for count in (77, 50))


@pytest.mark.parametrize(
    ("label", "scene", "outputs", "words"),
    [
        ("empty_reasoning", Scene(9, template=QWEN), [SHUT] * 3, "is ignored on its way"),
        ("empty_reasoning", Scene(9), [SHUT, SHUT, BARE], "is ignored on its way"),
        ("empty_reasoning", Scene(9, template=QWEN, prompt=CLOSED), [BARE], "prompt closes it at once"),
        ("empty_reasoning", Scene(9, template=PLAIN), [BARE], "the chat template lacks the tag"),
        ("empty_reasoning", Scene(9, template=PLAIN, has_tag=True), [BARE], "the chat template lacks the tag"),
        ("empty_reasoning", Scene(9, template=PLAIN, has_tag=False), [BARE], "this is no reasoning model"),
        ("empty_reasoning", Scene(9), [HIDDEN], "counts 900 tokens where it sends 16 characters"),
        ("empty_reasoning", Scene(9, parser=True), [HIDDEN], "leave engine.args reasoning-parser out"),
        ("empty_reasoning", Scene(9), [BARE], "ignores enable_thinking, or the model does not reason"),
        ("empty_reasoning", Scene(9, template=QWEN, has_tag=True), [BARE, SHUT], "or the model does not reason"),
        ("empty_reasoning", Scene(9), [], "or the model does not reason"),
        ("empty_answer", Scene(9, parser=True), [SPLIT], "takes the whole output for the thought; leave engine.args"),
        ("empty_answer", Scene(9), [SPLIT], "takes the whole output for the thought"),
        ("empty_answer", Scene(9), [ENDS, ENDS, SPLIT], "the model ends behind its thought"),
        ("truncated_in_thinking", Scene(77), [], "generation.max_tokens = 77 is too small"),
        ("truncated_in_answer", Scene(77), [CUT, SHORT], "generation.max_tokens = 77 is too small"),
        ("truncated_in_thinking", Scene(77), [SHORT], "the context is too small: outputs end at 50 to 50 tokens"),
        ("foreign_mode", Scene(9, template=PLAIN), [], "has no switch (enable_thinking)"),
        ("foreign_mode", Scene(9, template=QWEN), [], "ignores enable_thinking = false"),
        ("repetition", Scene(9), [], "the model loops"),
        ("aborted", Scene(9), [], "see the servers' logs"),
        ("unheard_of", Scene(9), [], ""),
    ],
)
def test_each_cause_is_told_where_it_shows(label: str, scene: Scene, outputs: list[Completion], words: str) -> None:
    assert words in causes.likely(label, scene, outputs)
    assert bool(causes.likely(label, scene, outputs)) == bool(words)

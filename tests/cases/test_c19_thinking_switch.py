"""C19: a switch for thinking that is ignored ends the run early, with its cause; so do the other ways to no thought.

What every server does shows in the canary; what begins with the user's prompts, in the first cohort.
"""

from typing import Any

import pytest

from tests import bytewise, models
from tests.chaos.conftest import Here
from tests.conftest import write_prompts
from tests.harness import answered_prompts

QWEN = "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}"


def stopped(here: Here, **settings: Any) -> str:
    """What the gate said of a run that it stopped within its first cohort."""
    case = here.case
    write_prompts(case.folder / "prompts.jsonl", 160, start=40)
    log = case.folder / "requests.jsonl"
    args = {"slots": 4, "latency-ms": 10, "requests": str(log), **settings.pop("args", {})}
    code, said = here(engine={"args": args}, fleet={"servers": 1}, gate={"cohort": 50}, **settings)
    assert code == 5, said
    assert answered_prompts(log).total() < 50, "it went on after the first cohort's verdict was inevitable"
    return said


@pytest.mark.parametrize(
    ("thinking", "args", "words"),
    [
        (True, {"ignore-thinking": True}, "thinking is on, but 4 of 4 canary completions show no thought"),
        (False, {"text": "<think>\nWell.\n</think>\n\nYes."}, "the model thinks: its chat template has no switch"),
    ],
)
def test_a_switch_that_every_answer_ignores_ends_the_run(
    here: Here, thinking: bool, args: dict[str, Any], words: str
) -> None:
    model = bytewise.folder(here.case.folder / "model")
    said = stopped(here, args=args, model={"path": str(model)}, generation={"thinking": thinking})
    assert words in said


@pytest.mark.parametrize(
    ("template", "tag", "args", "words"),
    [
        pytest.param(QWEN, True, {"empty-reasoning": 1.0}, "is ignored on its way", id="the switch is ignored"),
        pytest.param(
            QWEN, True, {"mode": "hidden", "tokens": 4}, "its reasoning parser keeps the thought to itself", id="hidden"
        ),
        pytest.param(
            QWEN, True, {"mode": "all_in_reasoning"}, "takes the whole output for the thought", id="one field"
        ),
        pytest.param("", True, {"empty-reasoning": 1.0}, "the chat template lacks the tag", id="no tag"),
        pytest.param("", False, {"empty-reasoning": 1.0}, "this is no reasoning model", id="no reasoning model"),
        pytest.param(
            QWEN, True, {"finish": "length", "tokens": 4}, "the context is too small: outputs end at", id="the context"
        ),
    ],
)
def test_the_message_names_the_cause(here: Here, template: str, tag: bool, args: dict[str, Any], words: str) -> None:
    model = bytewise.folder(here.case.folder / "model", bytewise.PLAIN + template)
    if tag:
        decoder = {"300": {"content": "</think>"}, "256": {"content": bytewise.END, "special": True}}
        models.write(
            model / "tokenizer_config.json",
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token=bytewise.END,
            added_tokens_decoder=decoder,
        )
    said = stopped(here, args=args, model={"path": str(model)}, judge={"purpose": "sft"})
    cause = said.partition("likely cause: ")[2].partition("\n")[0]
    assert words in cause
    told = said.partition("the gate stopped the run")[2]
    assert " of 50 " in told or "of the 50 completions" in told
    assert "  labels: " in told
    assert sum(line.startswith("  p") for line in told.splitlines()) == 3, "three examples as raw text"
    assert "to go on nevertheless: tokenmill run " in told


def test_a_limit_that_is_too_small_is_named(here: Here) -> None:
    said = stopped(here, args={"finish": "length"}, generation={"max_tokens": 16}, judge={"purpose": "sft"})
    assert "likely cause: generation.max_tokens = 16 is too small for this model" in said

"""What lies behind outputs that went wrong, in words of the config. Pure: a label, outputs, what the model's files say.

Each sentence is said where the outputs or the model's own files show it; the last one of each label where nothing does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import msgspec

from tokenmill.core.judge import CLOSE, OPEN
from tokenmill.core.records import NULL

SWITCH = "enable_thinking"
"""The variable by which chat templates switch thinking on and off."""

HIDDEN = 1.5
"""Tokens for each character sent: text has a third of a token for each, so the others were kept back."""

MOST = 0.5
"""Share of the outputs that must show a thing for it to be the cause."""


class Output(Protocol):
    """A completion, as it came or as it is stored."""

    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def output_ids(self) -> msgspec.Raw: ...


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known besides the outputs. `template` is the chat template's text, `prompt` the first rendered prompt;
    `has_tag` says whether `</think>` is a token of the model. Empty and None where nobody tells."""

    max_tokens: int
    parser: bool = False
    template: str = ""
    prompt: str = ""
    has_tag: bool | None = None


def likely(label: str, scene: Scene, outputs: Sequence[Output] = ()) -> str:
    """The likely cause of a label that many outputs have; empty where none is known."""
    match label:
        case "empty_reasoning":
            return _no_thought(scene, outputs)
        case "empty_answer":
            return _no_answer(scene, outputs)
        case "truncated_in_thinking" | "truncated_in_answer":
            return _cut_off(scene, outputs)
        case "foreign_mode":
            return _thought(scene)
        case "repetition":
            return "the model loops: greedy or cold sampling does that to reasoning models; see temperature and top_p"
        case "ids_disagree":
            return (
                "token ids, text and counts of an answer do not fit each other: the server changes the text behind its "
                "ids (a parser, a stop string in generation.extra), or it mixes answers up"
            )
        case "missing_end_token":
            return "the engine stops at something else than the model's end token: a stop string in generation.extra?"
        case "request_refused":
            return "the server refuses the requests; its words are above: a field of generation.extra, or max_tokens?"
        case "aborted":
            return "requests fail or run into generation.timeout again and again; see the servers' logs"
    return ""


def _no_thought(scene: Scene, outputs: Sequence[Output]) -> str:
    shown = "thinking is on, but the outputs hold no thought"
    hidden = [output for output in outputs if output.output_tokens > HIDDEN * len(output.text) + 8]
    if outputs and len(hidden) > MOST * len(outputs):
        counted = median(output.output_tokens for output in hidden)
        sent = median(len(output.text) for output in hidden)
        return (
            f"{shown}, though the server counts {counted:.0f} tokens where it sends {sent:.0f} characters: its "
            f"reasoning parser keeps the thought to itself{_parser(scene)}"
        )
    if scene.template and SWITCH not in scene.template and OPEN not in scene.template:
        if scene.has_tag is False:
            return (
                f"{shown}: this is no reasoning model, as far as its files tell, since neither its chat template nor "
                "its tokenizer knows <think>: generation.thinking = false, or another model"
            )
        return (
            f"{shown}: the chat template lacks the tag, it holds neither <think> nor {SWITCH}; take the model's own "
            "(chat_template.jinja of its repository)"
        )
    if scene.prompt.rstrip().endswith(CLOSE):
        return f"{shown}: the rendered prompt closes it at once, so the chat template ignores {SWITCH} = true"
    empty = [output for output in outputs if _begins_shut(output.text)]
    if outputs and len(empty) > MOST * len(outputs):
        return (
            f"{shown}, they begin with an empty one as with thinking off: the switch {SWITCH} is ignored on its way, "
            "by the server or by the chat template"
        )
    return (
        f"{shown}: the chat template or the server ignores {SWITCH}, or the model does not reason "
        "(then generation.thinking = false)"
    )


def _begins_shut(text: str) -> bool:
    start = text.lstrip()
    return start.startswith(OPEN) and start.removeprefix(OPEN).lstrip().startswith(CLOSE)


def _no_answer(scene: Scene, outputs: Sequence[Output]) -> str:
    with_ids = [output for output in outputs if output.output_ids != NULL]
    if with_ids and len(with_ids) > MOST * len(outputs):  # such text comes as the tokens spell it: no parser was there
        return "the model ends behind its thought: a stop string in generation.extra, or a template that ends it there?"
    return f"the server's reasoning parser takes the whole output for the thought{_parser(scene)}"


def _parser(scene: Scene) -> str:
    return "; leave engine.args reasoning-parser out" if scene.parser else ""


def _cut_off(scene: Scene, outputs: Sequence[Output]) -> str:
    cut = [output.output_tokens for output in outputs if output.finish_reason == "length"]
    if cut and max(cut) < scene.max_tokens:
        return (
            f"the context is too small: outputs end at {min(cut):,} to {max(cut):,} tokens, before "
            f"generation.max_tokens = {scene.max_tokens}; see engine.args (context-length, max-model-len, ctx-size)"
        )
    return f"generation.max_tokens = {scene.max_tokens} is too small for this model"


def _thought(scene: Scene) -> str:
    if scene.template and SWITCH not in scene.template:
        return (
            f"thinking is off, but the model thinks: its chat template has no switch ({SWITCH}): "
            "generation.thinking = true, or another template"
        )
    return (
        f"thinking is off, but the model thinks: its chat template or the server ignores {SWITCH} = false: "
        "generation.thinking = true, or another template"
    )

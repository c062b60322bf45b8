"""A chat answer of the scripted server cut into pieces, as vLLM streams it: prompt ids first, ids in each, usage last.

Pure: what is sent when is server.py's.
"""

from collections.abc import Callable
from typing import Any

Pieces = Callable[[int, int], list[dict[str, Any]]]
"""A step and how many there are → what that step sends."""


def chunks(reply: dict[str, Any], with_usage: bool) -> tuple[Pieces, list[dict[str, Any]]]:
    """What each step of an answer sends, and what its end sends."""
    choice = reply["choices"][0]
    message, ids = choice["message"], choice.get("token_ids", [])
    fields = [name for name in ("reasoning_content", "reasoning", "content") if message.get(name)]
    text = [(name, letter) for name in fields for letter in message[name]]

    def part(step: int, steps: int) -> list[dict[str, Any]]:
        found = [_chunk({"role": "assistant", "content": ""})] if step == 0 else []
        if step == 0 and "prompt_token_ids" in reply:
            found[0]["prompt_token_ids"] = reply["prompt_token_ids"]
        letters = text[len(text) * step // steps : len(text) * (step + 1) // steps]
        some_ids = ids[len(ids) * step // steps : len(ids) * (step + 1) // steps]
        for name in fields:
            if piece := "".join(letter for field, letter in letters if field == name):
                found.append(_chunk({name: piece}, token_ids=some_ids) if some_ids else _chunk({name: piece}))
                some_ids = []
        if some_ids:
            found.append(_chunk({}, token_ids=some_ids))
        return found

    usage = [{"choices": [], "usage": reply["usage"]}] if with_usage else []
    return part, [_chunk({}, finish_reason=choice["finish_reason"]), *usage]


def _chunk(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **fields}], "usage": None}

"""SGLang's servers with nothing around them (bench/closed_loop.py), on prompt ids with the same sampling.

Both sides of "tokens/s under tokenmill ÷ peak" are read by `steady`, so that neither counts its ramp or its end.
"""

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from bench import closed_loop
from tokenmill.core.trials import Answer


@dataclass(frozen=True)
class Rate:
    """Tokens of the answers that came within `seconds`."""

    tokens: int
    seconds: float

    @property
    def per_s(self) -> float:
        return round(self.tokens / self.seconds, 1)


def steady(answers: Sequence[Answer], ramp_s: float) -> Rate:
    """From `ramp_s` after the first was asked for until the last one was: from then on slots stay empty."""
    begin, end = min(each.asked for each in answers) + ramp_s, max(each.asked for each in answers)
    assert end > begin + ramp_s, f"{len(answers)} answers in {end - begin + ramp_s:.1f} s tell no rate"
    return Rate(sum(each.tokens for each in answers if begin <= each.came < end), round(end - begin, 2))


def loop(
    ports: Sequence[int], prompts: Sequence[Sequence[int]], sampling: dict[str, object], width: int, seconds: float
) -> list[Answer]:
    """`width` in flight on each port until all prompts are asked for, or `seconds` are over."""
    bodies = [json.dumps({"input_ids": list(ids), "sampling_params": sampling}).encode() for ids in prompts]
    urls = [f"http://127.0.0.1:{port}/generate" for port in ports]

    def tokens(answer: dict[str, dict[str, int]]) -> int:
        return answer["meta_info"]["completion_tokens"]

    return closed_loop.loop(urls, bodies, tokens, width=width, seconds=seconds)


def forget(ports: Sequence[int]) -> None:
    """Empties the servers' prefix caches: what is measured next starts as what was measured before did."""
    for port in ports:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/flush_cache", data=b"", timeout=30).close()

"""What a scripted server does and says, as flags: latencies, answers, and faults that real engines can't be told."""

import argparse
import hashlib
import json
import math
import random
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

END_ID = 256
"""Token ids are the bytes of the text; this one ends an answer."""


@dataclass(frozen=True, slots=True)
class Script:
    """A share is between 0 and 1; 0 or an empty text switches a fault off; `…_after` counts generations."""

    port: int = 0
    model: str = "fake"
    nonce: str = ""
    slots: int = 16
    context: int = 32768
    latency_ms: float = 0.0
    sigma: float = 0.0
    tokens: int = 60
    seed: int = 0
    speed: float = 1.0
    half: float = 0.0  # n at once make n / (n + half) of the most it can: latency_ms is that of one alone
    # -- answers
    mode: str = "inline"  # inline | reasoning_content | reasoning | all_in_reasoning | hidden (counted, not sent)
    ignore_thinking: bool = False
    empty_reasoning: float = 0.0
    bad: float = 0.0
    bad_latency_ms: float = 0.0
    text: str = ""
    answers: str = ""  # a JSON file, prompt → answer, for the prompts that are in it
    finish: str = "stop"
    no_ids: bool = False
    end_id: int = END_ID
    ids: str = "right"  # right | another's (of another text) | uncounted (usage says one less)
    prompt_mark: str = ""  # rendered in front of every prompt
    mixed_after: int = -1  # then an answer comes with as many ids of another one
    # -- start
    start_delay_s: float = 0.0
    log: str = ""
    exit_code: int = 0
    exit_at_start: bool = False
    warm_s: float = 0.0
    child: bool = False
    # -- a server that goes bad slowly, and speculation
    bad_after: int = -1  # then every answer is one character, 2,000 times, as after NaN in the logits
    bad_once: str = ""  # a file: only the first server that makes it goes bad
    accept_length: float = 0.0  # in its log, ten decode reports an answer
    speculative_algorithm: str = ""  # only that there is one is of any effect
    speculative_draft_model_path: str = ""
    speculative_num_steps: int = 0
    speculative_num_draft_tokens: int = 0
    speculation_speed: float = 1.0  # times as fast with an algorithm than without
    # -- faults of the start. `once`: only in one life, whose fault's Unix time is written to that file; `only`: of the
    # server with this `number`; `while_there`: exits as scripted as long as that file is there
    number: int = -1
    only: int = -1
    once: str = ""
    while_there: str = ""
    log_file: str = ""  # its lines are written one after another; after line `exit_after_line` come `last_words`
    exit_after_line: int = -1
    last_words: str = ""
    silent: bool = False  # neither a word nor an answer
    zombies: bool = False  # its children are dead and never reaped, and it sleeps
    mem_fraction_static: float = 0.0
    capture_oom_above: float = 0.0
    # -- what it is like
    double_fork: bool = False  # a process of it leaves for a session of its own, and ignores SIGTERM
    ignore_sigterm: bool = False
    health_delay_s: float = 0.0
    # -- faults
    refuse: str = ""
    refuse_word: str = ""  # a prompt that holds it is refused
    too_long: int = 0
    busy: float = 0.0
    error_after: int = -1
    error_text: str = "EngineDeadError: the engine core died"
    then_close: bool = False
    hang_after: int = -1
    exit_after: int = -1
    die_on_empty: bool = False
    lose: float = 0.0
    close_idle_s: float = 75.0
    ignore_close: bool = False  # a request goes on without its connection: only an abort ends it
    requests: str = ""
    # -- slots, streams, counters (SIGUSR1 stops the engine behind the pages, SIGUSR2 lets it go on)
    quick_canary: bool = False  # tokenmill's own prompts take no time, once they have a slot
    stream: str = "yes"  # yes | ignored | refused
    no_metrics: bool = False
    metrics_freeze: bool = False  # the page says running 0 and never moves
    health_fails_after: int = -1

    def is_bad(self, prompt: str) -> bool:
        """Whether this prompt is one of the bad ones: by its hash, so that a repeated run agrees."""
        return _share(prompt, "bad") < self.bad

    def thought(self, prompt: str) -> str:
        """What it thinks before the answer; empty where the script says so."""
        if self.is_bad(prompt) or (not is_canary(prompt) and _share(prompt, "empty") < self.empty_reasoning):
            return ""
        return f"The prompt {fingerprint(prompt)} asks for something, so I think it over and look at it from all sides."

    def answer(self, prompt: str) -> str:
        """Text that says which prompt it answers, so that a test sees an answer on the wrong row."""
        if prompt in (given := _given(self.answers)):
            return given[prompt]
        if self.text and not is_canary(prompt):
            return self.text
        words = random.Random(prompt).choices(WORDS, k=max(4, self.tokens))
        return f"ANSWER {fingerprint(prompt)} {' '.join(words)}."

    def latency_s(self, prompt: str, rng: random.Random) -> float:
        """Seconds until the answer."""
        mean = self.bad_latency_ms if self.is_bad(prompt) and self.bad_latency_ms else self.latency_ms
        if mean <= 0 or (self.quick_canary and is_canary(prompt)):
            return 0.0
        if self.sigma <= 0:
            return mean / 1000 / self._pace
        return rng.lognormvariate(math.log(mean / 1000) - self.sigma**2 / 2, self.sigma) / self._pace

    @property
    def _pace(self) -> float:
        return self.speed * (self.speculation_speed if self.speculative_algorithm else 1.0)


@cache
def _given(path: str) -> dict[str, str]:
    return dict(json.loads(Path(path).read_text(encoding="utf-8"))) if path else {}


def fingerprint(prompt: str) -> str:
    """Eight hex digits that stand for a prompt."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _share(prompt: str, salt: str) -> float:
    digest = hashlib.sha256(f"{salt}\0{prompt}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_canary(prompt: str) -> bool:
    """Whether it is one of tokenmill's own prompts: faults of answers begin with the user's."""
    from tokenmill.canary import prompts

    return any(prompt.encode() in bytes(messages) for messages in prompts())


WORDS = [  # some outside ASCII, as models write
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "with",
    "be",
    "by",
    "on",
    "are",
    "this",
    "from",
    "which",
    "at",
    "or",
    "we",
    "can",
    "have",
    "not",
    "an",
    "if",
    "function",
    "value",
    "matrix",
    "gradient",
    "naïve",
    "über",
    "模型",
    "推理",
    "🙂",
    "therefore",
    "however",
    "because",
    "stone",
    "river",
    "window",
    "letter",
    "garden",
    "seven",
    "under",
]


def parse(argv: list[str]) -> Script:
    """The command line as a script; unknown flags end the process with exit code 2."""
    parser = argparse.ArgumentParser(prog="tokenmill.testing.server", allow_abbrev=False)
    for field in fields(Script):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type is bool or field.type == "bool":
            parser.add_argument(flag, action="store_true")
        else:
            kind: Any = type(field.default)
            parser.add_argument(flag, type=kind, default=field.default)
    return Script(**vars(parser.parse_args(argv)))

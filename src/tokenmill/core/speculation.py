"""What arguments ask of speculative decoding, and whether a drafter fits: names and numbers in, words out.

A drafter that does not fit is rarely an error. SGLang loads what it finds, leaves the rest as it was initialised, and
serves right answers with an accept length of 1.00, slower than without (cases C16; qwen3_5_mtp.py of 0.5.11).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_OWN_HEAD = re.compile(r"EAGLE|NEXTN|(?:\w+_)?MTP")
"""Algorithms that, without a draft model of their own, use the head in the model's checkpoint."""

_NO_DRAFT = re.compile(r"NGRAM|SUFFIX|PROMPT_LOOKUP|")

_TOLD = re.compile(
    r"accept len: (\d+\.\d+)|Mean acceptance length: (\d+\.\d+)|draft acceptance = .*mean len = +(\d+\.\d+)"
)
"""An accept length in a log: SGLang's decode reports, vLLM's every 10 s, llama.cpp's for each request."""

_HEAD = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:\.|_|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

_FAMILIES = (("EAGLE3", r"eagle-?3"), ("DFLASH", r"dflash"), ("MTP", r"mtp|nextn"), ("EAGLE", r"eagle"))
"""What a drafter's class says of itself; most specific first."""


USELESS = 1.15
"""An accept length below it: 1.00 without a drafter that fits, 1.5 and more with one (real ones: 1.29 to 3.3)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An algorithm as its flag names it, in capitals; `path` of a draft model, empty for the model's own head."""

    algorithm: str
    path: str = ""

    @property
    def own_head(self) -> bool:
        return not self.path and _OWN_HEAD.fullmatch(self.algorithm) is not None

    @property
    def needs_model(self) -> bool:
        """Whether there has to be a draft model, and none is named."""
        return not self.path and not self.own_head and _NO_DRAFT.fullmatch(self.algorithm) is None


def wanted(args: Mapping[str, Any]) -> Draft | None:
    """What SGLang's and vLLM's arguments (dashes, no leading ones) ask for; None where it is nothing."""
    config = args.get("speculative-config") or {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None  # the engine says so itself, at once
    dotted = {name.partition(".")[2]: value for name, value in args.items() if name.startswith("speculative-config.")}
    config = {**config, **dotted} if isinstance(config, dict) else dotted
    algorithm = args.get("speculative-algorithm") or args.get("speculative-algo") or config.get("method") or ""
    path = args.get("speculative-draft-model-path") or args.get("speculative-draft-model") or config.get("model") or ""
    if not algorithm and path:
        algorithm = "DRAFT_MODEL"
    return Draft(str(algorithm).upper(), str(path)) if algorithm else None


def algorithm(args: Mapping[str, Any]) -> str:
    """What any engine's arguments ask for, in a word to show; empty where they ask for no speculation."""
    if draft := wanted(args):
        return draft.algorithm
    for name in ("spec-type", "spec-draft-model", "model-draft"):  # llama.cpp's
        if args.get(name) not in (None, "", "none"):
            return str(args[name]) if name == "spec-type" else "a draft model"
    return ""


def first_words(asked: str, length: float | None) -> tuple[str, str]:
    """What a canary's accept length says of the speculation that was asked for, and the level of that: info or warn."""
    if length is None:
        return f"{asked}: no accept length is told yet", "info"
    if length < USELESS:
        return f"{asked}: accept length {length:.2f} in the canary: no draft is accepted, so speculation costs", "warn"
    return f"{asked}: accept length {length:.2f} in the canary", "info"


def longest(args: Mapping[str, Any]) -> float | None:
    """The longest accept length that the arguments allow: all drafted tokens and one more; None where unknown."""
    config = args.get("speculative-config") or {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            config = {}
    steps = (
        args.get("speculative-num-steps")
        or args.get("speculative-config.num_speculative_tokens")
        or (config.get("num_speculative_tokens") if isinstance(config, dict) else None)
        or args.get("spec-draft-n-max")
    )
    if steps is not None:
        return float(steps) + 1 if str(steps).isdigit() else None
    drafted = str(args.get("speculative-num-draft-tokens", ""))
    return float(drafted) if drafted.isdigit() else None


def told(line: str) -> float | None:
    """The accept length that a log line tells; None for the others."""
    if "acc" not in line:
        return None
    found = _TOLD.search(line)
    return float(next(group for group in found.groups() if group)) if found else None


def has_head(tensors: Iterable[str], layers: int | None) -> bool:
    """Whether a checkpoint carries a draft head: tensors that say so, or a layer behind the last one (DeepSeek)."""
    return any(
        _HEAD.search(name) or (layers and (found := _LAYER.search(name)) and int(found[1]) >= layers)
        for name in tensors
    )


def family(architecture: str) -> str:
    """The algorithm that a drafter's class was made for; empty where it does not tell."""
    return next((name for name, words in _FAMILIES if re.search(words, architecture, re.IGNORECASE)), "")


def misfits(draft: Draft, own: Mapping[str, Any], target: Mapping[str, Any], tensors: frozenset[str]) -> list[str]:
    """Why a draft model (its config, its tensors) cannot serve a target (its config); empty where nothing tells."""
    found = []
    classes = [str(name) for name in own.get("architectures") or []]
    made_for = next((kind for name in classes if (kind := family(name))), "")
    asked = "EAGLE" if draft.algorithm == "NEXTN" else draft.algorithm
    fits = {made_for, "EAGLE"} if made_for == "MTP" else {made_for}
    if made_for and asked not in fits and not (made_for == "MTP" and asked.endswith("MTP")):
        found.append(f"its class {classes[0]} was made for {made_for}, and the flags say {draft.algorithm}")
    whole, reduced = own.get("vocab_size"), own.get("draft_vocab_size")
    theirs = target.get("vocab_size")
    if whole and theirs and whole != theirs and draft.algorithm not in ("STANDALONE", "DRAFT_MODEL"):
        found.append(f"its vocabulary has {whole} tokens, the model's {theirs}")
    if reduced and whole and reduced < whole and not any(name.rpartition(".")[2] == "d2t" for name in tensors):
        found.append(
            f"it writes {reduced} of {whole} tokens and holds no map (d2t) of them: its ids would be taken for the"
            f" first {reduced} of the model's"
        )
    return found


def clash(own: Mapping[int, str], target: Mapping[int, str]) -> str:
    """The first id that means one token to the drafter and another to the model; empty where there is none."""
    for number in sorted(own.keys() & target.keys()):
        if own[number] != target[number]:
            return f"id {number} is {own[number]!r} to it and {target[number]!r} to the model"
    return ""

"""What `tune` tries: other arguments for the same server, each with its reason in its name. Pure.

The engine's own flags decide: "off" is what the config asks for without any of its speculation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from tokenmill.core import speculation

ASPECTS = ("speculation", "concurrency", "memory")
"""What can be tried, in this order: speculation changes how much runs at once, and both change what memory is left."""

_OF_SPECULATION = {
    "sglang": re.compile(r"speculative-.+"),
    "vllm": re.compile(r"speculative-config(\..+)?|speculative-(model|disable)\S*|num-speculative-tokens"),
    "llamacpp": re.compile(r"spec-.+|model-draft|md|draft(-.+)?|.+-draft"),
}

STEPS = (1, 2, 3, 5, 8)
"""Draft tokens of a step that are tried: more are seldom accepted, and each costs a pass of the drafter."""

NGRAM_STEPS = (4, 12)
"""Of n-gram speculation, whose drafts cost nothing but the check: a short and a long one."""

NGRAM_MATCH = 4
"""Tokens that must have stood so before: llama.cpp's own 12 were seen to find nothing in usual text."""

_FRACTIONS = frozenset({"mem-fraction-static", "gpu-memory-utilization"})

_WIDTHS = (0.5, 0.25)
"""Of what a server takes at once: where fewer are as fast, more only make each answer slower."""


class Setup(msgspec.Struct, frozen=True):
    """One candidate: a server's arguments, and `share` of the requests that it takes at once.

    `speculates` is empty without speculation; `as_is` is the config's own.
    """

    name: str
    aspect: str
    args: dict[str, Any]
    speculates: str = ""
    share: float = 1.0
    as_is: bool = False


def without_speculation(kind: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without any that ask for speculation."""
    of_speculation = _OF_SPECULATION.get(_dialect(kind))
    return {name: value for name, value in args.items() if not (of_speculation and of_speculation.fullmatch(name))}


def _dialect(kind: str) -> str:
    """The scripted server takes SGLang's flags."""
    return "sglang" if kind == "fake" else kind


def own(kind: str, args: Mapping[str, Any]) -> Setup:
    """The config as it is."""
    if _dialect(kind) not in _OF_SPECULATION:
        return Setup("the config as it is", "as is", dict(args), as_is=True)
    asked = speculation.algorithm(args)
    tokens = _drafted(kind, args)
    words = _named(asked, tokens) if asked and tokens else asked or "no speculation"
    return Setup(words, "as is", dict(args), asked, as_is=True)


def speculative(kind: str, args: Mapping[str, Any], *, own_head: bool) -> list[Setup]:
    """Without speculation, with other numbers of draft tokens, with n-gram speculation; the most telling first.

    `own_head`: the model's files hold a draft head, so that it needs no other.
    """
    plain = without_speculation(kind, args)
    here = own(kind, args)
    found = [Setup("no speculation", "speculation", plain)] if here.speculates else []
    make = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp}.get(_dialect(kind))
    if make is not None:
        made = [
            Setup(name, "speculation", more, name.partition(",")[0]) for name, more in make(plain, args, here, own_head)
        ]
        ngrams = [setup for setup in made if setup.speculates.lower().startswith("ngram")]
        drafts = [setup for setup in made if setup not in ngrams]
        found += [setup for pair in zip_longest(drafts, ngrams) for setup in pair if setup is not None]
    return [setup for setup in found if setup.args != here.args]


def _named(algorithm: str, tokens: int) -> str:
    return f"{algorithm}, {tokens} draft token{'' if tokens == 1 else 's'}"


def _around(tokens: int | None) -> Sequence[int]:
    """The numbers to try beside one that is known, the nearest first."""
    known = tokens or 3
    return sorted((step for step in STEPS if step != tokens), key=lambda step: (abs(step - known), step))[:3]


def _drafted(kind: str, args: Mapping[str, Any]) -> int | None:
    """Draft tokens of a step, where the arguments tell."""
    if _dialect(kind) == "llamacpp" and str(args.get("spec-type", "")).startswith("ngram"):
        told = args.get(f"spec-{args['spec-type']}-size-m") or args.get(f"spec-{args['spec-type']}-n-max")
        return int(str(told)) if str(told).isdigit() else None
    longest = speculation.longest(args)
    return int(longest) - 1 if longest else None


_Made = Iterator[tuple[str, dict[str, Any]]]


def _sglang(plain: dict[str, Any], args: Mapping[str, Any], here: Setup, own_head: bool) -> _Made:
    drafts = here.speculates and here.speculates != "NGRAM"
    base = dict(args) if drafts else {**plain, "speculative-algorithm": "EAGLE"}
    algorithm = str(base["speculative-algorithm"]) if "speculative-algorithm" in base else here.speculates
    if (drafts or own_head) and base.get("speculative-eagle-topk", 1) == 1:  # wider trees: their sizes are a choice
        for steps in _around(_drafted("sglang", args) if drafts else None):
            sizes = {"speculative-num-steps": steps, "speculative-num-draft-tokens": steps + 1}
            yield _named(algorithm, steps), {**base, "speculative-eagle-topk": 1, **sizes}
    for tokens in NGRAM_STEPS:
        ngram = {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": tokens}
        yield _named("NGRAM", tokens), {**plain, **ngram}


def _vllm(plain: dict[str, Any], args: Mapping[str, Any], here: Setup, own_head: bool) -> _Made:
    config = args.get("speculative-config")
    dotted = {name.partition(".")[2]: value for name, value in args.items() if name.startswith("speculative-config.")}
    base: dict[str, Any] | None = dict(config) if isinstance(config, dict) else dotted or None
    if (base is None and own_head) or here.speculates == "NGRAM":
        base = {"method": "mtp"} if own_head else None
    if base is not None:
        word = here.speculates if here.speculates not in ("", "NGRAM") else "MTP"
        for steps in _around(_drafted("vllm", args)):
            yield _named(word, steps), {**plain, "speculative-config": base | {_VLLM_TOKENS: steps}}
    for tokens in NGRAM_STEPS:
        ngram = {"method": "ngram", _VLLM_TOKENS: tokens, "prompt_lookup_max": NGRAM_MATCH}
        yield _named("NGRAM", tokens), {**plain, "speculative-config": ngram}


_VLLM_TOKENS = "num_speculative_tokens"


def _llamacpp(plain: dict[str, Any], args: Mapping[str, Any], here: Setup, own_head: bool) -> _Made:
    drafter = args.get("spec-draft-model") or args.get("model-draft") or args.get("md")
    kind = str(args.get("spec-type", "none"))
    if drafter or own_head or kind.startswith("draft"):
        kind = kind if kind.startswith("draft") else "draft-simple" if drafter else "draft-mtp"
        base = {**plain, **({"spec-draft-model": drafter} if drafter else {}), "spec-type": kind}
        for steps in _around(_drafted("llamacpp", args) if here.speculates.startswith("draft") else None):
            yield _named(kind, steps), {**base, "spec-draft-n-max": steps}
    for tokens in NGRAM_STEPS:
        sizes = {"spec-ngram-simple-size-n": NGRAM_MATCH, "spec-ngram-simple-size-m": tokens}
        yield _named("ngram-simple", tokens), {**plain, "spec-type": "ngram-simple", **sizes}


def wider(kind: str, best: Setup, levers: Sequence[Mapping[str, Any]]) -> list[Setup]:
    """More at once, and more memory, for the best setup so far: what the engine's own forecast names (`levers`)."""
    found = [*levers]
    parallel, context = best.args.get("parallel"), best.args.get("ctx-size")
    if _dialect(kind) == "llamacpp" and isinstance(parallel, int) and not found:
        room = {"ctx-size": context * 2} if isinstance(context, int) and not best.args.get("kv-unified") else {}
        found.append({"parallel": parallel * 2, **room})
    return [
        Setup(
            f"{best.name}; {', '.join(f'{name} {value}' for name, value in more.items())}",
            "memory" if _FRACTIONS & more.keys() else "concurrency",
            {**best.args, **more},
            best.speculates,
        )
        for more in found
    ]


def narrower(best: Setup, width: int) -> list[Setup]:
    """Fewer at once on the same server; `width` is what it takes."""
    return [
        msgspec.structs.replace(
            best, name=f"{best.name}; {round(width * share)} at once", aspect="concurrency", share=share, as_is=False
        )
        for share in _WIDTHS
        if round(width * share) >= 1 and width * share == round(width * share)
    ]

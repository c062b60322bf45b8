"""Arguments of an engine that contradict each other or the fleet. Pure; each rule says where the engine says so.

A: server_args.py of SGLang 0.5.11 · B: of 0.5.23 · V: vLLM 0.33.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Contradiction:
    """`flag` is the one to change, `ends` whether the engine ends over it, `fix` what to do."""

    flag: str
    what: str
    fix: str
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What arguments are judged against: all flags that this version knows, the model's kind, the fleet's cards."""

    known: frozenset[str] = frozenset()
    hybrid: bool = False
    gpus_per_server: int = 1
    has_gpus: bool = True


def contradictions(kind: str, args: Mapping[str, Any], setting: Setting) -> Iterator[Contradiction]:
    """What in `args` (dashes, no leading ones) cannot be meant together."""
    yield from _opposites(args)
    if kind == "sglang":
        yield from _fraction(args, "mem-fraction-static")
        yield from _sglang_speculation(args)
        yield from _sglang_hybrid(args, setting)
        yield from _cards(
            args, setting, ("tp-size", "tensor-parallel-size", "tp"), ("pp-size", "pipeline-parallel-size")
        )
        if args.get("allow-auto-truncate") is True:
            words = "a prompt that is too long is cut by the server, and its answer stored as one to the whole prompt"
            yield Contradiction("allow-auto-truncate", words, "leave it out: such prompts are recorded as too long")
    elif kind == "vllm":
        yield from _fraction(args, "gpu-memory-utilization")
        tensor, pipeline = ("tensor-parallel-size", "tp"), ("pipeline-parallel-size", "pp")
        yield from _cards(args, setting, tensor, pipeline, ("data-parallel-size", "dp"))
        batched, most = _number(args, "max-num-batched-tokens"), _number(args, "max-num-seqs")
        if batched and most and batched < most:
            words = f"max-num-batched-tokens {batched} is less than max-num-seqs {most}"
            yield Contradiction("max-num-batched-tokens", words, f"set it to {most} at least")


def _opposites(args: Mapping[str, Any]) -> Iterator[Contradiction]:
    for flag in args:
        opposite = f"no-{flag}"
        if args[flag] is True and args.get(opposite) is True:
            yield Contradiction(opposite, f"{flag} and {opposite} are both set", "leave one of them out")


def _number(args: Mapping[str, Any], *names: str) -> int | None:
    found = next((args[name] for name in names if name in args), None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _fraction(args: Mapping[str, Any], flag: str) -> Iterator[Contradiction]:
    value = args.get(flag)
    if isinstance(value, int | float) and not 0 < value <= 1:
        yield Contradiction(flag, f"{flag} is a share of the card's memory, not {value}", f"{flag} = 0.9", ends=True)


def _cards(args: Mapping[str, Any], setting: Setting, *ways: tuple[str, ...]) -> Iterator[Contradiction]:
    """Tensor × pipeline (× data) parallelism is the number of cards that a server takes."""
    if not setting.has_gpus:
        return
    taken = 1
    for names in ways:
        taken *= _number(args, *names) or 1
    flag = next((name for names in ways for name in names if name in args), ways[0][0])
    if taken > setting.gpus_per_server:
        words = f"the server would take {taken} GPUs, and fleet.gpus_per_server = {setting.gpus_per_server}"
        yield Contradiction(flag, words, f"fleet.gpus_per_server = {taken}", ends=True)
    elif taken < setting.gpus_per_server:
        words = f"each server takes {taken} of its {setting.gpus_per_server} GPUs (fleet.gpus_per_server)"
        yield Contradiction(flag, words, f"engine.args {ways[0][0]} = {setting.gpus_per_server}")


_STEPS, _TOPK, _TOKENS = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"


def _sglang_speculation(args: Mapping[str, Any]) -> Iterator[Contradiction]:
    given = [name for name in (_STEPS, _TOPK, _TOKENS) if args.get(name) is not None]
    algorithm = args.get("speculative-algorithm") or args.get("speculative-algo")
    if given and not algorithm:
        yield Contradiction(given[0], f"{given[0]} is set and no speculative-algorithm", "set both or none")
    elif given and _STEPS not in given and algorithm != "NGRAM":  # A:3518 and B:1150 assert it
        words = f"{' and '.join(given)} without {_STEPS}: SGLang takes all of them or none"
        yield Contradiction(given[0], words, f"set {_STEPS}, or leave {' and '.join(given)} out", ends=True)
    steps, topk, tokens = (_number(args, name) for name in (_STEPS, _TOPK, _TOKENS))
    if (
        algorithm != "NGRAM" and topk == 1 and steps is not None and tokens is not None and tokens != steps + 1
    ):  # A:3540
        words = f"with {_TOPK} 1 there are {_STEPS} + 1 = {steps + 1} draft tokens, not {tokens}: SGLang changes it"
        yield Contradiction(_TOKENS, words, f"{_TOKENS} = {steps + 1}")


def _sglang_hybrid(args: Mapping[str, Any], setting: Setting) -> Iterator[Contradiction]:
    """Models with linear attention keep states, and speculation needs room for them (A:2396, A:2453)."""
    flag = "mamba-scheduler-strategy"
    if not setting.hybrid or flag not in setting.known:
        return
    without_radix = args.get("disable-radix-cache") is True
    strategy = args.get(flag, "auto")
    if args.get("speculative-algorithm") and strategy in ("auto", "no_buffer") and not without_radix:
        words = f"speculation of a hybrid model does not go with the radix cache and {flag} {strategy}"
        yield Contradiction(flag, words, f"{flag} = extra_buffer", ends=True)
    if without_radix and strategy == "extra_buffer":
        words = f"{flag} extra_buffer serves the radix cache, and disable-radix-cache is set"
        yield Contradiction(flag, words, f"leave {flag} or disable-radix-cache out")


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether a model (its text config) mixes linear attention or state-space layers with others."""
    layers = config.get("layer_types") or []
    return any(kind in ("linear_attention", "mamba", "mamba2") for kind in layers) or bool(
        config.get("full_attention_interval") or config.get("mamba_d_state")
    )

"""How many requests SGLang runs at once, computed as SGLang does at its start. Values in, values out.

The rule of 0.5.11, with what 0.5.23 changed (`mamba-radix-cache-strategy`). Left out: data parallelism inside one
server, pipeline stages, memory of the vision tower.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.core.capacity import GIB, HELD, Forecast, Given, Limits, cache_bytes, tokens_of_one

SPECULATIVE_RUNNING = 48
"""--max-running-requests where speculation is on and nothing else is said (0.5.11, server_args.py:3430-3564; 0.5.23,
arg_groups/speculative_hook.py:442-1090)."""

SPECULATION = f"speculation's own default of {SPECULATIVE_RUNNING}"

SLOTS, SLOTS_OF_OVERLAP, SLOTS_OF_BUFFER = 3, 2, 1
"""States a running request takes of the pool, and what `extra_buffer` adds with the overlapped scheduler and without
(0.5.11, model_executor/model_runner_kv_cache_mixin.py:44-46 and 180-192; 0.5.23, mem_cache/kv_cache_configurator.py:227
and 3062-3088, where a lazy buffer adds one). Seen on an H200: 80 states, 16 requests."""

STATE_SHARE = 0.9
"""--mamba-full-memory-ratio: memory of states ÷ memory of the KV cache, where the pool's size is left to SGLang."""

FEWEST, MOST, OF_CONTEXT = 2048, 4096, 512
"""Bounds of its own estimate of requests, and what tokens ÷ context is multiplied with (…cache_mixin.py:699-709)."""

BY_MEMORY = ((20, 2048, 8), (35, 2048, 24), (60, 4096, 32), (90, 8192, 256), (160, 8192, 256), (1 << 20, 16384, 512))
"""GiB of a card below which → tokens of a prefill chunk, the largest captured batch (0.5.11, server_args.py:1318-1372,
for fewer than 4 cards a model). Seen on an H200: 256."""

NEWER = "mamba-radix-cache-strategy"
"""What 0.5.23 calls mamba-scheduler-strategy; its "auto" is extra_buffer, 0.5.11's is no_buffer."""


def draft_reserve(steps: int | None, topk: int | None, drafts: int | None) -> int:
    """Tokens of the context that are kept for drafts (0.5.11, managers/tokenizer_manager.py:276-285)."""
    return max((topk or 1) * (steps or 0), drafts or 0)


def limited_by(running: int | None, most: int | None, states: int | None, speculates: bool) -> str:
    """The setting that a running server is bound by, from the numbers that it tells."""
    if states and (running is None or most is None or running < most):
        return "max-mamba-cache-size"
    return SPECULATION if speculates and most == SPECULATIVE_RUNNING else "max-running-requests"


@dataclass(frozen=True, slots=True)
class _Sizes:
    """`room` are the bytes for states and cache, None where card or model are unknown; `state` and `cell` those of a
    state and of a token in the cache, 0 where unknown. `slots` are states a request, 0 for a model without any."""

    room: int | None
    state: int
    cell: int
    slots: int
    drafts: int
    most: int | None
    context: int | None


def sglang(given: Given) -> Forecast:
    """The forecast of one SGLang server."""
    sizes = _sizes(given)
    states = _states(given, sizes)
    kv = _kv_tokens(given, sizes, states)
    found = list(_limits(given, sizes, states, kv))
    running, why = min(found) if found else (None, "")
    trouble = doubt = ""
    if running == 0 and why == "max-mamba-cache-size":
        trouble = f"max-mamba-cache-size = {states} runs no request: one takes {sizes.slots} states"
    elif kv == 0 or running == 0:
        doubt = f"weights and states leave no memory for the KV cache on a card of {(given.memory or 0) / GIB:.0f} GiB"
    graph = None if given.args.get("disable-cuda-graph") else _graph(given)
    reserve = draft_reserve(given.number("speculative-num-steps"), given.number("speculative-eagle-topk"), sizes.drafts)
    return Forecast(
        limits=Limits(running, why, kv or None, graph, "the largest batch captured as a graph"),
        context=sizes.context,
        context_flag="context-length",
        reserve=reserve,
        trouble=trouble,
        doubt=doubt,
        levers=tuple(_levers(given, sizes, found)),
    )


def _sizes(given: Given) -> _Sizes:
    args, shape = given.args, given.shape
    speculates = bool(args.get("speculative-algorithm"))
    cards = given.number("tp-size", "tensor-parallel-size", "tp") or 1
    hybrid = shape.recurrent > 0 if shape else "max-mamba-cache-size" in args
    return _Sizes(
        room=_room(given, cards),
        state=shape.state_bytes(cards, str(args.get("mamba-ssm-dtype", ""))) if shape else 0,
        cell=shape.token_bytes(cards, cache_bytes(args)) if shape else 0,
        slots=_slots(given) if hybrid else 0,
        drafts=_drafts(given) if speculates else 0,
        most=given.number("max-running-requests") or (SPECULATIVE_RUNNING if speculates else None),
        context=given.number("context-length") or (shape.context if shape else None),
    )


def _room(given: Given, cards: int) -> int | None:
    """Bytes for states and KV cache: the static share of what was free, less the weights (…cache_mixin.py:55-71)."""
    if given.memory is None or given.weights is None or given.shape is None:
        return None
    share = given.real("mem-fraction-static") or _static_share(given, cards)
    return int((given.memory - HELD) * share) - given.weights // cards


def _static_share(given: Given, cards: int) -> float:
    """--mem-fraction-static where it is left to SGLang (0.5.11, server_args.py:1415-1461), in MiB as there."""
    memory = (given.memory or 0) >> 20
    chunk = given.number("chunked-prefill-size") or _by_memory(given)[0]
    reserved = 512 + max(chunk, 2048) * 1.5 + (_graph(given) or 0) * 2 + cards / 8 * 1024
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    speculation = given.args.get("speculative-algorithm")
    if speculation and speculation != "NGRAM":
        reserved += (6 if speculation == "STANDALONE" else 4) * 1024
    vision = 0.95 if given.shape and given.shape.vision else 1.0  # adjust_mem_fraction_for_vlm takes 5 % and more
    return max(0.0, (memory - reserved) / memory * vision)


def _by_memory(given: Given) -> tuple[int, int]:
    gib = (given.memory or 0) / GIB
    return next((chunk, graph) for below, chunk, graph in BY_MEMORY if gib < below)


def _graph(given: Given) -> int | None:
    named = given.number("cuda-graph-max-bs", "cuda-graph-max-bs-decode")
    return named or (_by_memory(given)[1] if given.memory else None)


def _slots(given: Given) -> int:
    args = given.args
    if args.get("disable-radix-cache"):
        return 1
    strategy = args.get(NEWER) or args.get("mamba-scheduler-strategy") or "auto"
    if strategy == "auto":
        strategy = "extra_buffer" if NEWER in args or given.at_least(0, 5, 23) else "no_buffer"
    if strategy == "no_buffer":
        return SLOTS
    return SLOTS + (SLOTS_OF_OVERLAP if _overlaps(given) and strategy == "extra_buffer" else SLOTS_OF_BUFFER)


def _overlaps(given: Given) -> bool:
    """Whether the overlapped scheduler stays on (0.5.11, server_args.py:3430-3490 and 3560-3580)."""
    args = given.args
    speculation = str(args.get("speculative-algorithm", ""))
    if args.get("disable-overlap-schedule") or (given.number("speculative-eagle-topk") or 1) > 1:
        return False
    old = not given.at_least(0, 5, 23)
    first_form = old and bool(speculation) and given.env.get("SGLANG_ENABLE_SPEC_V2", "1").lower() in ("0", "false")
    return not first_form and not (old and speculation in ("NGRAM", "DFLASH"))


def _drafts(given: Given) -> int:
    """Draft tokens a step; with one branch they are the steps and one more (0.5.11, server_args.py:3540)."""
    steps = given.number("speculative-num-steps")
    if steps and given.number("speculative-eagle-topk") == 1:
        return steps + 1
    usual = {"NGRAM": 12, "DFLASH": 16}.get(str(given.args["speculative-algorithm"]), 4)
    return given.number("speculative-num-draft-tokens") or usual


def _states(given: Given, sizes: _Sizes) -> int | None:
    """The pool's size: as asked, or what its share of the memory holds (…cache_mixin.py:73-134)."""
    if not sizes.slots:
        return None
    named = given.number("max-mamba-cache-size")
    if named is not None or sizes.room is None or not sizes.state:
        return named
    if given.args.get("disable-radix-cache") and sizes.most:
        return sizes.most
    share = given.real("mamba-full-memory-ratio") or STATE_SHARE
    share /= 1 + share
    if not given.at_least(0, 5, 23):
        return max(0, int((sizes.room - _draft_states(given, sizes, None)) * share) // sizes.state)
    # With a state of padding, and the drafts' states out of the same share (0.5.23, …configurator.py:3349-3370)
    left = int(sizes.room * share) - sizes.state * (1 + sizes.drafts)
    return max(0, int(left / (sizes.state * (1 + sizes.drafts / sizes.slots))))


def _draft_states(given: Given, sizes: _Sizes, states: int | None) -> int:
    """Bytes for the states of drafts that may yet be refused; 0.5.23 counts those that can run, and one of padding."""
    requests = sizes.most or 0
    if sizes.slots and states is not None and given.at_least(0, 5, 23):
        requests = min(requests, states // sizes.slots) + 1
    return sizes.state * requests * sizes.drafts


def _kv_tokens(given: Given, sizes: _Sizes, states: int | None) -> int | None:
    if sizes.room is None or not sizes.cell:
        return None
    left = max(0, sizes.room - _draft_states(given, sizes, states) - (states or 0) * sizes.state)
    held = left // sizes.cell
    asked = given.number("max-total-tokens")
    return min(held, asked) if asked else held


def _limits(given: Given, sizes: _Sizes, states: int | None, kv: int | None) -> Iterator[tuple[int, str]]:
    """What bounds the requests at once, each with the setting (…cache_mixin.py:697-717)."""
    if sizes.most:
        yield sizes.most, "max-running-requests" if "max-running-requests" in given.args else SPECULATION
    if states is not None:
        named = "max-mamba-cache-size" in given.args
        yield states // sizes.slots, "max-mamba-cache-size" if named else "the states that the memory holds"
    if kv and sizes.context:
        estimate = max(min(kv * OF_CONTEXT // sizes.context, MOST), FEWEST)
        yield estimate if sizes.most else min(estimate, kv // 2), "SGLang's own max-running-requests"


def _levers(given: Given, sizes: _Sizes, found: list[tuple[int, str]]) -> Iterator[Mapping[str, Any]]:
    """What may lift the bound that holds: to the next one, and to what the memory holds at full length."""
    if not found:
        return
    running, why = min(found)
    tokens = tokens_of_one(given.max_tokens, sizes.context)
    each = (sizes.slots + sizes.drafts) * sizes.state + tokens * sizes.cell
    fitting = max(0, sizes.room or 0) // each if each else 0
    others = [most for most, name in found if name != why]
    following = min(others) if others else fitting
    graph = _graph(given)
    if graph and running > graph:
        yield {"cuda-graph-max-bs-decode" if given.at_least(0, 5, 23) else "cuda-graph-max-bs": running}
    if why == "max-mamba-cache-size":
        if following > running:
            yield {why: following * sizes.slots}
        if fitting > following:
            yield {why: fitting * sizes.slots, "max-running-requests": fitting}
        if sizes.slots == SLOTS + SLOTS_OF_OVERLAP and given.at_least(0, 5, 23):
            yield {NEWER: "extra_buffer_lazy"}
    elif why in (SPECULATION, "max-running-requests") and fitting > running:
        yield {"max-running-requests": fitting}
    elif sizes.slots:
        yield {"mamba-ssm-dtype": "bfloat16"}

"""How many servers, and how many requests each really runs at once. Numbers in, numbers out.

A running server says so itself (`Limits`). Before it runs, each engine's own rule foretells it from the config's flags,
the model's config.json and the cards' memory: what the engine computes at its start, from its source. vLLM's and
llama.cpp's stand here, SGLang's in sglang_rule.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.shape import CACHE_BYTES, Shape

USUAL_PROMPT = 1024
"""Tokens that a prompt is taken to have where it is asked how many requests a cache holds."""

GIB = 1 << 30

HELD = 13 * GIB // 10
"""Bytes of a card that are gone before weights are loaded: the driver's share, the CUDA context. Seen on an H200:
139.13 of 140.4 GiB are left (SGLang's line "Load weight begin")."""

NEARLY = 0.1
"""A cache foretold within this share is foretold well: what the driver and other kernels take is not known before."""


def servers_for(gpus: int, gpus_per_server: int, asked: int) -> int:
    """The number of servers: as asked, or one per group of GPUs."""
    return asked or max(1, gpus // gpus_per_server)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a running server says of itself.

    `running` is what it runs at once and no more (`why` names the setting), `kv_tokens` what its cache holds,
    `good` what it runs well where nothing else is asked (`good_why`); None where it does not tell. `guess` is where to
    begin with a server that tells nothing.
    """

    running: int | None = None
    why: str = ""
    kv_tokens: int | None = None
    good: int | None = None
    good_why: str = ""
    guess: int | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What is known of a server before it starts.

    `args` are its flags by their long names, `env` its variables. `memory` are the bytes of one of its cards, None
    without a GPU; `weights` the bytes of the model's files; `asked` is generation.concurrency, `max_tokens` what one
    completion may have.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    memory: int | None = None
    card_name: str = ""
    weights: int | None = None
    shape: Shape | None = None
    asked: int | None = None
    max_tokens: int = 0

    def at_least(self, *version: int) -> bool:
        """Whether the installed version is known and no older."""
        found = tuple(int(part) for part in re.findall(r"\d+", self.version)[: len(version)])
        return bool(found) and found >= version

    def number(self, *names: str) -> int | None:
        """The first of these flags that is given, as a whole number."""
        found = self.real(*names)
        return None if found is None else int(found)

    def real(self, *names: str) -> float | None:
        """The first of these flags that is given, as a number."""
        for name in names:
            try:
                return float(self.args[name])
            except (KeyError, TypeError, ValueError):
                continue
        return None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a server will say of itself once it runs, as far as that can be known before.

    `context` are the tokens of prompt and output together, `context_flag` what sets them where that means one request,
    `reserve` those of them that no request may use. `trouble`
    says why it cannot start, `doubt` why it may not, by an estimate; `levers` are sets of flags that may let it run
    more, each to be judged by another forecast.
    """

    limits: Limits = field(default_factory=Limits)
    context: int | None = None
    context_flag: str = ""
    reserve: int = 0
    trouble: str = ""
    doubt: str = ""
    levers: tuple[Mapping[str, Any], ...] = ()


def tokens_of_one(max_tokens: int, context: int | None) -> int:
    """The most that one request is taken to need of a cache."""
    return min(max_tokens + USUAL_PROMPT, context or max_tokens + USUAL_PROMPT)


def in_flight(limits: Limits, asked: int | None, tokens: int) -> tuple[int, str]:
    """Requests to keep in flight at one server, and what limits them; `tokens` is the most that one may take.

    More than the engine runs at once only queue there, hide a stall, and lose more at a crash: a ceiling for what is
    asked, too. Where nothing is asked, the cache must hold all of them at full length, and a batch beyond the captured
    graphs is slower (measured on SGLang: 23,125 tok/s at 64 in flight, 12,001 at 256 with graphs up to 128).
    """
    found: list[tuple[int, str]] = []
    if limits.running:
        found.append((limits.running, limits.why))
    if asked is not None:
        found.append((asked, "generation.concurrency"))
    else:
        if limits.kv_tokens:
            found.append((max(1, limits.kv_tokens // max(1, tokens)), "KV cache tokens ÷ tokens of a request"))
        if limits.good:
            found.append((limits.good, limits.good_why))
    if not found and limits.guess:
        return limits.guess, "an assumption"
    return min(found) if found else (1, "nothing is known of the server")


def ceiling(limits: Limits) -> int | None:
    """The most that is tried where nothing is asked: what the engine runs, and runs well; None where it does not tell.
    What its cache holds at full length is none: few answers are so long, and the engine says when one has to wait."""
    return min(filter(None, (limits.running, limits.good)), default=None)


def cache_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of a value of the KV cache, by --kv-cache-dtype."""
    return 1 if str(args.get("kv-cache-dtype", "")).startswith("fp8") else CACHE_BYTES


def surprise(foretold: Limits, said: Limits) -> str:
    """Where a server says something else of itself than was foretold; empty where they agree or one does not tell."""
    words = []
    if foretold.running and said.running and foretold.running != said.running:
        words.append(f"{said.running:,} requests at once ({said.why}), not {foretold.running:,} ({foretold.why})")
    if foretold.kv_tokens and said.kv_tokens and abs(said.kv_tokens / foretold.kv_tokens - 1) > NEARLY:
        words.append(f"{said.kv_tokens:,} tokens in its cache, not {foretold.kv_tokens:,}")
    return " and ".join(words)


# -- vLLM --------------------------------------------------------------------------------------------------------------
VLLM_SHARE = 0.92
"""--gpu-memory-utilization where nothing is said (0.32, config/cache.py)."""

VLLM_CPU_BLOCK, VLLM_BLOCK = 128, 16
"""Tokens of a block of its cache, on a CPU and on a GPU."""


def vllm(given: Given) -> Forecast:
    """The forecast of one vLLM server. Left out: what activations take, so the cache is at most what is said here."""
    most = given.number("max-num-seqs")
    context = given.number("max-model-len") or (given.shape.context if given.shape else None)
    blocks, kv = _vllm_cache(given, context)
    own = _vllm_own(given)
    found = [(most, "max-num-seqs") if most else (own, "max-num-seqs, vLLM's own for this card")]
    doubt = ""
    if blocks is not None and blocks < found[0][0]:
        # It refuses to start rather than run fewer (0.32, config/compilation.py:1511-1526).
        doubt = f"max-num-seqs {found[0][0]} is more than the {blocks} states that its cache holds: it will refuse"
        found.append((blocks, "the states that the memory holds"))
    elif kv == 0:
        doubt = f"weights leave no memory for the KV cache on a card of {(given.memory or 0) / GIB:.0f} GiB"
    running, why = min(found)
    good = None if most else min(own, VLLM_USUAL)
    levers = tuple(_vllm_levers(given, running, kv, context))
    limits = Limits(running, why, kv, good, "vLLM's usual max-num-seqs")
    return Forecast(limits, context, "max-model-len", doubt=doubt, levers=levers)


VLLM_USUAL = 256
"""Its default on most GPUs; 1,024 on the largest, and no line of a usual log tells which (engine/arg_utils.py)."""


def _vllm_own(given: Given) -> int:
    """Its default for an API server (0.32, engine/arg_utils.py:2923-2983)."""
    if given.memory is None:
        return 128
    return 1024 if given.memory >= 70 * GIB and "a100" not in given.card_name.lower() else VLLM_USUAL


def _vllm_cache(given: Given, context: int | None) -> tuple[int | None, int | None]:
    """Blocks that each hold a state (None for a model without), and the tokens that it will report."""
    shape, cards = given.shape, given.number("tensor-parallel-size", "tp") or 1
    if shape is None or not context or given.weights is None:
        return None, None
    if given.memory is not None:
        share = given.real("gpu-memory-utilization") or VLLM_SHARE
        room, size = int(given.memory * share) - given.weights // cards, VLLM_BLOCK
    else:
        room, size = int(given.env.get("VLLM_CPU_KVCACHE_SPACE", "0")) * GIB, VLLM_CPU_BLOCK
        if not room:
            return None, None  # a share of the host's memory that is free then
    cell = shape.token_bytes(cards, cache_bytes(given.args))
    if not shape.recurrent:
        return None, max(0, room) // (cell * size) * size
    # Layers in groups of as many as there are attention layers; a block is a page of each layer of a group, as large as
    # a state; a request takes one of each recurrent group (0.32, v1/core/kv_cache_utils.py:1195 and 1362).
    page = shape.state_bytes(cards) // shape.recurrent
    blocks = max(0, room) // (page * shape.attention)
    groups = -(-shape.recurrent // shape.attention)
    each = groups + -(-context // max(1, page * shape.attention // cell))
    return blocks, blocks * context // each


def _vllm_levers(given: Given, running: int, kv: int | None, context: int | None) -> Iterator[Mapping[str, Any]]:
    fitting = (kv or 0) // tokens_of_one(given.max_tokens, context)
    if fitting > running:
        yield {"max-num-seqs": fitting}
    if kv is not None and given.memory is not None:
        yield {"gpu-memory-utilization": 0.95}


# -- llama.cpp ---------------------------------------------------------------------------------------------------------
LLAMACPP_FEW = 4
"""Slots that are proposed where not even the context is said: llama-server's own number. What they take of the memory
is not foretold."""


def llamacpp(given: Given) -> Forecast:
    """The forecast of one llama.cpp server: its slots share the context, unless --kv-unified."""
    said = given.number("parallel", "np") or given.asked  # tokenmill sets --parallel to what is asked for
    slots, total = said or 1, given.number("ctx-size", "c")
    unified = bool(given.args.get("kv-unified"))
    context = None if total is None else total if unified else total // slots
    levers: list[Mapping[str, Any]] = []
    if given.asked and given.asked > slots and total and context:
        levers.append({"parallel": given.asked, "ctx-size": total if unified else context * given.asked})
    elif not said:
        # Left to the user: slots share the context, so that a longer prompt than is taken for usual would not fit.
        each = tokens_of_one(given.max_tokens, None)
        many = (total or LLAMACPP_FEW * each) // each
        if many > 1:
            levers.append({"parallel": many, **({} if total else {"ctx-size": many * each})})
    return Forecast(Limits(slots, "parallel"), context, levers=tuple(levers))

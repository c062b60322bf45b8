"""vLLM: chat with `return_token_ids`, which gives the templated prompt's ids and the output's, end token included.

Seen on a real vLLM 0.32: nothing listens before it is ready; /health only proves that the API process lives (with the
engine core stopped it, /v1/models and /metrics all stay 200); kill -9 of the API process leaves the engine core and its
memory behind, so only the process group is ever ended; unknown request fields are dropped without a word.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tokenmill.core import capacity
from tokenmill.core.capacity import VLLM_USUAL, Forecast, Given, Limits
from tokenmill.core.records import NULL, Completion
from tokenmill.core.server import Failure
from tokenmill.engines import chat, vllm_log
from tokenmill.engines.base import (
    COMPILE_CACHES,
    Engine,
    Launch,
    Load,
    Probes,
    Rendered,
    Request,
    Sampling,
    ServerInfo,
    Spec,
    flags,
    lower_fraction,
    normal,
    whole,
)
from tokenmill.engines.logs import Phase, explain, meant
from tokenmill.engines.metrics import values

USUAL_UTILIZATION = 0.92
"""Its gpu-memory-utilization where it is unset (config/cache.py of 0.33)."""


class VLLM(Engine):
    kind = "vllm"
    renders = "chat"
    package = "vllm"
    flag_sources = ("vllm/engine/arg_utils.py", "vllm/entrypoints/**/cli_args.py", "vllm/entrypoints/cli/serve.py")
    own_flags: ClassVar[Mapping[str, str]] = {
        "model": "from model.path",
        "served-model-name": "from model.name",
        "host": "servers listen on loopback only",
        "port": "from fleet.port",
    }
    content_args = frozenset(
        {"quantization", "dtype", "kv-cache-dtype", "load-format", "chat-template", "hf-overrides"}
    )

    cache_variables = COMPILE_CACHES
    phase_limits = vllm_log.LIMITS

    def command(self, spec: Spec) -> Launch:
        argv = [
            *(spec.python, "-m", "vllm.entrypoints.cli.main", "serve", spec.model_path),
            # The nonce is a second name of the model: /v1/models repeats it, so a stale server is recognised.
            *("--served-model-name", spec.model_name, spec.nonce),
            *("--host", spec.host, "--port", str(spec.port)),
        ]
        env = {
            "VLLM_PORT": str(spec.internal_port),
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # its 5 s closes pooled connections under us
            "VLLM_ENGINE_READY_TIMEOUT_S": "86400",  # its 600 s end a long compile: fleet.start_timeout decides
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        return Launch((*argv, *flags(spec.args)), env)

    def probes(self, spec: Spec) -> Probes:
        return Probes("/v1/models", "/health", "/v1/models", "/metrics")

    def stranger(self, spec: Spec, identity: bytes) -> str:
        served = chat.names(chat.models(identity))
        return "" if spec.nonce in served else f"another server, serving {', '.join(sorted(served)) or 'no model'}"

    def info(self, spec: Spec, page: bytes, log: str = "") -> ServerInfo:
        cards = chat.models(page)
        context = cards[0].max_model_len if cards else None
        running = spec.args.get("max-num-seqs") or _last(r"Defaulting max_num_seqs to (\d+)", log)
        limits = Limits(
            running=int(running) if running else None,
            why="max-num-seqs",
            kv_tokens=_last(r"KV cache size: (\d[\d,]*) tokens", log),
            good=None if running else VLLM_USUAL,
            good_why="vLLM's usual max-num-seqs",
        )
        return ServerInfo(limits, context)

    def forecast(self, given: Given) -> Forecast:
        return capacity.vllm(given)

    def encode(
        self, spec: Spec, rendered: Rendered, sampling: Sampling, *, request_id: str, thinking: bool, seed: int | None
    ) -> Request:
        # "none" renders the tools and leaves the calls in the text. With the default, "auto", a server without a parser
        # refuses the request, and one with a parser takes the calls out.
        tools = {} if rendered.tools == NULL else {"tool_choice": "none"}
        return chat.encode(
            spec.model_name,
            rendered,
            sampling,
            thinking=thinking,
            seed=seed,
            request_id=request_id,
            return_token_ids=True,
            **tools,
        )

    def decode(self, body: bytes) -> Completion:
        return chat.decode(body)

    def load(self, metrics: str) -> Load:
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:generation_tokens_total",
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        )
        running, waiting, tokens, drafts, accepted = map(values(metrics, *names).get, names)
        return Load(
            running=whole(running),
            queued=whole(waiting),
            tokens=tokens,
            accept_length=1 + (accepted or 0.0) / drafts if drafts else None,
        )

    def phase(self, line: str, reached: float = 0.0) -> Phase | None:
        return vllm_log.PHASES.match(line, reached)

    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        return explain(vllm_log.TIERS, meant(tail, vllm_log.HARMLESS), exit_code, vllm_log.PHASES)

    def less_memory(self, args: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
        if any(normal(name) in ("kv-cache-memory-bytes", "kv-cache-memory") for name in args):
            return None  # with it, the share is not looked at
        return lower_fraction(args, "gpu-memory-utilization", usual=USUAL_UTILIZATION)

    def lost(self, body: str) -> bool:
        return "EngineCore encountered" in body or "EngineDeadError" in body or "EngineGenerateError" in body

    def flags(self, sources: Mapping[str, str]) -> frozenset[str]:
        frontend = {
            name.replace("_", "-")
            for path, text in sources.items()
            if path.endswith("cli_args.py")
            for name in re.findall(r"^    ([a-z][a-z0-9_]+): ", text, re.MULTILINE)
        }
        declared = super().flags(sources) | frontend
        # Every switch has a --no-…; which flags are switches stands elsewhere, so all are let pass.
        return declared | {f"no-{name}" for name in declared}


def _last(pattern: str, log: str) -> int | None:
    found = re.findall(pattern, log)
    return int(found[-1].replace(",", "")) if found else None

"""vLLM: chat with `return_token_ids`, which gives the templated prompt's ids and the output's, end token included.

Seen on a real vLLM 0.32: nothing listens before it is ready; /health only proves that the API process lives (with the
engine core stopped it, /v1/models and /metrics all stay 200); kill -9 of the API process leaves the engine core and its
memory behind, so only the process group is ever ended; unknown request fields are dropped without a word.
"""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tokenmill.core import capacity
from tokenmill.core.capacity import VLLM_USUAL, Forecast, Given, Limits
from tokenmill.core.records import Completion
from tokenmill.core.server import Failure, FailureKind
from tokenmill.engines import chat
from tokenmill.engines.base import (
    COMMON_RULES,
    COMPILE_CACHES,
    Engine,
    Launch,
    Load,
    Phase,
    PhaseTable,
    Probes,
    Rendered,
    Request,
    Rule,
    Sampling,
    ServerInfo,
    Spec,
    flags,
    match_rules,
    whole,
)
from tokenmill.engines.metrics import values

_PHASES = PhaseTable(
    (
        (r"Application startup complete|Starting vLLM server", "http", 98, 98),
        (r"init engine \(profile", "engine", 95, 95),
        (r"Graph capturing finished", "graphs", 92, 92),
        (r"Capturing CUDA graphs.*?(\d+)%", "graphs", 78, 92),
        (r"KV cache size:", "memory", 76, 76),
        (r"torch\.compile took|Dynamo bytecode transform|Warming up model for the compilation", "compile", 70, 70),
        (r"Detected MTP model|Loading drafter model", "draft weights", 58, 58),
        (r"Loading weights took|Model loading took", "weights", 56, 56),
        (r"Loading \w+ checkpoint shards:\s+(\d+)%", "weights", 12, 56),
        (r"Starting to load model", "weights", 12, 12),
        (r"Initializing a V1 LLM engine", "engine", 8, 8),
        (r"Resolved architecture", "config", 5, 5),
        (r"non-default args", "arguments", 2, 2),
    )
)

_RULES: tuple[Rule, ...] = (
    (
        r"error: unrecognized arguments|error: argument .*(invalid|expected)|error: the following arguments",
        FailureKind.CONFIG,
        "vLLM does not know or does not accept a flag",
        "tokenmill doctor CONFIG   names the flag",
    ),
    (
        r"Free memory on device .*on startup .*is less than desired",
        FailureKind.OCCUPIED,
        "the GPU's memory is held by another process",
        "nvidia-smi   shows who holds it",
    ),
    (
        r"No available memory for the cache blocks|To serve at least one request with the model's max seq len|"
        r"exceeds available Mamba cache blocks",
        FailureKind.CONFIG,
        "no memory is left for the KV cache",
        "raise engine.args gpu-memory-utilization, or lower max-model-len or max-num-seqs",
    ),
    (
        r"Failed to load model - not enough GPU memory|torch\.OutOfMemoryError|CUDA out of memory",
        FailureKind.MEMORY,
        "out of GPU memory",
        "lower engine.args gpu-memory-utilization or max-num-seqs",
    ),
    (
        r"weights were not initialized from checkpoint|SafetensorError|Cannot find any model weights|"
        r"does not appear to have a file named (?!generation_config)",
        FailureKind.CONFIG,
        "the model folder is not complete",
        "tokenmill doctor CONFIG   names the missing files",
    ),
    (
        r"no kernel image is available",
        FailureKind.CONFIG,
        "the installed wheel has no kernels for this GPU",
        "",
    ),
    (
        r"ValidationError.*for \w+Config|pydantic_core.*ValidationError",
        FailureKind.CONFIG,
        "vLLM refuses the config",
        "",
    ),
    (r"illegal memory access|uncorrectable ECC|CUBLAS_STATUS", FailureKind.CRASH, "the GPU reported a fault", ""),
    *COMMON_RULES,
    (
        r"EngineCore encountered (?:an issue|a fatal error)|EngineDeadError|Engine core initialization failed|"
        r"Worker.* died unexpectedly",
        FailureKind.CRASH,
        "its engine core died",
        "",
    ),
)


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
        return chat.encode(
            spec.model_name,
            rendered,
            sampling,
            thinking=thinking,
            seed=seed,
            request_id=request_id,
            return_token_ids=True,
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

    def phase(self, line: str) -> Phase | None:
        return _PHASES.match(line)

    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        return match_rules(_RULES, tail, exit_code)

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

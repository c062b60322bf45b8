"""SGLang, 0.5.11 to 0.5.23: our token ids to /generate, its token ids back, exactly.

Facts from its source (server_args.py, http_server.py, tokenizer_manager.py of both versions) and from real runs of
0.5.11 on an H200: /model_info answers 17 s and more before anything can be generated, and for any stale server on the
port; `--weight-version` is repeated there, which makes it the identity; a port clash shows only after the whole load,
prints a false ready line or waits for ever; every death ends in exit code -9, since the main process kills itself.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from tokenmill.core.capacity import Forecast, Given, Limits
from tokenmill.core.records import NULL, Completion
from tokenmill.core.server import Failure
from tokenmill.core.sglang_rule import draft_reserve, limited_by, sglang
from tokenmill.engines import sglang_log
from tokenmill.engines.base import (
    COMPILE_CACHES,
    Count,
    Engine,
    Launch,
    Load,
    Probes,
    Rendered,
    Request,
    Sampling,
    ServerInfo,
    Spec,
    as_ids,
    decode_json,
    flags,
    lower_fraction,
    normal,
    whole,
)
from tokenmill.engines.logs import Phase, explain, meant
from tokenmill.engines.metrics import values
from tokenmill.errors import BrokenError


class _Finish(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    reasoning_tokens: Count | None = None
    spec_accept_length: float | None = None


class _Reply(msgspec.Struct):
    text: str = ""
    output_ids: msgspec.Raw = NULL
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


class _ModelInfo(msgspec.Struct):
    weight_version: str = ""
    model_path: str = ""


class _State(msgspec.Struct):
    effective_max_running_requests_per_dp: int | None = None


class _ServerInfo(msgspec.Struct):
    version: str = ""
    context_length: int | None = None
    max_total_num_tokens: int | None = None
    max_req_input_len: int | None = None
    cuda_graph_max_bs: int | None = None
    disable_cuda_graph: bool = False
    max_mamba_cache_size: int | None = None
    max_running_requests: int | None = None
    speculative_algorithm: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    internal_states: list[_State] = []


class _ChatChoice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = NULL


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _ChatReply(msgspec.Struct):
    choices: list[_ChatChoice] = []
    usage: _Usage = msgspec.field(default_factory=_Usage)


_reply = msgspec.json.Decoder(_Reply)
_chat_reply = msgspec.json.Decoder(_ChatReply)
_model_info = msgspec.json.Decoder(_ModelInfo)
_server_info = msgspec.json.Decoder(_ServerInfo)

_RENAMED = {
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "disable-cuda-graph": "cuda-graph-backend-decode=disabled",
}
"""0.5.11's names → 0.5.23's (arg_groups/fields/exec_.py, server_args.py)."""


class SGLang(Engine):
    kind = "sglang"
    renders = "ids"
    package = "sglang"
    flag_sources = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py")
    own_flags: ClassVar[Mapping[str, str]] = {
        "model-path": "from model.path",
        "model": "from model.path",
        "served-model-name": "from model.name",
        "host": "servers listen on loopback only",
        "port": "from fleet.port",
        "nccl-port": "from fleet.port",
        "weight-version": "it is the server's identity",
    }
    content_args = frozenset(
        {
            *("quantization", "dtype", "kv-cache-dtype", "load-format", "lora-paths", "chat-template"),
            *("json-model-override-args", "mamba-ssm-dtype"),
        }
    )

    cache_variables = COMPILE_CACHES
    phase_limits = sglang_log.LIMITS

    def command(self, spec: Spec) -> Launch:
        argv = [
            *(spec.python, "-m", "sglang.launch_server"),
            *("--model-path", spec.model_path, "--served-model-name", spec.model_name),
            *("--host", spec.host, "--port", str(spec.port), "--nccl-port", str(spec.internal_port)),
            *("--weight-version", spec.nonce, "--enable-metrics"),
            "--sleep-on-idle",  # an idle scheduler takes a whole core else, and then a hung one looks busy
        ]
        env = {
            "SGLANG_TIMEOUT_KEEP_ALIVE": "120",  # its 5 s closes pooled connections under us
            "SGLANG_FORCE_SHUTDOWN": "1",  # SIGTERM must not wait for requests without a deadline
        }
        return Launch((*argv, *flags(spec.args)), env)

    def probes(self, spec: Spec) -> Probes:
        return Probes("/model_info", "/health_generate", "/server_info", "/metrics")

    def stranger(self, spec: Spec, identity: bytes) -> str:
        try:
            info = _model_info.decode(identity)
        except (msgspec.DecodeError, RecursionError):
            return f"a server whose /model_info says {identity[:80]!r}"
        if info.weight_version == spec.nonce:
            return ""
        return f"another SGLang, serving {info.model_path or '?'} with weight version {info.weight_version or '?'}"

    def info(self, spec: Spec, page: bytes, log: str = "") -> ServerInfo:
        server, _ = decode_json(page, _server_info)
        state = server.internal_states[0] if server.internal_states else _State()
        speculates = bool(server.speculative_algorithm)
        running = state.effective_max_running_requests_per_dp or server.max_running_requests
        limits = Limits(
            running=running,
            why=limited_by(running, server.max_running_requests, server.max_mamba_cache_size, speculates),
            kv_tokens=server.max_total_num_tokens,
            good=None if server.disable_cuda_graph else server.cuda_graph_max_bs,
            good_why="the largest captured batch",
        )
        context = server.context_length or server.max_req_input_len
        return ServerInfo(limits, context, _reserve(server), server.version)

    def forecast(self, given: Given) -> Forecast:
        return sglang(given)

    def encode(
        self, spec: Spec, rendered: Rendered, sampling: Sampling, *, request_id: str, thinking: bool, seed: int | None
    ) -> Request:
        params: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, **sampling.fields()}
        if seed is not None:
            params["sampling_seed"] = seed
        body = {"rid": request_id, "input_ids": rendered.ids, "sampling_params": params}
        return Request("/generate", msgspec.json.encode(body))

    def decode(self, body: bytes) -> Completion:
        reply, damaged = decode_json(body, _reply)
        meta = reply.meta_info
        if meta.finish_reason is None:
            raise BrokenError(f"an answer without a finish reason: {body[:200]!r}")
        if meta.finish_reason.type == "abort":
            raise BrokenError(f"aborted by the server: {meta.finish_reason.message}", body=meta.finish_reason.message)
        return Completion(
            text=reply.text,
            finish_reason=meta.finish_reason.type,
            output_ids=as_ids(reply.output_ids),
            prompt_tokens=meta.prompt_tokens,
            output_tokens=meta.completion_tokens,
            reasoning_tokens=meta.reasoning_tokens or None,
            accept_length=meta.spec_accept_length,
            damaged=damaged,
        )

    def load(self, metrics: str) -> Load:
        found = values(
            metrics,
            "sglang:num_running_reqs",
            "sglang:num_queue_reqs",
            "sglang:generation_tokens_total",
            "sglang:num_used_tokens",
            "sglang:spec_accept_length",
        )
        tokens = found.get("sglang:generation_tokens_total")
        used = found.get("sglang:num_used_tokens", 0.0)  # moves with every decode report, finished requests or not
        return Load(
            running=whole(found.get("sglang:num_running_reqs")),
            queued=whole(found.get("sglang:num_queue_reqs")),
            tokens=None if tokens is None else tokens + used,
            accept_length=found.get("sglang:spec_accept_length") or None,
        )

    def phase(self, line: str, reached: float = 0.0) -> Phase | None:
        return sglang_log.PHASES.match(line, reached)

    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        lines = meant(tail, sglang_log.HARMLESS, sglang_log.DUMP)
        return explain(sglang_log.TIERS, lines, exit_code, sglang_log.PHASES)

    def less_memory(self, args: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
        """Unset, SGLang chooses by card, batch, drafter and vision tower: 0.78 to 0.90 on cards from 80 GB on, and only
        its log tells (server_args.py, arg_groups/memory_hook.py). A smaller cuda-graph-max-bs is no better way: batches
        beyond it are slow, and the choice gives what it saves to the KV cache again."""
        return lower_fraction(args, "mem-fraction-static", usual=None)

    def abort(self, request_id: str) -> Request | None:
        return Request("/abort_request", msgspec.json.encode({"rid": request_id}))

    def flags(self, sources: Mapping[str, str]) -> frozenset[str]:
        declared = {
            name.replace("_", "-")
            for path, text in sources.items()
            if "/fields/" in path
            for name in re.findall(r"^    ([a-z][a-z0-9_]+): A\[", text, re.MULTILINE)
        }
        known = super().flags(sources) | declared
        has_pairs = any("BooleanOptionalAction" in text for text in sources.values())
        return known | {f"no-{name}" for name in known if has_pairs}

    def successor(self, flag: str, known: frozenset[str]) -> str:
        """In either direction: a config written for the newer version meets the older one, too."""
        renamed = _RENAMED.get(normal(flag)) or {new: old for old, new in _RENAMED.items()}.get(normal(flag), "")
        return renamed if renamed.partition("=")[0] in known else ""

    def own_rendering(self, spec: Spec, rendered: Rendered, thinking: bool) -> Request | None:
        body = {
            "model": spec.model_name,
            "messages": rendered.messages,
            "max_tokens": 1,
            "chat_template_kwargs": {"enable_thinking": thinking},
            "return_token_ids": True,  # 0.5.23; 0.5.11 ignores it and still counts
            **({} if rendered.tools == NULL else {"tools": rendered.tools}),
        }
        return Request("/v1/chat/completions", msgspec.json.encode(body))

    def read_own_rendering(self, body: bytes) -> tuple[msgspec.Raw, int]:
        reply, _ = decode_json(body, _chat_reply)
        return (as_ids(reply.choices[0].prompt_token_ids) if reply.choices else NULL), reply.usage.prompt_tokens


def _reserve(server: _ServerInfo) -> int:
    if not server.speculative_algorithm:
        return 0
    return draft_reserve(
        server.speculative_num_steps, server.speculative_eagle_topk, server.speculative_num_draft_tokens
    )

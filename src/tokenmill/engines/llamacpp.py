"""llama.cpp's server: the wheel xllamacpp (llamacpp_server.py), or a system llama-server named by `engine.command`.

The server renders: /apply-template, then /tokenize, then the ids to /completion with `return_tokens`, whose tokens hold
the end token. `-c` is the total context over all slots, so context per request is n_ctx ÷ slots. While it loads, every
path answers 503; /health never touches the inference thread afterwards, /metrics does.
"""

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tokenmill.core import capacity
from tokenmill.core.capacity import Forecast, Given, Limits
from tokenmill.core.records import NULL, Completion
from tokenmill.core.server import Failure, FailureKind
from tokenmill.engines import chat
from tokenmill.engines.base import (
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
    whole,
)
from tokenmill.engines.logs import (
    CARD_LOG,
    COMMON_NOTICED,
    COMMON_ROOTS,
    COMMON_WEAK,
    DOCTOR,
    MOUNT_AWAY,
    WHO_HOLDS,
    Cause,
    Phase,
    PhaseRow,
    PhaseTable,
    Rule,
    Tiers,
    explain,
    meant,
)
from tokenmill.engines.metrics import values


class _Timings(msgspec.Struct):
    draft_n: Count | None = None
    draft_n_accepted: Count | None = None
    predicted_n: Count = 0


class _Reply(msgspec.Struct):
    content: str = ""
    tokens: msgspec.Raw = NULL
    tokens_evaluated: Count = 0
    tokens_predicted: Count = 0
    stop_type: str = ""
    truncated: bool = False
    timings: _Timings | None = None


class _Settings(msgspec.Struct):
    n_ctx: int | None = None


class _Props(msgspec.Struct):
    total_slots: int | None = None
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)
    build_info: str = ""
    chat_template: str = ""
    eos_token: str = ""


class _Template(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: msgspec.Raw


class _Spelled(msgspec.Struct):
    content: str


_reply = msgspec.json.Decoder(_Reply)
_props = msgspec.json.Decoder(_Props)
_template = msgspec.json.Decoder(_Template)
_tokens = msgspec.json.Decoder(_Tokens)
_spelled = msgspec.json.Decoder(_Spelled)

_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}

_CONTEXT = r"KV buffer size|RS buffer size|llama_kv_cache|constructing llama_context"
_TENSORS = r"load_tensors|loading model tensors"
_DOTS = r"^(\.{10,})\s*$"
"""A dot a percent, on one line, where nothing else shows the progress; the wheel prints none."""

PHASES = PhaseTable(
    (
        PhaseRow(r"listening on http", "http", 98),
        PhaseRow(r"model loaded", "loaded", 95),
        PhaseRow(r"initializing, n_slots|initializing slots", "slots", 90),
        PhaseRow(_CONTEXT, "draft memory", 86, since=82),
        PhaseRow(r"creating MTP draft context", "draft memory", 85),
        PhaseRow(_DOTS, "draft weights", 83, 85, since=82),
        PhaseRow(_TENSORS, "draft weights", 83, since=82),
        PhaseRow(r"loading draft model", "draft weights", 82),
        PhaseRow(_CONTEXT, "memory", 80),
        PhaseRow(_DOTS, "weights", 30, 79),
        PhaseRow(_TENSORS, "weights", 30),
        PhaseRow(r"loading model", "weights", 10),
    )
)

_LESS = 'engine.args: lower ctx-size or parallel, or cache-type-k and cache-type-v = "q8_0"'

_TOO_BIG = Cause(
    FailureKind.MEMORY_WEIGHTS,
    "out of memory while the weights were loaded: the card is too small for them, or not empty",
    f"{WHO_HOLDS}; free -g; else engine.args: lower n-gpu-layers, or a smaller quantization",
)
_NO_ROOM = Cause(FailureKind.MEMORY_KV, "the weights leave too little memory for this context", _LESS)

_MAPPED = Rule(r"\bSIGBUS\b|Bus error", *MOUNT_AWAY, signal=signal.SIGBUS)
"""The file stays mapped, so that a mount which goes away ends the server at its next page; it uses no /dev/shm."""

_ROOTS: tuple[Rule, ...] = (
    Rule(
        r"error: invalid argument|the argument has been removed|error while handling argument",
        FailureKind.FLAG,
        "llama.cpp does not know or does not accept a flag",
        f"{DOCTOR}   names the flag and its successor; see engine.args",
    ),
    Rule(
        r"failed to initialize the context: .*(?:bad_alloc|out of memory)|"
        r"failed to allocate (?:buffer for|compute|output buffer)|failed to reserve",
        *_NO_ROOM,
    ),
    Rule(r"unable to allocate .* buffer", *_TOO_BIG),
    Rule(
        r"no kernel image is available",
        FailureKind.GPU_UNSUPPORTED,
        "this build has no kernels for this GPU",
        "nvidia-smi --query-gpu=name,compute_cap --format=csv; build with CMAKE_CUDA_ARCHITECTURES for it",
    ),
    Rule(
        r"unknown model architecture|(?:GGUF|gguf) file version .* is extremely large|unsupported file version",
        FailureKind.MODEL,
        "this build does not know the model's architecture",
        "a newer llama.cpp, or another model.path",
    ),
    Rule(
        r"data is not within the file bounds|corrupted or incomplete|missing tensor|invalid magic|"
        r"failed to open GGUF|gguf_init_from_file|failed to load GGUF split",
        FailureKind.MODEL,
        "the GGUF file is incomplete, or none",
        f"{DOCTOR}   names the missing files; see model.path",
    ),
    Rule(
        r"ImportError: .*xllamacpp|No module named 'xllamacpp'",
        FailureKind.VERSION,
        "the engine's environment lacks xllamacpp",
        "PYTHON -m pip install '.[quickstart]' in tokenmill's checkout, PYTHON being engine.python; or engine.command",
    ),
)

_OUT_OF_MEMORY = (
    Rule(
        r"cudaMalloc failed: out of memory|CUDA error: out of memory|std::bad_alloc",
        FailureKind.MEMORY,
        "out of memory while generating",
        _LESS,
        at={
            **dict.fromkeys(("weights", "draft weights"), _TOO_BIG),
            **dict.fromkeys(("memory", "draft memory", "slots"), _NO_ROOM),
        },
    ),
)

_NOTICED = (
    Rule(
        r"failed to load draft model|failed to create MTP context|context type MTP requested",
        FailureKind.MODEL,
        "the draft model could not be loaded",
        "engine.args: see spec-type and model-draft",
    ),
    Rule(
        r"failed to load (?:draft )?model|exiting due to model loading error",
        FailureKind.MODEL,
        "the model could not be loaded",
        f"{DOCTOR}; see model.path",
    ),
    Rule(r"CUDA error:|ggml_cuda_error", FailureKind.DEVICE, "the GPU reported a fault", CARD_LOG),
    Rule(r"GGML_ASSERT", FailureKind.CRASH, "an assertion in llama.cpp failed"),
)

TIERS: Tiers = ((_MAPPED, *COMMON_ROOTS, *_ROOTS), _OUT_OF_MEMORY, COMMON_WEAK, (*_NOTICED, *COMMON_NOTICED))

_HARMLESS = re.compile(r"encountered an error while trying to fit params|send_error: task id|speculative decoding not")
"""It tries to fit the model into free memory, fails and goes on; a prompt that is too long is the request's fault."""


class LlamaCpp(Engine):
    kind = "llamacpp"
    renders = "server"
    package = "xllamacpp"
    loads = "file"
    own_flags: ClassVar[Mapping[str, str]] = {
        "model": "from model.path",
        "alias": "from model.name",
        "host": "servers listen on loopback only",
        "port": "from fleet.port",
    }
    phase_limits: ClassVar[Mapping[str, float]] = {
        "slots": 300.0,  # chat templates are parsed: 7 ms seen
        "loaded": 60.0,  # the port listens already
    }
    content_args = frozenset({"chat-template", "chat-template-file", "cache-type-k", "cache-type-v", "lora"})

    def command(self, spec: Spec) -> Launch:
        program = spec.command or (spec.python or sys.executable, str(Path(__file__).with_name("llamacpp_server.py")))
        argv = [
            *program,
            *("--model", spec.model_path, "--alias", f"{spec.model_name},{spec.nonce}"),
            *("--host", spec.host, "--port", str(spec.port), "--metrics"),
        ]
        return Launch((*argv, *flags(_with_room_for(spec))))

    def probes(self, spec: Spec) -> Probes:
        return Probes("/v1/models", "/health", "/props", "/metrics")

    def stranger(self, spec: Spec, identity: bytes) -> str:
        served = chat.names(chat.models(identity))
        names = {part for name in served for part in name.split(",")}
        return "" if spec.nonce in names else f"another server, serving {', '.join(sorted(served)) or 'no model'}"

    def info(self, spec: Spec, page: bytes, log: str = "") -> ServerInfo:
        props, _ = decode_json(page, _props)
        context = props.default_generation_settings.n_ctx
        limits = Limits(props.total_slots, "parallel")
        return ServerInfo(limits, context, 0, props.build_info, props.chat_template, props.eos_token)

    def forecast(self, given: Given) -> Forecast:
        return capacity.llamacpp(given)

    def encode(
        self, spec: Spec, rendered: Rendered, sampling: Sampling, *, request_id: str, thinking: bool, seed: int | None
    ) -> Request:
        body: dict[str, Any] = {
            "prompt": rendered.ids,
            "n_predict": sampling.max_tokens,
            "return_tokens": True,
            "response_fields": _FIELDS,
            **sampling.fields(),
        }
        if seed is not None:
            body["seed"] = seed % 2**32
        return Request("/completion", msgspec.json.encode(body))

    def decode(self, body: bytes) -> Completion:
        reply, damaged = decode_json(body, _reply)
        timings = reply.timings
        steps = timings.predicted_n - (timings.draft_n_accepted or 0) if timings and timings.draft_n else 0
        return Completion(
            text=reply.content,
            finish_reason=_FINISH.get(reply.stop_type, reply.stop_type or "none"),
            output_ids=as_ids(reply.tokens),
            prompt_tokens=reply.tokens_evaluated,
            output_tokens=reply.tokens_predicted,
            accept_length=timings.predicted_n / steps if timings and steps > 0 else None,
            damaged=damaged,
        )

    def template_request(self, messages: msgspec.Raw, tools: msgspec.Raw, thinking: bool) -> Request:
        body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": {"enable_thinking": thinking}}
        if tools != NULL:
            body["tools"] = tools
        return Request("/apply-template", msgspec.json.encode(body))

    def read_template(self, template_reply: bytes) -> str:
        reply, _ = decode_json(template_reply, _template)
        return str(reply.prompt)

    def ids_request(self, text: str, *, whole: bool = True) -> Request:
        body = {"content": text, "add_special": whole, "parse_special": True}  # as the server's own chat does it
        return Request("/tokenize", msgspec.json.encode(body))

    def read_tokens(self, tokenize_reply: bytes) -> msgspec.Raw:
        reply, _ = decode_json(tokenize_reply, _tokens)
        return as_ids(reply.tokens)

    def spelling_request(self, ids: msgspec.Raw) -> Request:
        return Request("/detokenize", msgspec.json.encode({"tokens": ids}))

    def read_spelling(self, reply: bytes) -> str:
        found, _ = decode_json(reply, _spelled)
        return str(found.content)

    def load(self, metrics: str) -> Load:
        names = (
            "llamacpp:requests_processing",
            "llamacpp:requests_deferred",
            "llamacpp:n_decode_total",
            "llamacpp:prompt_tokens_total",
        )
        found = values(metrics, *names)
        running, queued, decodes, prompts = map(found.get, names)
        return Load(
            running=whole(running),
            queued=whole(queued),
            tokens=None if decodes is None else decodes + (prompts or 0.0),
        )

    def phase(self, line: str, reached: float = 0.0) -> Phase | None:
        return PHASES.match(line, reached)

    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        return explain(TIERS, meant(tail, _HARMLESS), exit_code, PHASES)

    def successor(self, flag: str, known: frozenset[str]) -> str:
        return {"draft": "spec-draft-n-max", "draft-n": "spec-draft-n-max", "draft-max": "spec-draft-n-max"}.get(
            flag, ""
        )


_FIELDS = ["content", "tokens", "tokens_evaluated", "tokens_predicted", "stop_type", "truncated", "timings"]
"""The answer otherwise repeats the prompt and all settings: 3 KB of no use."""


def _with_room_for(spec: Spec) -> Mapping[str, Any]:
    """One slot per request that is to run at once: llama.cpp's own default is a single slot."""
    if spec.capacity and "parallel" not in spec.args and "np" not in spec.args:
        return {"parallel": spec.capacity, **spec.args}
    return spec.args

"""A scripted server (tokenmill.testing.server) as an engine: for trying a config without a model, and for tests.

`args` are the scripted server's flags, such as { latency-ms = 200, tokens = 300 }; it speaks the chat dialect.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tokenmill.core.capacity import Forecast, Given, Limits
from tokenmill.core.server import Failure, FailureKind
from tokenmill.engines import chat
from tokenmill.engines.base import (
    Launch,
    Load,
    Probes,
    Request,
    ServerInfo,
    Spec,
    flags,
    whole,
)
from tokenmill.engines.logs import COMMON_NOTICED, COMMON_ROOTS, COMMON_WEAK, Phase, Rule, Tiers, explain
from tokenmill.engines.metrics import values
from tokenmill.engines.openai import OpenAI
from tokenmill.engines.sglang import SGLang
from tokenmill.engines.sglang_log import CAPTURE_FAILED
from tokenmill.engines.vllm import VLLM

_vllm, _sglang = VLLM(), SGLang()

_TIERS: Tiers = (
    (*COMMON_ROOTS, CAPTURE_FAILED),
    (Rule(r"out of memory", FailureKind.MEMORY, "out of memory, as scripted"),),
    COMMON_WEAK,
    COMMON_NOTICED,
)

_HELP = "see engine.args; python -m tokenmill.testing.server --help   lists its flags"

_PLAYS_SGLANG = "server_args="
"""In a log that was recorded from SGLang: what such a script says is read as SGLang's words."""


class Fake(OpenAI):
    kind = "fake"
    phase_limits = VLLM.phase_limits
    own_flags: ClassVar[Mapping[str, str]] = {
        "port": "from fleet.port",
        "model": "from model.name",
        "nonce": "it is the server's identity",
    }

    def command(self, spec: Spec) -> Launch:
        argv = [
            *(spec.python or sys.executable, "-m", "tokenmill.testing.server"),
            *("--port", str(spec.port), "--model", spec.model_name, "--nonce", spec.nonce),
        ]
        return Launch((*argv, *flags(spec.args)))

    def probes(self, spec: Spec) -> Probes:
        return Probes("/v1/models", "/health", "/v1/models", "/metrics")

    def stranger(self, spec: Spec, identity: bytes) -> str:
        served = chat.names(chat.models(identity))
        return "" if spec.nonce in served else f"a server of {', '.join(sorted(served)) or 'no model'}"

    def info(self, spec: Spec, page: bytes, log: str = "") -> ServerInfo:
        card = next(iter(chat.models(page)), None)
        return ServerInfo(Limits(int(spec.args.get("slots", 16)), "slots"), card.max_model_len if card else None)

    def forecast(self, given: Given) -> Forecast:
        return Forecast(Limits(given.number("slots") or 16, "slots"))

    def load(self, metrics: str) -> Load:
        running, queued, tokens = map(values(metrics, *_GAUGES).get, _GAUGES)
        return Load(running=whole(running), queued=whole(queued), tokens=tokens)

    def phase(self, line: str, reached: float = 0.0) -> Phase | None:
        return _vllm.phase(line, reached) or _sglang.phase(line, reached)

    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        if exit_code == 2:
            return Failure(FailureKind.FLAG, "the scripted server refuses a flag", _HELP, tuple(tail[-2:]), exit_code)
        if any(_PLAYS_SGLANG in line for line in tail):
            return _sglang.diagnose(tail, exit_code)
        return explain(_TIERS, tail, exit_code)

    def less_memory(self, args: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
        """As SGLang's; a scripted server without that flag has no such fault."""
        return _sglang.less_memory(args) if "mem-fraction-static" in args else None

    def lost(self, body: str) -> bool:
        return _vllm.lost(body)

    def abort(self, request_id: str) -> Request | None:
        return None


_GAUGES = ("fake:running", "fake:queued", "fake:tokens_total")

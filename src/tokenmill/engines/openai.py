"""Any OpenAI-compatible server: launched by a command of the user's, or running already at given addresses.

Nothing is known of it but /v1/models, chat, and token counters where it is an engine that tokenmill knows; where it has
none, answers are streamed, so that tokens are seen. Its identity is the model's name there (and, where tokenmill
launched it, that the process which listens is ours). Token ids are kept where the server gives them.
"""

import re
from collections.abc import Callable, Sequence

from tokenmill.core.capacity import Forecast, Given, Limits
from tokenmill.core.records import Completion
from tokenmill.core.server import Failure
from tokenmill.core.stream import Stream, Streaming
from tokenmill.engines import chat
from tokenmill.engines.base import (
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
)
from tokenmill.engines.llamacpp import LlamaCpp
from tokenmill.engines.logs import COMMON_NOTICED, COMMON_ROOTS, COMMON_WEAK, Tiers, explain
from tokenmill.engines.sglang import SGLang
from tokenmill.engines.vllm import VLLM

ASSUMED_RUNNING = 32
"""Nothing tells what an unknown server can run at once; core/pace finds it out from here."""

_ASSUMED = Limits(guess=ASSUMED_RUNNING)

_KNOWN: tuple[Engine, ...] = (VLLM(), SGLang(), LlamaCpp())
"""Whose counters are understood, whoever stands behind an address."""

_ENGINE_DEAD = re.compile(r"EngineDeadError|EngineCore encountered|EngineGenerateError|Background loop has errored")
"""Whatever stands behind an unknown address, it is vLLM more often than not."""

TIERS: Tiers = (COMMON_ROOTS, COMMON_WEAK, COMMON_NOTICED)


class OpenAI(Engine, Streaming):
    kind = "openai"
    renders = "chat"
    loads = ""

    def command(self, spec: Spec) -> Launch:
        names = {
            "port": str(spec.port),
            "model": spec.model_path or spec.model_name,
            "name": spec.model_name,
            "index": str(spec.index),
            "host": spec.host,
        }
        argv = list(spec.command)
        for name, value in names.items():
            argv = [word.replace("{" + name + "}", value) for word in argv]
        return Launch((*argv, *flags(spec.args)))

    def probes(self, spec: Spec) -> Probes:
        return Probes("/v1/models", "/v1/models", "/v1/models", "/metrics")

    def stranger(self, spec: Spec, identity: bytes) -> str:
        served = chat.names(chat.models(identity))
        if spec.model_name in served:
            return ""
        return f"a server of {', '.join(sorted(served)) or 'no model'}, not of {spec.model_name}"

    def info(self, spec: Spec, page: bytes, log: str = "") -> ServerInfo:
        card = next((card for card in chat.models(page) if card.id == spec.model_name), None)
        return ServerInfo(_ASSUMED, card.max_model_len if card else None)

    def forecast(self, given: Given) -> Forecast:
        return Forecast(_ASSUMED)

    def encode(
        self, spec: Spec, rendered: Rendered, sampling: Sampling, *, request_id: str, thinking: bool, seed: int | None
    ) -> Request:
        return chat.encode(spec.model_name, rendered, sampling, thinking=thinking, seed=seed, return_token_ids=True)

    def decode(self, body: bytes) -> Completion:
        return chat.decode(body)

    def streamed(self, body: bytes, seen: Callable[[], None]) -> tuple[bytes, Stream]:
        return chat.streamed(body, seen)

    def load(self, metrics: str) -> Load:
        loads = (engine.load(metrics) for engine in _KNOWN if f"{engine.kind}:" in metrics)
        return next((load for load in loads if load.tokens is not None), Load())

    def lost(self, body: str) -> bool:
        return _ENGINE_DEAD.search(body) is not None

    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        return explain(TIERS, tail, exit_code)

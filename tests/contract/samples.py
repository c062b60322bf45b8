"""One good page and answer of each engine. A new engine adds its own here, and the contract tests hold it to the rest.

vLLM's and llama.cpp's are recorded (tests/data). SGLang's answer is put together from the fields that 0.5.11 sends
(managers/tokenizer_manager.py); the scripted and any other OpenAI server speak vLLM's dialect.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.contract import recorded
from tokenmill import plugins
from tokenmill.engines.base import Engine, Spec

NONCE = "tm-0123456789ab"
VLLM, LLAMA, SGLANG = "vllm-0.32-cpu", "llamacpp-cpu", "sglang-0.5.11-h200"


@dataclass(frozen=True)
class Sample:
    """`identity` is the right server's page for a nonce, `wrong` another server's, which goes by the name `other`;
    `text`, `finish`, `ids`, `prompt_tokens` and `output_tokens` are what `reply` holds; `max_tokens` is the place of
    that field in a request, `sampling` the place of the sampling fields."""

    identity: Callable[[str], bytes]
    wrong: bytes
    other: str
    info: bytes
    metrics: str
    reply: bytes
    text: str
    finish: str
    ids: list[int]
    prompt_tokens: int
    output_tokens: int
    max_tokens: tuple[str, ...]
    sampling: tuple[str, ...] = ()


def models(*names: str) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "max_model_len": 2048} for name in names]}).encode()


def model_info(version: str) -> bytes:
    found = {
        "model_path": "/models/qwen",
        "is_generation": True,
        "weight_version": version,
        "has_image_understanding": False,
    }
    return json.dumps(found).encode()


def sglang_reply(finish: Mapping[str, Any], **meta: Any) -> bytes:
    """What POST /generate answers."""
    base = {
        "id": "tm-1-0",
        "finish_reason": finish,
        "prompt_tokens": 37,
        "weight_version": NONCE,
        "total_retractions": 0,
        "completion_tokens": 8,
        "cached_tokens": 0,
        "e2e_latency": 0.17,
        "spec_accept_length": 3.13,
    }
    ids = [504, 3575, 282, 4649, 314, 7042, 30, 2]
    body = {"text": "The capital of France is Paris.", "output_ids": ids, "meta_info": {**base, **meta}}
    return json.dumps(body, separators=(",", ":")).encode()


LLAMA_MODELS = recorded.reply(f"{LLAMA}/replies.json", "models")

CHAT = Sample(
    identity=lambda nonce: models("qwen", nonce),
    wrong=models("llama-3"),
    other="llama-3",
    info=models("qwen", NONCE),
    metrics=recorded.text(f"{VLLM}/eager.metrics.txt"),
    reply=recorded.reply(f"{VLLM}/replies.json", "stop_with_ids"),
    text="The capital of France is Paris.",
    finish="stop",
    ids=[504, 3575, 282, 4649, 314, 7042, 30, 2],
    prompt_tokens=43,
    output_tokens=8,
    max_tokens=("max_tokens",),
)

SAMPLES: dict[str, Sample] = {
    "sglang": Sample(
        identity=model_info,
        wrong=model_info("tm-of-another-life"),
        other="tm-of-another-life",
        info=recorded.page(f"{SGLANG}/hybrid-mtp.server_info.json"),
        metrics=recorded.text(f"{SGLANG}/hybrid-mtp.metrics.txt"),
        reply=sglang_reply({"type": "stop", "matched": 2}),
        text="The capital of France is Paris.",
        finish="stop",
        ids=[504, 3575, 282, 4649, 314, 7042, 30, 2],
        prompt_tokens=37,
        output_tokens=8,
        max_tokens=("sampling_params", "max_new_tokens"),
        sampling=("sampling_params",),
    ),
    "vllm": CHAT,
    "llamacpp": Sample(
        identity=lambda nonce: recorded.reply(f"{LLAMA}/replies.json", "models").replace(
            NONCE.encode(), nonce.encode()
        ),
        wrong=models("llama-3"),
        other="llama-3",
        info=recorded.reply(f"{LLAMA}/replies.json", "props"),
        metrics=recorded.text(f"{LLAMA}/metrics.txt"),
        reply=recorded.reply(f"{LLAMA}/replies.json", "thinking_inline"),
        text="<think>\nThe capital of France is Paris, capital of the French nation\n</think>\n\nThe answer is: Paris",
        finish="stop",
        ids=json.loads(recorded.reply(f"{LLAMA}/replies.json", "thinking_inline"))["tokens"],
        prompt_tokens=37,
        output_tokens=33,
        max_tokens=("n_predict",),
    ),
    "openai": CHAT,
    "fake": replace(CHAT, metrics="# TYPE fake:running gauge\nfake:running 3\nfake:tokens_total 40\n"),
}


def engine(kind: str) -> Engine:
    made: Engine = plugins.load("engines", kind)()
    return made


def spec(kind: str, port: int = 30000, internal_port: int = 31000, nonce: str = NONCE, **fields: Any) -> Spec:
    """One server's launch; a kind that has no program of its own is given one."""
    command = ("my-server", "--host", "{host}", "--port", "{port}", "--model", "{model}") if kind == "openai" else ()
    base: dict[str, Any] = {
        "index": 0,
        "model_path": "/models/qwen",
        "model_name": "qwen",
        "python": "/venv/bin/python",
        "command": command,
    }
    return Spec(port=port, internal_port=internal_port, nonce=nonce, **{**base, **fields})

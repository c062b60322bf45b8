"""Variables that make servers run otherwise than the config says, from the shell or from engine.env."""

import os
from collections.abc import Iterator, Mapping

from tokenmill.checks.base import Context, Finding

CARDS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")

INHERITED = {
    "PYTHONPATH": "the engine finds other packages first than those of its own environment",
    "PYTHONHOME": "the engine's interpreter looks for its own modules elsewhere",
    "LD_PRELOAD": "every server loads it first",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for: several times slower",
    "NCCL_DEBUG": "servers' logs grow by gigabytes a day",
}
"""Set in the shell, handed on to every server, and seldom meant for it."""

SLOW = {"SGLANG_ENABLE_SPEC_V2": "speculation runs without overlap", "VLLM_USE_V1": "the old engine is used"}
"""Switches that cost speed when they are off."""

OFF = frozenset({"0", "false", "False", "no", "off"})


def check_traps(context: Context, shell: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """No variable overrides what the config decides, slows servers down or leads their own requests astray."""
    own = context.config.engine.env
    several = (context.config.fleet.servers or len(context.cards) or 1) > 1
    for name in CARDS:
        if name in own:
            ends = several and name == CARDS[0] and "{index}" not in own[name]
            words = f"engine.env sets {name} = {own[name]} for every server: " + (
                "all of them would share those cards" if ends else "tokenmill sets it for each one"
            )
            yield Finding("engine", "fail" if ends else "warn", f"engine.env.{name}", words, "use fleet.gpus instead")
    for name in (*context.engine.cache_variables, "TMPDIR"):
        if several and name in own and "{index}" not in own[name]:
            words = f"engine.env sets {name} = {own[name]} for every server: servers that share it race or lock up"
            yield Finding("engine", "warn", f"engine.env.{name}", words, 'leave it out, or end it with "/{index}"')
    for name, what in INHERITED.items():
        if shell.get(name, "") not in ("", *OFF) and name not in own:
            words = f"{name} = {shell[name]} is set in this shell: {what}"
            yield Finding("engine", "warn", name, words, f"unset {name}")
    for name, what in SLOW.items():
        if {**shell, **own}.get(name) in OFF:
            yield Finding("engine", "warn", name, f"{name} is off: {what}", f"unset {name}")
    yield from _proxy({**shell, **own})


def _proxy(env: Mapping[str, str]) -> Iterator[Finding]:
    """Engines warm up by requests to themselves; through a proxy those never arrive (SGLang uses `requests`)."""
    proxy = next((name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if env.get(name)), "")
    spared = f"{env.get('no_proxy', '')},{env.get('NO_PROXY', '')}"
    if proxy and not any(word.strip() in ("127.0.0.1", "*", "127.0.0.0/8") for word in spared.split(",")):
        words = f"{proxy} is set and no_proxy does not spare 127.0.0.1: a server's requests to itself go to the proxy"
        yield Finding("engine", "warn", proxy, words, "export no_proxy=127.0.0.1,localhost")

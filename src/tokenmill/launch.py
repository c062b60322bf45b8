"""What one server is launched with: its GPUs, its ports, its identity, its environment. Decides; starts nothing."""

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.config import Config
from tokenmill.core.capacity import servers_for
from tokenmill.engines.base import Engine, Launch, Spec, normal
from tokenmill.errors import PreflightError
from tokenmill.machine import packages
from tokenmill.machine.gpus import Gpu, trouble
from tokenmill.machine.ports import Ports

SCRUBBED = re.compile(
    r"MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|ROLE_)?WORLD_SIZE|TORCHELASTIC_\w+|"
    r"SGLANG_DP_RANK|SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE|VLLM_PORT|VLLM_DP_\w+|"
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|TMPDIR|TMP|TEMP"
)
"""Variables of the shell we were started from that would make servers believe they are ranks of one job."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs: the cards it sees, as indexes in PCI order (a MIG slice by its UUID); none without a GPU."""

    index: int
    gpus: tuple[int | str, ...]
    gpu_name: str = ""

    @property
    def label(self) -> str:
        return ",".join(str(gpu) for gpu in self.gpus) or "none"


def python_of(config: Config) -> str:
    """The engine's interpreter: its own environment's, or ours."""
    return config.engine.python or sys.executable


def engine_version(config: Config, engine: Engine) -> str:
    """What is installed in the engine's environment; empty for engines that are no package, or not there."""
    if not engine.package or config.engine.command:
        return ""
    return packages.read(python_of(config), engine.package, env=config.engine.env).version


def places(config: Config, gpus: Sequence[Gpu] | None) -> list[Place]:
    """One place per server; more servers than groups of cards share them in turn."""
    fleet = config.fleet
    if config.engine.addresses:
        return [Place(index, ()) for index in range(len(config.engine.addresses))]
    if gpus is None:
        return [Place(index, ()) for index in range(fleet.servers or 1)]
    groups = [tuple(gpus[at : at + fleet.gpus_per_server]) for at in range(0, len(gpus), fleet.gpus_per_server)]
    groups = [group for group in groups if len(group) == fleet.gpus_per_server]
    if not groups:
        raise PreflightError(f"fleet.gpus_per_server = {fleet.gpus_per_server}, and {len(gpus)} GPUs may be used")
    count = servers_for(len(gpus), fleet.gpus_per_server, fleet.servers)
    return [
        Place(index, tuple(gpu.cuda_id for gpu in groups[index % len(groups)]), groups[index % len(groups)][0].name)
        for index in range(count)
    ]


def without(places: Sequence[Place], gpus: Sequence[Gpu], min_ready: int) -> tuple[list[Place], dict[str, str]]:
    """The places on cards that can be used, and what is wrong with the others' cards, by label.

    Servers keep their numbers and cards, so that those that live are adopted. Where fewer than `min_ready` places would
    be left nothing is left out: doctor has refused, or somebody knows better.
    """
    bad = {gpu.cuda_id: gpu for gpu in gpus if trouble(gpu)}
    kept = [place for place in places if bad.keys().isdisjoint(place.gpus)]
    if not bad or len(kept) < max(1, min_ready):
        return list(places), {}
    return kept, {gpu.label: trouble(gpu) for gpu in bad.values()}


def new_nonce() -> str:
    """A server's identity for one life."""
    return f"tm-{secrets.token_hex(6)}"


def spec(
    config: Config, place: Place, ports: Ports, nonce: str, *, model: Path | None, python: str, version: str
) -> Spec:
    """The engine's view of one server. `{index}` in an argument or variable becomes the server's number."""
    return Spec(
        index=place.index,
        model_path=str(model) if model else config.model.path,
        model_name=config.served_name,
        port=ports.http,
        internal_port=ports.internal,
        nonce=nonce,
        python=python,
        version=version,
        args={normal(name): _numbered(value, place.index) for name, value in config.engine.args.items()},
        command=tuple(config.engine.command),
        capacity=config.generation.concurrency if isinstance(config.generation.concurrency, int) else None,
        gpus_per_server=config.fleet.gpus_per_server,
    )


def _numbered(value: Any, index: int) -> Any:
    if isinstance(value, list):
        return [_numbered(item, index) for item in value]
    if isinstance(value, dict):
        return {name: _numbered(item, index) for name, item in value.items()}
    return value.replace("{index}", str(index)) if isinstance(value, str) else value


def environment(config: Config, place: Place, engine: Engine, launch: Launch, tmp: Path, cache: Path) -> dict[str, str]:
    """What a server's process sees: ours without rank variables, its cards, its own short TMPDIR and caches."""
    env = {name: value for name, value in os.environ.items() if not SCRUBBED.fullmatch(name)}
    env |= {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in place.gpus),
        "TMPDIR": str(tmp),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env |= {variable: str(cache / folder) for variable, folder in engine.cache_variables.items()}
    env |= launch.env
    env |= {name: str(_numbered(value, place.index)) for name, value in config.engine.env.items()}
    return env


def made_of(engine: Engine, spec: Spec, config: Config, place: Place, files: str) -> dict[str, str]:
    """What a launch consists of but for ports and identity, each part as a digest: a living server of the same parts is
    adopted. `files` is the fingerprint of the model's files; what was lowered since the config (tuning.py) is no part.
    """
    bare = engine.command(replace(spec, nonce="", port=0, internal_port=0, args={}))
    parts: dict[str, Any] = {
        "version": spec.version,
        "model": [spec.model_path, spec.model_name, files],
        "cards": place.label,
        "command": bare.argv,
        **{f"flag {name}": value for name, value in spec.args.items()},
        **{f"variable {name}": value for name, value in {**bare.env, **config.engine.env}.items()},
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for name, value in parts.items()}


def unlike(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The parts that two launches do not share, for a person; empty where they are alike."""
    return ", ".join(sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)))


def tmp_folder(run: Path, index: int) -> Path:
    """A server's own TMPDIR: short, since socket paths in it may have 107 characters in all; by where the run folder
    lies, however it is named."""
    key = hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:8]
    return Path("/tmp") / f"tm-{os.getuid()}-{key}" / str(index)

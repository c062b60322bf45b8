"""The config's keys, types and defaults: one frozen object. configfile.py reads it from TOML.

Imports nothing heavy and knows no plug-in: whether an engine's flags exist is asked later, by doctor.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from tokenmill import plugins
from tokenmill.core.gate import Limits
from tokenmill.core.judge import REJECT_FOR, Rules
from tokenmill.core.records import Label
from tokenmill.masking import MASK, mask_args, mask_env, mask_path, mask_url, mask_words

_TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def _seconds(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(ms|s|m|h|d)\s*", value)
        if not match:
            raise ValueError('must be a time such as "90s", "20m" or "2h"')
        return float(match[1]) * _TIME_UNITS[match[2]]
    return value


def _bytes(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*", value)
        if not match:
            raise ValueError('must be a size such as "128MB" or "1GiB"')
        return int(float(match[1]) * _SIZE_UNITS[match[2]])
    return value


def _time_text(seconds: float) -> str:
    return f"{seconds!r}s"


LONGEST_NAME = 255
"""Bytes of one name of a path, on every file system in use."""


def _path(value: str) -> str:
    if "\0" in value:
        raise ValueError("must be a path, and holds a NUL character")
    if any(len(part.encode()) > LONGEST_NAME for part in Path(value).parts):
        raise ValueError(f"must be a path, and has a name of more than {LONGEST_NAME} bytes")
    try:
        Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"must be a path: {error}") from error
    return value


Folder = Annotated[str, AfterValidator(_path)]
Seconds = Annotated[PositiveFloat, BeforeValidator(_seconds), PlainSerializer(_time_text)]
Bytes = Annotated[PositiveInt, BeforeValidator(_bytes)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, str_strip_whitespace=False)


class Model(Section):
    path: Folder = ""
    name: str = ""
    revision: str = ""


class Stage(Section):
    to: str = "auto"
    verify: Literal["size", "fast", "sha256"] = "fast"

    @field_validator("to")
    @classmethod
    def _folder(cls, value: str) -> str:
        if value not in ("auto", "off") and not Path(value).is_absolute():
            raise ValueError("must be auto, off or an absolute folder")
        return value


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return usable and not re.search(r"\s", text)


class Engine(Section):
    kind: str = "sglang"
    python: str = ""
    args: dict[str, Any] = {}
    env: dict[str, str] = {}
    command: list[str] = []
    addresses: list[str] = []
    api_key_env: str = ""

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in plugins.names("engines"):
            raise ValueError(f"must be one of {', '.join(plugins.names('engines'))}, not {value!r}")
        return value

    @field_validator("env")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name + text:
                raise ValueError(f"{name!r} cannot be a variable: a name without =, and no NUL character anywhere")
        return value

    @field_validator("args", "command")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if "\\x00" in repr(value):
            raise ValueError("must hold no NUL character")
        if isinstance(value, list) and value and not value[0].strip():
            raise ValueError("must begin with a program")
        return value

    @field_validator("addresses")
    @classmethod
    def _http(cls, value: list[str]) -> list[str]:
        for address in value:
            if not _is_address(address):
                raise ValueError(f'{address!r} is not an address such as "http://127.0.0.1:8000"')
        return [address.rstrip("/").removesuffix("/v1") for address in value]


class Fleet(Section):
    cluster: Literal["local", "ray"] = "local"
    address: str = "auto"
    gpus: Literal["all", "none"] | list[int | str] = "all"
    servers: NonNegativeInt = 0
    gpus_per_server: PositiveInt = 1
    port: Annotated[int, Field(ge=1024, le=65000)] = 30000
    stagger: Literal["first", "off"] | Seconds = "first"
    start_timeout: Seconds = 1200.0
    stall_timeout: Seconds = 90.0
    restarts_per_hour: NonNegativeInt = 5
    backoff: Seconds = 5.0
    give_up: Seconds = 7200.0
    wait_for_head: Seconds = 600.0
    min_ready: PositiveInt = 1
    drain: Literal["auto"] | Seconds = "auto"
    keep_servers: Literal["no", "stopped", "always"] = "no"


MOST_SHARDS = 1_000_000
"""More than anybody has prompts to share; the hash that shares them has 64 bits."""


class Prompts(Section):
    path: Folder = ""
    limit: NonNegativeInt = 0
    shard: str = "0/1"
    dedup: bool = False

    @field_validator("shard")
    @classmethod
    def _part(cls, value: str) -> str:
        match = re.fullmatch(r"(\d+)/(\d+)", value)
        if not match or not int(match[1]) < int(match[2]) <= MOST_SHARDS:
            raise ValueError(f'must be "i/n" with 0 <= i < n <= {MOST_SHARDS:,}, such as "0/4"')
        return value


class Generation(Section):
    thinking: bool = True
    max_tokens: PositiveInt = 8192
    temperature: NonNegativeFloat | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    seed: int | None = None
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    turns: Literal["last", "all"] = "last"
    concurrency: Literal["auto"] | PositiveInt = "auto"
    timeout: Literal["auto"] | Seconds = "auto"
    attempts: PositiveInt = 3
    calibrate: Literal[False] | Seconds = 30.0
    extra: dict[str, Any] = {}


class Judge(Section):
    purpose: Literal["drafter", "sft"] = "drafter"
    reject: list[Label] | None = None
    min_reasoning_tokens: NonNegativeInt = 16
    max_repetition: PositiveFloat = 8.0

    @property
    def rejecting(self) -> frozenset[str]:
        return REJECT_FOR[self.purpose] if self.reject is None else frozenset(self.reject)


class Gate(Section):
    cohort: PositiveInt = 200
    max_rejected: Share = 0.2
    max_failed: Share = 0.05
    max_truncated: Share = 0.5
    later: Literal["stop", "warn"] = "stop"


class Output(Section):
    dir: Folder = "runs"
    segment: Bytes = 128_000_000
    copy_to: Folder = ""
    copy_every: Seconds = 600.0


class Notify(Section):
    command: list[str] = []
    webhook: str = ""

    @field_validator("command")
    @classmethod
    def _words(cls, value: list[str]) -> list[str]:
        if any("\0" in word for word in value) or (value and not value[0].strip()):
            raise ValueError("must begin with a program and hold no NUL character")
        return value

    @field_validator("webhook")
    @classmethod
    def _http(cls, value: str) -> str:
        if value and not _is_address(value):
            raise ValueError('must be an address such as "https://hooks.example.com/services/…"')  # never shown: secret
        return value


class Config(Section):
    """The whole config. `configfile.load` makes its paths absolute, relative to the config file's folder."""

    name: str = "run"
    model: Model = Model()
    stage: Stage = Stage()
    engine: Engine = Engine()
    fleet: Fleet = Fleet()
    prompts: Prompts = Prompts()
    generation: Generation = Generation()
    judge: Judge = Judge()
    gate: Gate = Gate()
    output: Output = Output()
    notify: Notify = Notify()

    @field_validator("name")
    @classmethod
    def _folder_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) or len(value) > LONGEST_NAME:
            raise ValueError("must be a folder name of letters, digits, '.', '_' and '-'")
        return value

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output.dir) / self.name

    @property
    def copy_folder(self) -> Path:
        """The run's copy, where there is to be one."""
        return Path(self.output.copy_to) / self.name

    @property
    def gpus(self) -> str | list[int | str]:
        """What fleet.gpus asks for; "none" where the servers run already."""
        return "none" if self.engine.addresses else self.fleet.gpus

    @property
    def served_name(self) -> str:
        return self.model.name or Path(self.model.path).name or "fake"


def rules_of(config: Config) -> Rules:
    """[judge] as the judge takes it."""
    judge = config.judge
    return Rules(judge.rejecting, judge.min_reasoning_tokens, judge.max_repetition)


def limits_of(config: Config) -> Limits:
    """[gate] as the gate takes it."""
    gate = config.gate
    return Limits(gate.cohort, gate.max_rejected, gate.max_failed, gate.max_truncated, gate.later == "stop")


def across(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Mistakes between keys, each with its key; asked of the plain data, so that one wrong key hides no other."""
    engine, fleet = _section(data, "engine"), _section(data, "fleet")
    kind, command, addresses = engine.get("kind", "sglang"), engine.get("command"), engine.get("addresses")
    if command and kind not in ("openai", "llamacpp"):
        yield ("engine", "command"), 'goes with kind = "openai", or names llama-server for kind = "llamacpp"'
    if addresses and kind != "openai":
        yield ("engine", "addresses"), 'go with kind = "openai" only'
    if addresses and command:
        yield ("engine", "addresses"), "exclude command: tokenmill launches the servers, or they run already"
    if kind == "openai" and not addresses and not command:
        yield ("engine", "kind"), '"openai" needs command (tokenmill launches it) or addresses (it runs already)'
    if fleet.get("gpus") == []:
        yield ("fleet", "gpus"), 'names no GPU; say gpus = "none" to run without'
    servers, min_ready = fleet.get("servers"), fleet.get("min_ready", 1)
    if isinstance(servers, int) and isinstance(min_ready, int) and 0 < servers < min_ready:
        yield ("fleet", "min_ready"), f"{min_ready} is more than servers = {servers}"
    model = _section(data, "model")
    if not _section(data, "prompts").get("path"):
        yield ("prompts", "path"), "is missing: the prompt set, a .jsonl file for one"
    if kind == "openai" and not model.get("name"):
        yield ("model", "name"), "is missing: the name by which the servers know the model"
    if kind not in ("openai", "fake") and not model.get("path"):
        yield ("model", "path"), "is missing: a model folder, a .gguf file or a hub id"


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, dict) else {}


def shown(config: Config) -> dict[str, Any]:
    """The config as plain data that may be kept and shown: no None, and secrets masked."""
    data = config.model_dump(mode="json", exclude_none=True)
    engine = data["engine"]
    engine["env"] = mask_env(engine["env"])
    engine["args"] = mask_args(engine["args"])
    engine["command"] = mask_words(engine["command"])
    engine["addresses"] = [mask_url(address) for address in engine["addresses"]]
    notify = data["notify"]
    notify["command"] = [word if not number else MASK for number, word in enumerate(notify["command"])]
    notify["webhook"] = mask_path(notify["webhook"])
    return data

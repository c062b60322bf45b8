"""The config: TOML in, one frozen object out, or every mistake at once with its line and the legal values.

Imports nothing heavy and knows no plug-in: whether an engine's flags exist is asked later, by doctor.
"""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from tokenmill import plugins
from tokenmill.core.gate import Limits
from tokenmill.core.judge import REJECT_FOR, Rules
from tokenmill.core.records import Label
from tokenmill.errors import ConfigError

_TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def _seconds(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", value)
        if not match:
            raise ValueError('not a time such as "90s", "20m" or "2h"')
        return float(match[1]) * _TIME_UNITS[match[2]]
    return value


def _bytes(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*", value)
        if not match:
            raise ValueError('not a size such as "128MB" or "1GiB"')
        return int(float(match[1]) * _SIZE_UNITS[match[2]])
    return value


def _time_text(seconds: float) -> str:
    return f"{seconds:g}s"


Seconds = Annotated[PositiveFloat, BeforeValidator(_seconds), PlainSerializer(_time_text)]
Bytes = Annotated[PositiveInt, BeforeValidator(_bytes)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, str_strip_whitespace=False)


class Model(Section):
    path: str = ""
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

    @field_validator("addresses")
    @classmethod
    def _http(cls, value: list[str]) -> list[str]:
        for address in value:
            if not re.match(r"https?://[^/\s]+", address):
                raise ValueError(f'{address!r} is not an address such as "http://127.0.0.1:8000"')
        return [address.rstrip("/").removesuffix("/v1") for address in value]

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.command and self.kind not in ("openai", "llamacpp"):
            raise ValueError('command goes with kind = "openai", or names llama-server for kind = "llamacpp"')
        if self.addresses and self.kind != "openai":
            raise ValueError('addresses go with kind = "openai" only')
        if self.addresses and self.command:
            raise ValueError(
                "command and addresses exclude each other: tokenmill launches the servers, or they run already"
            )
        if self.kind == "openai" and not self.addresses and not self.command:
            raise ValueError('kind = "openai" needs command (tokenmill launches it) or addresses (it runs already)')
        return self


class Fleet(Section):
    cluster: Literal["local"] = "local"
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
    min_ready: PositiveInt = 1
    drain: Literal["auto"] | Seconds = "auto"
    keep_servers: Literal["no", "stopped", "always"] = "no"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if isinstance(self.gpus, list) and not self.gpus:
            raise ValueError('gpus = [] names no GPU; say gpus = "none" to run without')
        if self.servers and self.min_ready > self.servers:
            raise ValueError(f"min_ready = {self.min_ready} is more than servers = {self.servers}")
        return self


class Prompts(Section):
    path: str = ""
    limit: NonNegativeInt = 0
    shard: str = "0/1"
    dedup: bool = False

    @field_validator("shard")
    @classmethod
    def _part(cls, value: str) -> str:
        match = re.fullmatch(r"(\d+)/(\d+)", value)
        if not match or int(match[1]) >= int(match[2]):
            raise ValueError('must be "i/n" with 0 <= i < n, such as "0/4"')
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
    concurrency: Literal["auto"] | PositiveInt = "auto"
    timeout: Literal["auto"] | Seconds = "auto"
    attempts: PositiveInt = 3
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
    dir: str = "runs"
    segment: Bytes = 128_000_000


class Config(Section):
    """The whole config. Paths are as written; `load` makes them absolute, relative to the config file's folder."""

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

    @field_validator("name")
    @classmethod
    def _folder_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError("must be a folder name of letters, digits, '.', '_' and '-'")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        missing = [] if self.prompts.path else ["prompts.path: the prompt set, a .jsonl file for one"]
        if self.engine.kind == "openai":
            if not self.model.name:
                missing.append("model.name: the name the servers know the model by")
        elif not self.model.path and self.engine.kind != "fake":
            missing.append("model.path: a model folder, a .gguf file or a hub id")
        if missing:
            raise ValueError("missing: " + "; ".join(missing))
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output.dir) / self.name

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


def load(path: Path, settings: list[str] | None = None) -> Config:
    """Reads a config file and applies `--set a.b=value` overrides; raises ConfigError with every mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", fix="tokenmill init > run.toml   writes one to start from"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for setting in settings or []:
        _apply(data, setting)
    return _absolute(validate(data, str(path), _lines(text)), path.parent.resolve())


def validate(data: dict[str, Any], source: str, lines: dict[tuple[str, ...], int] | None = None) -> Config:
    """Checks plain data; `source` and `lines` (key path → line) name the place of each mistake."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        mistakes = _mistakes(error.errors(), source, lines or {})
    count = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    raise ConfigError(
        f"{count} in {source}:\n  " + "\n  ".join(mistakes), fix="tokenmill init   prints every key with its default"
    )


def _mistakes(errors: list[ErrorDetails], source: str, lines: dict[tuple[str, ...], int]) -> list[str]:
    """One line a mistake; the several complaints of a union about one key become one."""
    found: dict[tuple[str, ...], list[str]] = {}
    for error in errors:
        key = _key(tuple(str(part) for part in error["loc"]))
        text = _complaint(error, key)
        if text not in found.setdefault(key, []):
            found[key].append(text)
    result = []
    for key, texts in found.items():
        place = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        where = f"{source}:{place}" if place else source
        result.append(f"{where}: {'.'.join(key)}{': ' if key else ''}{', or '.join(texts)}")
    return result


def _key(loc: tuple[str, ...]) -> tuple[str, ...]:
    """The config's own key path: pydantic adds the branch of a union behind it."""
    model: type[BaseModel] | None = Config
    key: list[str] = []
    for part in loc:
        if model is None:
            break
        key.append(part)
        field = model.model_fields.get(part)
        annotation = field.annotation if field else None
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return tuple(key)


def _complaint(error: ErrorDetails, key: tuple[str, ...]) -> str:
    if error["type"] == "extra_forbidden":
        known = _known_keys(key[:-1])
        near = difflib.get_close_matches(key[-1], known, 1)
        return f"unknown key{f', did you mean {near[0]}?' if near else ''} (known here: {', '.join(known)})"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    shown = repr(error["input"]) if isinstance(error["input"], str | int | float | bool) else ""
    return f"must be {message}{f', not {shown}' if shown else ''}" if error["msg"].startswith("Input") else message


def _known_keys(section: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in section:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Key path → line number, for the plain forms of TOML that people write; good enough to point at a mistake."""
    table: tuple[str, ...] = ()
    found: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[+\s*([^\]#]+?)\s*\]", line):
            table = tuple(part.strip().strip("\"'") for part in match[1].split("."))
            found.setdefault(table, number)
        elif match := re.match(r"\s*([A-Za-z0-9_\-.\"']+)\s*=", line):
            found.setdefault((*table, *(part.strip("\"'") for part in match[1].split("."))), number)
    return found


def _apply(data: dict[str, Any], setting: str) -> None:
    name, sep, text = setting.partition("=")
    keys = name.strip().split(".")
    if not sep or not all(keys):
        raise ConfigError(f"--set {setting}: must be key=value, such as --set generation.max_tokens=4096")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word, as a shell leaves it of "word"
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {setting}: {key} is a value, not a table")
    data[keys[-1]] = value


def _absolute(config: Config, base: Path) -> Config:
    """Paths are relative to the config file; a hub id is no path."""

    def resolve(text: str) -> str:
        return str((base / Path(text).expanduser()).resolve()) if text else text

    model = config.model
    path = Path(model.path).expanduser()
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", model.path) and not (base / path).exists()
    return config.model_copy(
        update={
            "model": model if is_hub_id or not model.path else model.model_copy(update={"path": resolve(model.path)}),
            "prompts": config.prompts.model_copy(update={"path": resolve(config.prompts.path)}),
            "output": config.output.model_copy(update={"dir": resolve(config.output.dir)}),
        }
    )


_SECRET = re.compile(r"token|key|secret|passw|credential|auth", re.IGNORECASE)


def shown(config: Config) -> dict[str, Any]:
    """The config as plain data that may be kept and shown: no None, no value whose name says that it is a secret."""
    data = config.model_dump(mode="json", exclude_none=True)
    engine = data["engine"]
    engine["env"] = {k: "***" if _SECRET.search(k) else v for k, v in engine["env"].items()}
    engine["args"] = {k: "***" if _is_secret_flag(k) else v for k, v in engine["args"].items()}
    engine["addresses"] = [re.sub(r"//[^/@]*@", "//***@", address) for address in engine["addresses"]]
    return data


def _is_secret_flag(name: str) -> bool:
    return re.search(r"api[-_]?key|password|secret", name, re.IGNORECASE) is not None

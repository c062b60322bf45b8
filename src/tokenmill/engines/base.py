"""What tokenmill needs to know of an inference engine. Pure: text and bytes in, values out.

A new engine is a subclass in a file and a line in plugins.py (or an entry point); tests/contract holds it to this page.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tokenmill.core.capacity import Forecast, Given, Limits
from tokenmill.core.records import NULL, Completion
from tokenmill.core.server import Failure
from tokenmill.engines.logs import Phase
from tokenmill.errors import BrokenError


@dataclass(frozen=True, slots=True)
class Spec:
    """All that one server's launch depends on.

    `nonce` is this life's identity: the engine hands it to the server in a form that the server repeats.
    `internal_port` is the first of a block of ten that belongs to this server alone. `python` is the engine's own
    interpreter, `version` what it says is installed there, empty where unknown.
    """

    index: int
    model_path: str
    model_name: str
    port: int
    internal_port: int
    nonce: str
    python: str
    version: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    capacity: int | None = None
    gpus_per_server: int = 1
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, and the environment variables it adds to what every server gets."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probes:
    """Paths to ask by GET. `identity` tells which server answers; `health` answers 200 when it can generate;
    `info` tells its capacity; `metrics` is Prometheus text, empty where the engine has none."""

    identity: str
    health: str
    info: str
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a running server says of itself.

    `context` are the tokens of prompt and output together, `reserve` those of them that no request may use.
    `template` and `end_token` are texts, empty where it does not tell.
    """

    limits: Limits = field(default_factory=Limits)
    context: int | None = None
    reserve: int = 0
    version: str = ""
    template: str = ""
    end_token: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """From a server's metrics. `tokens` changes as long as it works: generated tokens, decode steps, tokens in use."""

    running: int | None = None
    queued: int | None = None
    tokens: float | None = None
    accept_length: float | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every request of a run asks for; None leaves a field to the server. `extra` is sent as it is."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The given fields under their usual names, `extra` last; without max_tokens."""
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
        }
        return {**{k: v for k, v in named.items() if v is not None}, **self.extra}


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Tokens of one completion; a server that counts otherwise gives an answer that cannot be read."""


PARSED = "tool_calls"
"""The finish reason of an answer from whose text the server took tool calls."""


class Rendered(msgspec.Struct, frozen=True):
    """A prompt as it is sent: token ids where tokenmill or the server rendered it, messages where the server will."""

    messages: msgspec.Raw = NULL
    tools: msgspec.Raw = NULL
    ids: msgspec.Raw = NULL
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: bytes


class Engine(ABC):
    """One inference engine. Methods are pure; an instance holds nothing but constants."""

    kind: ClassVar[str]
    renders: ClassVar[Literal["ids", "server", "chat"]]
    """ids: tokenmill renders with the model's tokenizer · server: the server renders first · chat: it renders alone."""

    package: ClassVar[str] = ""
    """The distribution that holds the engine, as pip names it."""

    flag_sources: ClassVar[tuple[str, ...]] = ()
    """Files of that distribution, as globs, that tell its flags: see `flags`."""

    loads: ClassVar[str] = "folder"
    """The model it loads: a "folder" (Hugging Face), a "file" (.gguf); empty where it is none of ours."""

    own_flags: ClassVar[Mapping[str, str]] = {}
    """Flags that tokenmill sets itself → the key of the config that decides them; not for engine.args."""

    content_args: ClassVar[frozenset[str]] = frozenset()
    """Flags that change what the model writes: a run is not continued with others."""

    cache_variables: ClassVar[Mapping[str, str]] = {}
    """Variables that name a folder for compiled kernels → that folder's name in a server's own cache."""

    phase_limits: ClassVar[Mapping[str, float]] = {}
    """A phase → the seconds that it may take at most, however busy it looks: a collective that spins burns a core for
    ever. A phase that grows with the model has none; it falls under fleet.start_timeout."""

    @abstractmethod
    def command(self, spec: Spec) -> Launch:
        """How to start one server."""

    @abstractmethod
    def probes(self, spec: Spec) -> Probes:
        """What to ask a server."""

    @abstractmethod
    def stranger(self, spec: Spec, identity: bytes) -> str:
        """Who answers, if it is not this server; empty where the identity is right."""

    @abstractmethod
    def info(self, spec: Spec, page: bytes, log: str = "") -> ServerInfo:
        """What a running server can do, from its info page, and from its log where only that tells."""

    def forecast(self, given: Given) -> Forecast:
        """What `info` will tell once a server runs, by the engine's own rule; nothing where that is not known."""
        return Forecast()

    @abstractmethod
    def encode(
        self, spec: Spec, rendered: Rendered, sampling: Sampling, *, request_id: str, thinking: bool, seed: int | None
    ) -> Request:
        """One request."""

    @abstractmethod
    def decode(self, body: bytes) -> Completion:
        """One answer; raises BrokenError where it is not what was asked for."""

    def load(self, metrics: str) -> Load:
        """What a metrics page says; nothing where the engine has none."""
        return Load()

    def phase(self, line: str, reached: float = 0.0) -> Phase | None:
        """What a start is at; None for lines that do not tell. `reached` is the percent that this life has reached: a
        draft model prints the target's lines again, and percent never falls."""
        return None

    @abstractmethod
    def diagnose(self, tail: Sequence[str], exit_code: int | None) -> Failure:
        """Why a server ended, from its last log lines."""

    def less_memory(self, args: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
        """For one more try after `MEMORY_GRAPHS`: engine.args that leave more memory free, and what was changed, such
        as "mem-fraction-static 0.90 → 0.85"; None where there is no such setting, or it is as low as makes sense."""
        return None

    def abort(self, request_id: str) -> Request | None:
        """How to end one request on the server; None where closing the connection does it."""
        return None

    def lost(self, body: str) -> bool:
        """Whether an error answer (HTTP 5xx) means that the whole server is lost, not this request."""
        return False

    def too_long(self, body: str) -> bool:
        """Whether a refusal (HTTP 4xx) says that the prompt does not fit the context."""
        return _TOO_LONG.search(body) is not None

    def flags(self, sources: Mapping[str, str]) -> frozenset[str]:
        """All flags that the installed version knows, from the texts of `flag_sources`; empty if they don't tell."""
        return frozenset(
            flag for text in sources.values() for flag in re.findall(r"[\"']--([a-z0-9][a-z0-9-]+)[\"']", text)
        )

    def successor(self, flag: str, known: frozenset[str]) -> str:
        """What to use instead of a flag that this version does not know; empty where there is nothing."""
        return ""

    def template_request(self, messages: msgspec.Raw, tools: msgspec.Raw, thinking: bool) -> Request:
        """Only where `renders` is "server": asks the server to render messages by the model's own template."""
        raise NotImplementedError("renders = 'server' needs template_request")

    def read_template(self, template_reply: bytes) -> str:
        """Only where `renders` is "server": the rendered text."""
        raise NotImplementedError("renders = 'server' needs read_template")

    def ids_request(self, text: str, *, whole: bool = True) -> Request:
        """Only where `renders` is "server": asks for a text's ids; `whole`: with what begins every prompt."""
        raise NotImplementedError("renders = 'server' needs ids_request")

    def read_tokens(self, tokenize_reply: bytes) -> msgspec.Raw:
        """Only where `renders` is "server": the rendered prompt's ids."""
        raise NotImplementedError("renders = 'server' needs read_tokens")

    def spelling_request(self, ids: msgspec.Raw) -> Request | None:
        """Only where `renders` is "server": asks what ids spell; None where it can't be asked."""
        return None

    def read_spelling(self, reply: bytes) -> str:
        """Only where `renders` is "server": the text, special tokens included."""
        raise NotImplementedError("spelling_request needs read_spelling")

    def own_rendering(self, spec: Spec, rendered: Rendered, thinking: bool) -> Request | None:
        """A request that tells how the engine itself renders the same messages; None where it can't be asked."""
        return None

    def read_own_rendering(self, body: bytes) -> tuple[msgspec.Raw, int]:
        """The engine's own prompt ids (null where it only counts) and their number."""
        raise NotImplementedError("own_rendering needs read_own_rendering")


def flags(args: Mapping[str, Any]) -> list[str]:
    """`args` as command-line flags: true → --flag, false → left out, list → repeated values, table → JSON."""
    argv: list[str] = []
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            argv.append(flag)
        elif isinstance(value, list):
            argv += [flag, *(str(item) for item in value)]
        elif isinstance(value, dict):
            argv += [flag, json.dumps(value)]
        elif value is not False:
            argv += [flag, str(value)]
    return argv


FRACTION_STEP = 0.05
"""Less of a card's memory at a retry: 7 GB of 141. There is one retry, so it must suffice; the KV cache pays for it."""

LEAST_FRACTION = 0.70
"""SGLang advises 0.8 or 0.7 where graphs cannot be captured; below that they are not what lacks memory."""


def lower_fraction(args: Mapping[str, Any], flag: str, usual: float | None) -> tuple[Mapping[str, Any], str] | None:
    """`args` with a smaller share of the card's memory in `flag`, and that in words; None at `LEAST_FRACTION`.

    `usual` is what the engine takes where the flag is unset; None: its choice is not known, so the least is taken.
    """
    name = next((given for given in args if normal(given) == flag), flag)
    if name not in args and usual is None:
        return {**args, name: LEAST_FRACTION}, f"{flag} the engine's own choice → {LEAST_FRACTION:.2f}"
    try:
        old = float(args.get(name, usual))
    except (TypeError, ValueError):
        return None  # the engine will say what is wrong with it
    new = round(old - FRACTION_STEP, 2)
    if not LEAST_FRACTION <= new < old <= 1.0:
        return None
    was = f"{old:.3f}".removesuffix("0")
    return {**args, name: new}, f"{flag} {was} → {new:.2f}"


def whole(value: float | None) -> int | None:
    """A gauge as a whole number."""
    return None if value is None or not math.isfinite(value) else int(value)


def normal(name: str) -> str:
    """A flag's name as the engines print it."""
    return name.replace("_", "-").lstrip("-")


def as_ids(raw: msgspec.Raw) -> msgspec.Raw:
    """A JSON list of ids without spaces: counting and finding ids in the bytes relies on it. An empty list is null."""
    data = bytes(raw)
    if b" " in data or b"\n" in data:
        data = data.translate(None, b" \n\r\t")
    return NULL if data in (b"[]", b"", b"null") else msgspec.Raw(data)


def text_of_fields(reasoning: str, content: str, finish_reason: str) -> str:
    """The output of a server that split thought and answer, put together with its tags.

    A thought that was cut off keeps its tag open; one that ended is closed even where no answer follows.
    """
    if not reasoning:
        return content
    if not content and finish_reason == "length":
        return f"<think>\n{reasoning.lstrip()}"
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content.lstrip()}"


def decode_json(body: bytes, decoder: "msgspec.json.Decoder[Any]") -> tuple[Any, bool]:
    """Decodes an answer; half surrogate pairs, which JSON allows and UTF-8 does not, are replaced and reported.

    Python's json reads them where msgspec does not; such answers are rare, so the second reading costs nothing.
    """
    try:
        return decoder.decode(body), False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            loose = json.dumps(json.loads(body.decode("utf-8", "replace")), ensure_ascii=False)
            whole = loose.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return decoder.decode(whole.encode()), True
        except (ValueError, msgspec.DecodeError, RecursionError):
            raise BrokenError(f"an answer that cannot be read: {error}; it begins {body[:200]!r}") from error


COMPILE_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
}
"""What SGLang, vLLM and their kernels compile into; shared by several servers at once, these race (cases C07)."""

_TOO_LONG = re.compile(
    r"maximum context length|exceed_context_size|longer than the model's context|exceeds the (?:available )?context|"
    r"context_length_exceeded|Requested token count exceeds",
    re.IGNORECASE,
)

"""What was in force when records were made: one row per distinct set in data/settings.jsonl, and the guard.

A run folder is one dataset: it is not continued with another model, template, sampling or thinking mode. Throughput,
[judge], [gate] and exports may change, and so may the engine's version: that is recorded, not refused. Rows that a
`--retry` made again may have another sampling and seed: these are a row of their own.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tokenmill import plugins
from tokenmill.config import Config
from tokenmill.core.records import NULL
from tokenmill.core.rendering import Rendering, differences, sha256_of
from tokenmill.engines.base import Engine, Sampling, normal
from tokenmill.errors import GuardError
from tokenmill.folder import write_aside
from tokenmill.machine import modelfiles
from tokenmill.masking import mask_args

RETRY_CHANGES = frozenset({"sampling", "seed"})
"""Parts of `content` that a retry may have otherwise: without a change it would mostly get the same again."""


class Settings(msgspec.Struct, frozen=True):
    """`content` is what decides what the model writes; `id` the hash of all but the rendering, which is known later.

    `retry` is the number of the --retry that these records were made for, 0 for the run itself; `labels` what it asked
    for; `ended`: it has been through all of them. The rendering (core/rendering.py) are those from `template_sha256`
    to `template`, empty where nobody tells it.
    """

    id: str
    content: dict[str, Any]
    engine: str
    engine_version: str
    args: dict[str, Any]
    template_sha256: str = ""
    tokenizer_sha256: str = ""
    first_messages: str = ""
    first_prompt: str = ""
    first_ids: msgspec.Raw = NULL
    template: str = ""
    retry: int = 0
    labels: tuple[str, ...] = ()
    ended: bool = False

    @property
    def rendering(self) -> Rendering:
        """How its prompts were rendered, as far as it is known."""
        hashes = (self.template, self.template_sha256, self.tokenizer_sha256)
        return Rendering(*hashes, self.first_messages, self.first_prompt, self.first_ids)


def sampling(config: Config, model: Path | None) -> Sampling:
    """The config's sampling over the model's own defaults (generation_config.json)."""
    wanted = config.generation
    own = modelfiles.sampling_defaults(model) if model is not None and model.is_dir() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty")
    chosen = {name: getattr(wanted, name) if getattr(wanted, name) is not None else own.get(name) for name in names}
    top_k = chosen.pop("top_k")
    return Sampling(wanted.max_tokens, top_k=None if top_k is None else int(top_k), extra=dict(wanted.extra), **chosen)


def describe(drawn: Sampling) -> str:
    """Sampling in a line for a person."""
    named = {name: value for name, value in drawn.fields().items() if name not in drawn.extra}
    words = [f"{name} {value:g}" for name, value in named.items()] or ["the server's own defaults"]
    return ", ".join([*words, *(f"{name} (extra)" for name in drawn.extra), f"max_tokens {drawn.max_tokens}"])


def of(config: Config, model: Path | None, version: str) -> Settings:
    """The settings of a run; `model` is its folder or file, None where there is none to read."""
    drawn = sampling(config, model)
    engine: Engine = plugins.load("engines", config.engine.kind)()
    args = mask_args({normal(name): value for name, value in config.engine.args.items()})
    content = {
        "model": config.served_name,
        "model_fingerprint": modelfiles.fingerprint(model) if model is not None and model.exists() else "",
        "thinking": config.generation.thinking,
        "sampling": {**drawn.fields(), "max_tokens": drawn.max_tokens},
        "seed": config.generation.seed,
        "engine_args": {name: value for name, value in sorted(args.items()) if name in engine.content_args},
    }
    if config.generation.turns != "last":  # not in the rows of runs made before there was a choice
        content["turns"] = config.generation.turns
    whole = msgspec.json.encode([content, config.engine.kind, version, sorted(args.items(), key=str)])
    row = Settings(hashlib.sha256(whole).hexdigest()[:12], content, config.engine.kind, version, args)
    return complete(row, rendering_of(model, engine))


def rendering_of(model: Path | None, engine: Engine) -> Rendering:
    """What a model's files tell of it before any server runs; a server's own template is its own to tell."""
    if model is None or not model.exists():
        return Rendering()
    template = "" if engine.renders == "server" else modelfiles.template(model)
    return Rendering(template, sha256_of(template), modelfiles.tokenizer_sha256(model))


def for_retry(row: Settings, number: int, labels: tuple[str, ...]) -> Settings:
    """The same settings as a row of a retry: its records are told from all others by it."""
    whole = msgspec.json.encode([row.id, number, labels])
    return replace(row, id=hashlib.sha256(whole).hexdigest()[:12], retry=number, labels=labels)


def title(row: Settings) -> str:
    """A row of the table for a person."""
    return f"{row.id}, retry {row.retry} for {', '.join(row.labels)}" if row.retry else row.id


def read(data: Path) -> list[Settings]:
    """All rows of a run's settings table."""
    file = data / "settings.jsonl"
    if not file.exists():
        return []
    found = []
    for line in file.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Settings))
        except (msgspec.DecodeError, RecursionError):
            continue  # torn by a power failure; `keep` writes it again
    return found


def guard(new: Settings, recorded: list[Settings]) -> None:
    """Raises GuardError naming every difference from what the recorded rows were made with, but for a retry's own."""
    free = RETRY_CHANGES if new.retry else frozenset()
    for old in recorded:
        rendered = [found.text for found in differences(old.rendering, new.rendering) if not found.dated]
        found = [
            *rendered,
            *(
                f"{name}: was {old.content.get(name)!r}, is {new.content.get(name)!r}"
                for name in {**new.content, **old.content}
                if old.content.get(name) != new.content.get(name) and name not in free and not old.retry
            ),
        ]
        if found:
            raise GuardError(
                "this run folder holds records made with other settings:\n  " + "\n  ".join(found),
                fix=_OTHER_FILES if rendered else "set them back, or begin a new run: another name in the config",
            )


_OTHER_FILES = (
    "bring the old files back (chat_template.jinja, tokenizer.json, tokenizer_config.json; or the .gguf file, or the "
    "server's own template), or begin a new run: another name in the config"
)


def guard_table(used: set[str], recorded: list[Settings], data: Path) -> None:
    """Raises GuardError where records were made with settings that are in no row: they could be anything."""
    missing = used - {row.id for row in recorded} - {""}
    if missing:
        raise GuardError(
            f"{data / 'settings.jsonl'} is lost or damaged: records were made with settings "
            f"{', '.join(sorted(missing))}, and it has no such row",
            fix="bring that file back, or begin a new run: another name in the config",
        )


def guard_rendering(new: Rendering, recorded: list[Settings]) -> list[str]:
    """Raises GuardError where prompts are rendered otherwise than those of recorded rows were, as far as that is known;
    returns what is told and not refused, which is another date."""
    dated: dict[str, None] = {}
    for old in recorded:
        found = differences(old.rendering, new)
        if refused := [one.text for one in found if not one.dated]:
            raise GuardError(
                "this run folder holds records whose prompts were rendered otherwise:\n  " + "\n  ".join(refused),
                fix=_OTHER_FILES,
            )
        dated |= dict.fromkeys(one.text for one in found)
    return list(dated)


def complete(row: Settings, known: Rendering) -> Settings:
    """A row with what is known of the rendering; what stood there before stays where that is all."""
    return replace(
        row,
        template=known.template or row.template,
        template_sha256=known.template_sha256 or row.template_sha256,
        tokenizer_sha256=known.tokenizer_sha256 or row.tokenizer_sha256,
        first_messages=known.messages or row.first_messages,
        first_prompt=known.prompt or row.first_prompt,
        first_ids=known.ids if known.ids != NULL else row.first_ids,
    )


def keep(data: Path, row: Settings) -> None:
    """Appends a row, unless it stands there; one without its first prompt gets it."""
    rows = read(data)
    stands = next((old for old in rows if old.id == row.id), None)
    if stands is None:
        write(data, [*rows, row])
    elif row.first_prompt and not stands.first_prompt:
        write(data, [row if old is stands else old for old in rows])


def end_retry(data: Path, number: int) -> None:
    """Notes that a retry has been through all that it asked for."""
    rows = read(data)
    if any(row.retry == number and not row.ended for row in rows):
        write(data, [replace(row, ended=row.ended or row.retry == number) for row in rows])


def write(data: Path, rows: list[Settings]) -> None:
    """Replaces the table, whole or not at all."""
    write_aside(data / "settings.jsonl", b"".join(msgspec.json.encode(row) + b"\n" for row in rows), sync=True)

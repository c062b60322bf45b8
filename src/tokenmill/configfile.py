"""TOML text → Config: overrides by --set, and every mistake at once with its line and the legal values."""

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tokenmill.config import Config, across
from tokenmill.errors import ConfigError


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
    found: dict[tuple[str, ...], list[str]] = {}
    config = None
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        _collect(error.errors(), found)
    for key, text in across(data):
        found.setdefault(key, []).append(text)
    if config is not None and not found:
        return config
    mistakes = _mistakes(found, source, lines or {})
    count = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    raise ConfigError(
        f"{count} in {source}:\n  " + "\n  ".join(mistakes), fix="tokenmill init   prints every key with its default"
    )


def _collect(errors: list[ErrorDetails], found: dict[tuple[str, ...], list[str]]) -> None:
    """Sorts complaints by key; the several complaints of a union about one key become one."""
    for error in errors:
        key = _key(tuple(str(part) for part in error["loc"]))
        text = _complaint(error, key)
        if text not in found.setdefault(key, []):
            found[key].append(text)


def _mistakes(found: dict[tuple[str, ...], list[str]], source: str, lines: dict[tuple[str, ...], int]) -> list[str]:
    """One line a mistake, with the line of the file where its key or its section stands."""
    result = []
    for key, texts in found.items():
        place = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        where = f"{source}:{place}" if place else source
        result.append(f"{where}: {'.'.join(key)}{' ' if key else ''}{', or '.join(texts)}")
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
        return f"is no known key{f', did you mean {near[0]}?' if near else ''} (known here: {', '.join(known)})"
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
    """Paths are relative to the config file; a hub id is no path.

    Links are not followed: a mount that hangs is doctor's to tell, and a model keeps the name that it was given.
    """

    def resolve(text: str) -> str:
        return os.path.abspath(base / Path(text).expanduser()) if text else text  # noqa: PTH100  (Path.resolve asks the disk)

    def named(text: str) -> str:
        """The name stays what the user wrote: in the hub's cache a .gguf file is a link to a hash."""
        found = base / Path(text).expanduser()
        return str(found.parent.resolve() / found.name)

    model = config.model
    path = Path(model.path).expanduser()
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model.path) and not (base / path).exists()
    return config.model_copy(
        update={
            "model": model if is_hub_id or not model.path else model.model_copy(update={"path": named(model.path)}),
            "prompts": config.prompts.model_copy(update={"path": resolve(config.prompts.path)}),
            "output": config.output.model_copy(
                update={"dir": resolve(config.output.dir), "copy_to": resolve(config.output.copy_to)}
            ),
        }
    )

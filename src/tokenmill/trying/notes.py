"""tune.json: what was tried so far, whole or not at all, so that an interrupted `tune` goes on where it was."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tokenmill.config import Config, shown
from tokenmill.core.trials import Trial
from tokenmill.core.variants import Setup
from tokenmill.folder import RunFolder, write_aside
from tokenmill.masking import mask_args


class Notes(msgspec.Struct, frozen=True):
    """`asked` is the hash of what is measured; `seconds` were spent; `verdict` is empty until it has ended."""

    asked: str
    setups: tuple[Setup, ...] = ()
    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0
    verdict: tuple[str, ...] = ()
    winner: str = ""
    lines: str = ""


def folder_of(config: Config) -> RunFolder:
    """Beside the run folder, never in it: servers, logs and events of `tune` are its own."""
    return RunFolder(config.folder.with_name(f"{config.folder.name}-tune"))


def asked(config: Config, only: Sequence[str], prompts: int) -> str:
    """What results depend on; other trials of the same may go on, whatever the time for them."""
    data = shown(config)
    parts: list[Any] = [data[name] for name in ("model", "engine", "generation", "prompts")]
    fleet = [config.fleet.gpus, config.fleet.gpus_per_server]
    return hashlib.sha256(msgspec.json.encode([*parts, fleet, list(only), prompts])).hexdigest()[:16]


def _file(folder: RunFolder) -> Path:
    return folder.path / "tune.json"


def read(folder: RunFolder, wanted: str) -> Notes:
    """What an interrupted one has left of the same; nothing of one that has ended."""
    try:
        found = msgspec.json.decode(_file(folder).read_bytes(), type=Notes)
    except (OSError, msgspec.DecodeError):
        return Notes(wanted)
    if found.asked != wanted or found.verdict:
        return Notes(wanted)
    return replace(found, setups=())  # they are made anew of the config, with what is secret in it


def write(folder: RunFolder, notes: Notes) -> None:
    """Raises OSError. Secrets are masked."""
    masked = replace(notes, setups=tuple(map(without_secrets, notes.setups)))
    write_aside(_file(folder), msgspec.json.format(msgspec.json.encode(masked), indent=1))


def without_secrets(setup: Setup) -> Setup:
    """A setup that may be kept and shown."""
    return replace(setup, args=mask_args(setup.args))

"""Is a model whole? Offline, by names, headers and sizes: nothing of the weights themselves is read.

A folder looks ready long before it is: config and tokenizer come first, the shards last (cases C33). SGLang 0.5.11 does
not notice a missing shard and serves from memory that nobody wrote (facts of its source, weight_utils.py).
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import PreflightError
from tokenmill.machine import gguf, safetensors, threads
from tokenmill.machine.modelfiles import read_json, weight_map
from tokenmill.machine.safetensors import Shard

THREADS = 16
"""Headers read at once: on a mount with 200 ms a read, 15 shards one after the other would take 6 s."""

UNDER_WAY_S = 3600.0
"""An unfinished part that was written to this lately belongs to a download that may still run; an older one is litter
that an interrupted and repeated download left beside a whole model."""

POINTER_SIZE = 1024
"""Bytes of a git-lfs pointer at most: three lines."""

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.safetensors|\.bin|\.gguf)")
"""model-00001-of-00014.safetensors, and Qwen's model.safetensors-00001-of-00014.safetensors."""

_MTP_FILE = re.compile(r"mtp|nextn", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a model: where, what, and whether the model cannot be used like this."""

    place: Path
    what: str
    grave: bool = True

    def __str__(self) -> str:
        return f"{self.place} {self.what}"


@dataclass
class Model:
    """A model's folder, read once: what the index says, what lies there, what each shard's header says."""

    folder: Path
    index: dict[str, str] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors, by name."""
        return {name: shape for shard in self.shards for name, shape in shard.shapes.items()}


def read(folder: Path) -> Model:
    """Reads index and headers; raises PreflightError where the index is broken."""
    index: dict[str, str] = {}
    for file in _indexes(folder):
        index |= weight_map(read_json(file))
    names = {*index.values(), *(file.name for file in folder.glob("*.safetensors"))}
    files = sorted(folder / name for name in names if name.endswith(".safetensors"))
    return Model(folder, index, threads.each(files, safetensors.read, THREADS))


def _indexes(folder: Path) -> list[Path]:
    """The index of the weights: the usual one, else whatever is called so."""
    usual = folder / "model.safetensors.index.json"
    return [usual] if usual.exists() else sorted(folder.glob("*.safetensors.index.json"))


def faults(model: Path) -> list[Fault]:
    """All that is missing or broken; empty where a model is whole as far as names, headers and sizes tell."""
    try:
        if not model.exists():
            return [Fault(model, "does not exist" if not model.is_symlink() else "is a dangling link")]
        if model.is_file():
            return list(_file_faults(model))
        return list(_folder_faults(model))
    except PreflightError as error:
        return [Fault(model, f"cannot be judged: {error}")]
    except OSError as error:
        return [Fault(Path(error.filename or model), f"cannot be read: {error.strerror}")]


def _file_faults(file: Path) -> Iterator[Fault]:
    with file.open("rb") as stream:
        head = stream.read(len(safetensors.POINTER))
    if head == safetensors.POINTER:
        yield Fault(file, "is a git-lfs pointer, not the weights")
    elif head[:4] != b"GGUF":
        yield Fault(file, f"is not a GGUF file: it begins with {head[:4]!r}")
    elif broken := gguf.problem(file) or safetensors.hole_told(file):
        yield Fault(file, broken)
    yield from _missing_numbers(file.parent, [file.name])


def _folder_faults(folder: Path) -> Iterator[Fault]:
    if not (folder / "config.json").is_file():
        yield Fault(folder / "config.json", "is missing")
    yield from _broken_json(folder)
    model = read(folder)
    told = {shard.file for shard in model.shards if shard.problem}
    for shard in model.shards:
        outside = bool(model.index) and shard.file.name not in model.index.values()
        if shard.problem:
            yield Fault(shard.file, shard.problem, grave=not outside or bool(_MTP_FILE.search(shard.file.name)))
        elif wanting := _wanting(model, shard):
            words = f"lacks {len(wanting)} tensors that the index puts there, such as {wanting[0]}"
            yield Fault(shard.file, words)
    if not model.index:
        yield from _missing_numbers(folder, [shard.file.name for shard in model.shards])
    if not model.shards:
        yield from _other_weights(folder)
    yield from (fault for fault in _litter(folder) if fault.place not in told)


def _broken_json(folder: Path) -> Iterator[Fault]:
    """What an interrupted download leaves of a tokenizer: a file, and no JSON in it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            if not (content := (folder / name).read_bytes()).startswith(safetensors.POINTER):
                msgspec.json.decode(content)
        except (FileNotFoundError, IsADirectoryError):
            continue
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield Fault(folder / name, f"holds no whole JSON: {error}")


def _wanting(model: Model, shard: Shard) -> list[str]:
    return sorted(name for name, file in model.index.items() if file == shard.file.name and name not in shard.shapes)


def _missing_numbers(folder: Path, names: list[str]) -> Iterator[Fault]:
    """Files that a set numbered `-00001-of-00014` should have, and has not; some sets count from 0."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if found := _NUMBERED.fullmatch(name):
            sets.setdefault((found["stem"], found["count"], found["end"]), set()).add(int(found["number"]))
    for (stem, count, end), numbers in sorted(sets.items()):
        first = 0 if 0 in numbers else 1
        for number in range(first, first + int(count)):
            file = folder / f"{stem}-{number:05}-of-{count}{end}"
            if number not in numbers and not file.exists():
                yield Fault(file, "is missing" + (" (a dangling link)" if file.is_symlink() else ""))


def _other_weights(folder: Path) -> Iterator[Fault]:
    """Weights in older forms: there or not, and all of them."""
    others = [file for kind in ("*.bin", "*.gguf", "*.pt", "*.pth") for file in folder.glob(kind)]
    if not others:
        yield Fault(folder, "holds no weights (*.safetensors)")
    named = {name for file in folder.glob("*.bin.index.json") for name in weight_map(read_json(file)).values()}
    for name in sorted(named):
        if not (folder / name).exists():
            yield Fault(folder / name, "is missing")
    if not named:
        yield from _missing_numbers(folder, [file.name for file in others])


def _litter(folder: Path) -> Iterator[Fault]:
    """Links to nothing, pointers that were never fetched, downloads that did not end."""
    for file in sorted(folder.iterdir()):
        if file.is_symlink() and not file.exists():
            yield Fault(file, "is a dangling link: what it points to was never downloaded", grave=_is_needed(file))
        elif file.is_file() and file.suffix != ".safetensors" and _is_pointer(file):
            yield Fault(file, "is a git-lfs pointer, not the file itself", grave=_is_needed(file))
    real = Path(os.path.realpath(folder))
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if real.parent.name == "snapshots":
        places.append(real.parent.parent / "blobs")
    for place in places:
        for part in sorted([*place.glob("*.incomplete"), *place.glob("*.aria2")]):
            fresh = time.time() - part.stat().st_mtime < UNDER_WAY_S
            yield Fault(part, "is an unfinished download" + ("" if fresh else ", an old one"), grave=fresh)


_NEEDED = re.compile(
    r"config\.json|tokenizer\.(json|model)|.*\.(safetensors|gguf|bin)|.*\.index\.json|vocab\.json|.*\.py"
)


def _is_needed(file: Path) -> bool:
    return _NEEDED.fullmatch(file.name) is not None


def _is_pointer(file: Path) -> bool:
    if file.stat().st_size > POINTER_SIZE:
        return False
    with file.open("rb") as stream:
        return stream.read(len(safetensors.POINTER)) == safetensors.POINTER


# -- the parts beside the weights --------------------------------------------------------------------------------------
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def lacks(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Parts that a model of this kind has and this folder does not: the part's name, and what comes of it."""
    if not any((folder / name).is_file() for name in TOKENIZERS) and not list(folder.glob("*.tiktoken")):
        yield "tokenizer", f"no tokenizer: none of {', '.join(TOKENIZERS)}"
    if not (folder / "tokenizer_config.json").is_file():
        yield "tokenizer_config", "no tokenizer_config.json: special tokens and the chat template may be lost"
    if not (folder / "generation_config.json").is_file():
        yield "generation_config", "no generation_config.json: sampling and end tokens are the engine's defaults"
    if not config.get("architectures"):
        yield "architectures", "config.json names no architecture: the engine has to guess the model's class"
    if config.get("vision_config") and not any((folder / name).is_file() for name in PROCESSORS):
        yield "processor", f"a vision model without {' or '.join(PROCESSORS)}"
    if config.get("video_token_id") is not None and not (folder / "video_preprocessor_config.json").is_file():
        yield "video_processor", "a vision model without video_preprocessor_config.json"
    for value in (config.get("auto_map") or {}).values():
        for name in value if isinstance(value, list) else [value]:
            module = str(name).rpartition(".")[0]
            if name and "--" not in module and not (folder / f"{module}.py").is_file():
                yield "code", f"config.json asks for {module}.py, which is not there"

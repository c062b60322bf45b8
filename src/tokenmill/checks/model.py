"""The model: are its files whole, has it all its parts, and is it of the kind that the engine loads?"""

from collections.abc import Iterator
from pathlib import Path

from tokenmill.checks.base import Context, Finding, Level
from tokenmill.engines.base import normal
from tokenmill.errors import PreflightError
from tokenmill.machine import modelfiles, wholeness

REPLACES = {
    "tokenizer": {"tokenizer", "tokenizer-path", "skip-tokenizer-init"},
    "template": {"chat-template"},
    "processor": {"language-only", "language-model-only", "tokenizer", "tokenizer-path"},
}
"""Parts that arguments of an engine bring from elsewhere, or do without."""


def check_model(context: Context) -> Iterator[Finding]:
    """The model's files are whole, of the kind that the engine loads, and all parts are there."""
    path = Path(context.config.model.path)
    kind, loads = context.config.engine.kind, context.engine.loads
    if not loads or not path.is_absolute():
        return
    faults = wholeness.faults(path)
    for fault in faults:
        level: Level = "fail" if fault.grave else "warn"
        yield Finding("model", level, str(fault.place), str(fault), _fix(context))
    if path.is_file() and loads == "folder":
        yield Finding("model", "fail", str(path), f"{kind} needs a model folder, not one file")
    if path.is_dir() and loads == "file":
        yield Finding("model", "fail", str(path), f"{kind} needs a .gguf file, not a folder")
    elif path.is_dir():
        yield from _parts(context, path)
    if not any(fault.grave for fault in faults):
        yield Finding("model", "ok", str(path), "its files are whole: names, headers and sizes agree")


def _fix(context: Context) -> str:
    """The hub's own command goes on where a download stopped; without the repository's name, only words are left."""
    path = Path(context.config.model.path)
    repository = next((parent.name for parent in path.parents if parent.name.startswith("models--")), "")
    if repository:
        return f"hf download {repository.removeprefix('models--').replace('--', '/')}"
    return f"finish the download: hf download REPOSITORY --local-dir {path}"


def _parts(context: Context, folder: Path) -> Iterator[Finding]:
    """Tokenizer, template, processor …: `fail` where this engine is known to end without it."""
    kind, renders = context.config.engine.kind, context.engine.renders
    given = {normal(flag) for flag in context.config.engine.args}
    try:
        config = modelfiles.read_json(folder / "config.json")
        template = modelfiles.template(folder)
    except PreflightError as error:
        yield Finding("model", "fail", str(folder), str(error), _fix(context))
        return
    needed = {"tokenizer"} if renders == "ids" else set()
    needed |= {"processor"} if kind == "sglang" else set()  # seen: "Can't load image processor", exit 1
    for part, what in wholeness.lacks(folder, config):
        if given.isdisjoint(REPLACES.get(part, ())):
            severe: Level = "fail" if part in needed else "warn"
            yield Finding("model", severe, str(folder), f"{folder}: {what}", _fix(context))
    if template or (renders != "ids" and not given.isdisjoint(REPLACES["template"])):
        return
    if renders == "ids" or kind == "vllm":  # vLLM answers every chat request with 400
        fix = "add the template's file chat_template.jinja to the model folder"
        yield Finding("model", "fail", str(folder), f"{folder}: no chat template", fix)

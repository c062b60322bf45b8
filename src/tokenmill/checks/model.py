"""The model: are its files whole, and of the kind that the engine loads?"""

from collections.abc import Iterator
from pathlib import Path

from tokenmill.checks.base import Context, Finding
from tokenmill.machine import modelfiles


def check_model(context: Context) -> Iterator[Finding]:
    """The model's files are whole, and of the kind that the engine loads."""
    path = Path(context.config.model.path)
    if context.config.engine.kind in ("openai", "fake") or not path.is_absolute():
        return
    problems = modelfiles.problems(path)
    for problem in problems:
        yield Finding("model", "fail", str(path), problem, "finish the download, or correct model.path")
    if path.is_file() and context.config.engine.kind not in ("llamacpp",):
        yield Finding("model", "fail", str(path), f"{context.config.engine.kind} needs a model folder, not one file")
    if path.is_dir() and context.config.engine.kind == "llamacpp":
        yield Finding("model", "fail", str(path), "llamacpp needs a .gguf file, not a folder")
    if not problems and context.engine.renders == "ids" and path.is_dir() and not modelfiles.template(path):
        yield Finding("model", "fail", str(path), f"{path} has no chat template", "add its chat_template.jinja")
    if not problems:
        yield Finding("model", "ok", str(path), "its files are whole by name and size")

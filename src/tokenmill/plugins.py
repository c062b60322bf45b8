"""Names → classes. A built-in plug-in is a line here; a package of yours adds its own by entry point.

Nothing is imported until it is asked for by name.
"""

from importlib import import_module, metadata
from typing import Any

from tokenmill.errors import UsageError, boundary

TABLES: dict[str, dict[str, str]] = {
    "engines": {
        "sglang": "tokenmill.engines.sglang:SGLang",
        "vllm": "tokenmill.engines.vllm:VLLM",
        "llamacpp": "tokenmill.engines.llamacpp:LlamaCpp",
        "openai": "tokenmill.engines.openai:OpenAI",
        "fake": "tokenmill.engines.fake:Fake",
    },
    "formats": {
        "specforge": "tokenmill.formats.specforge:SpecForge",
        "specforge-chat": "tokenmill.formats.specforge_chat:SpecForgeChat",
        "speculators": "tokenmill.formats.speculators:Speculators",
        "messages": "tokenmill.formats.messages:Messages",
        "openai-batch": "tokenmill.formats.openai_batch:OpenAIBatch",
        "parquet": "tokenmill.formats.parquet:Parquet",
    },
}


def names(family: str) -> list[str]:
    """All names of a family, the built-in ones first."""
    return [*TABLES[family], *sorted(_entry_points(family))]


def load(family: str, name: str) -> Any:
    """The class behind a name; raises UsageError with the legal names, PluginError where its import fails."""
    target = TABLES[family].get(name) or _entry_points(family).get(name)
    if target is None:
        raise UsageError(f"no {family[:-1]} named {name!r}", fix=f"one of: {', '.join(names(family))}")
    module, _, attribute = target.partition(":")
    with boundary(f"loading the {family[:-1]} {name} from {target}"):
        return getattr(import_module(module), attribute)


def _entry_points(family: str) -> dict[str, str]:
    return {point.name: point.value for point in metadata.entry_points(group=f"tokenmill.{family}")}

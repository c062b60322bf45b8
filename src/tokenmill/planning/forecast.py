"""What a server will be able to do, foretold before it starts: brings an engine's rule all that it needs to know.

Reads the model's config.json and the sizes of its weights; starts nothing. What cannot be read is left out, and the
rule says less.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenmill.config import Config
from tokenmill.core.capacity import Forecast, Given
from tokenmill.core.shape import Shape, shape_of
from tokenmill.engines.base import Engine, normal
from tokenmill.errors import PluginError, PreflightError, boundary
from tokenmill.machine import modelfiles
from tokenmill.machine.gpus import Gpu


def given(config: Config, cards: Sequence[Gpu] | None, version: str = "", model: Path | None = None) -> Given:
    """`cards` are the GPUs that may be used, None without any; `model` where it lies now, else model.path."""
    place = model or Path(config.model.path)
    smallest = min(cards, key=lambda card: card.memory_total) if cards else None
    concurrency = config.generation.concurrency
    return Given(
        args={normal(name): value for name, value in config.engine.args.items()},
        env=config.engine.env,
        version=version,
        memory=smallest.memory_total if smallest else None,
        card_name=smallest.name if smallest else "",
        weights=_weights(place),
        shape=_shape(place),
        asked=concurrency if isinstance(concurrency, int) else None,
        max_tokens=config.generation.max_tokens,
    )


def forecast(engine: Engine, known: Given) -> Forecast:
    """By the engine's rule; a plug-in whose rule raises foretells nothing."""
    try:
        with boundary(f"engine {engine.kind}"):
            return engine.forecast(known)
    except PluginError:
        return Forecast()


def _shape(model: Path) -> Shape | None:
    if not model.is_dir():
        return None
    try:
        return shape_of(modelfiles.read_json(model / "config.json"))
    except PreflightError:
        return None  # doctor's model check says so


def _weights(model: Path) -> int | None:
    try:
        sizes = [file.stat().st_size for file in modelfiles.weight_files(model) if file.is_file()]
    except (OSError, PreflightError):
        return None
    return sum(sizes) or None

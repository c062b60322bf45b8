"""An export's README.md, the hub's dataset card: where the data is (YAML), what made it, what is in it, whose tokens.

The fingerprints are for whoever serves what is trained on it: a drafter whose ids mean other tokens than the model's
accepts nothing, and says nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill import __version__
from tokenmill.errors import PreflightError
from tokenmill.formats.base import Format, Split
from tokenmill.machine import modelfiles
from tokenmill.settings import Settings, title
from tokenmill.sieve import Sieve, Tally

BOUNDS = (0, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 31)
"""Supervised tokens: trainers cut at 2,048, 4,096 and 8,192."""


def page(
    name: str,
    form: Format,
    made: Sequence[Settings],
    rows: dict[Split, int],
    sieve: Sieve,
    tally: Tally,
    model: Path | None,
    notes: Sequence[str] = (),
) -> str:
    """The whole page. `made` are the run's settings; only those of rows that went out are shown. `notes` come first."""
    used = [row for row in made if tally.settings[row.id]]
    lines = [
        *_front(form, rows, f"tokenmill {__version__}, {tally.digest}"),
        f"# {name}",
        "",
        f"{tally.rows:,} rows in the format `{form.name}`, made by tokenmill {__version__}. {form.story}",
        *(["", *notes] if notes else []),
        *(line for row in used for line in _settings(row, tally.settings[row.id])),
        *_tokens(model),
        *_content(sieve, tally),
    ]
    return "\n".join(lines) + "\n"


def _front(form: Format, rows: dict[Split, int], description: str) -> Iterator[str]:
    """What `datasets.load_dataset` reads: without it, it would guess the splits by the names of files.

    It caches what it reads by the folder's name and this text alone: the description must tell one content from
    another, or a second export of that name would be read as the first.
    """
    yield "---"
    if any(rows.values()):
        yield from ("configs:", "- config_name: default", f"  description: {description}", "  data_files:")
    for split, count in rows.items():
        if count:
            yield from (f"  - split: {split}", f"    path: {form.pattern(split)}")
    yield from ("---", "")


def _table(heading: str, rows: Sequence[tuple[str, Any]]) -> Iterator[str]:
    if rows:
        yield from ("", f"## {heading}", "", "| | |", "|---|---|")
        yield from (f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows)


def _settings(row: Settings, count: int) -> Iterator[str]:
    content = row.content
    rows = [
        ("rows", f"{count:,}"),
        ("model", content.get("model", "")),
        ("model's files, fingerprint", content.get("model_fingerprint", "")),
        ("engine", f"{row.engine} {row.engine_version}".strip()),
        ("flags", _words(row.args)),
        ("thinking", "on" if content.get("thinking") else "off"),
        ("sampling", _words(content.get("sampling", {}))),
        ("chat template, sha256", row.template_sha256),
    ]
    yield from _table(f"Made with (settings {title(row)})", [(name, value) for name, value in rows if value != ""])


def _words(fields: dict[str, Any]) -> str:
    return " ".join(f"`{name} {msgspec.json.encode(value).decode()}`" for name, value in fields.items())


def _tokens(model: Path | None) -> Iterator[str]:
    """Whose ids these are; nothing where the model's folder is gone."""
    try:
        tokens = modelfiles.vocabulary(model) if model is not None and model.is_dir() else {}
        size = modelfiles.vocabulary_size(model) if model is not None and tokens else None
    except PreflightError:
        return
    if tokens:
        rows = [("tokens", f"{len(tokens):,}"), ("tokens, fingerprint", modelfiles.vocabulary_fingerprint(tokens))]
        yield from _table("Tokenizer", [*rows, *([("ids of the model's head", f"{size:,}")] if size else [])])


def _content(sieve: Sieve, tally: Tally) -> Iterator[str]:
    rows: list[tuple[str, str]] = [("rows", f"{tally.rows:,}"), ("supervised tokens", f"{sum(tally.lengths):,}")]
    rows += [(f"finish_reason {name}", f"{count:,}") for name, count in tally.finish.most_common()]
    rows += [(name, f"{count:,}") for name, count in tally.labels.most_common()]
    rows += [(f"left out: {reason}", f"{count:,}") for reason, count in sieve.reasons.most_common()]
    if tally.accept_length:
        rows.append(("tokens accepted a step, mean", f"{tally.accept_length:.2f}"))
    yield from _table("Content", rows)
    counts = np.histogram(np.array(tally.lengths), BOUNDS)[0].tolist()
    names = [f"{low:,} to {high - 1:,}" if high < BOUNDS[-1] else f"{low:,} and more" for low, high in pairwise(BOUNDS)]
    yield from _table("Supervised tokens a row", [(name, f"{n:,}") for name, n in zip(names, counts, strict=True) if n])

"""The prompt set: can it be read, and does it hold a row?"""

from collections.abc import Iterator
from pathlib import Path

from tokenmill import prompts, rows
from tokenmill.checks.base import Context, Finding


def check_prompts(context: Context) -> Iterator[Finding]:
    """The prompt set can be read and holds a row."""
    path = Path(context.config.prompts.path)
    names = rows.files(path)
    first = next(prompts.rows(path), None)
    if first is None:
        yield Finding("prompts", "fail", str(path), f"{path} holds no row", "one JSON object a line")
    else:
        yield Finding("prompts", "ok", str(path), f"{len(names)} file{'s' if len(names) > 1 else ''}")

"""Would somebody be told? A typing mistake in [notify] must not show at night."""

import shutil
from collections.abc import Iterator

from tokenmill.checks.base import Context, Finding


def check_notify(context: Context) -> Iterator[Finding]:
    """notify.command names a program. Nothing is sent: whoever is told of a start stops reading."""
    command = context.config.notify.command
    if command and shutil.which(command[0]) is None:
        words = f"notify.command: there is no program {command[0]!r}: nobody would be told by it"
        yield Finding("notify", "warn", "notify.command", words, f"which {command[0]}")
        return
    ways = [name for name, value in (("a command", command), ("a webhook", context.config.notify.webhook)) if value]
    yield Finding("notify", "ok", "[notify]", f"told by {' and '.join(ways)}" if ways else "nobody is told of the end")

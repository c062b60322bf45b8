"""Takes secrets out of what is kept or shown: the run folder outlives the run, and is copied."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_NAME = re.compile(
    r"token$|[-_]token[-_](?!id|map|threshold)|api[-_]?key|(^|[-_])key$|secret|passw|credential|(^|[-_])auth($|[-_])",
    re.IGNORECASE,
)
"""Names of variables and flags whose value is a secret; `max-tokens` and `pad-token-id` are none."""

_USERINFO = re.compile(r"(\w+://)[^/\s]+@")


def mask_url(text: str) -> str:
    """Without the user and password of URLs in it."""
    return _USERINFO.sub(rf"\1{MASK}@", text)


def mask_path(url: str) -> str:
    """An address of which no more than the host is known: a webhook's path is its key."""
    scheme, separator, rest = mask_url(url).partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.partition('?')[0]}{slash}{MASK if path else ''}"


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    return {name: MASK if is_secret(name) else mask_url(value) for name, value in env.items()}


def mask_args(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: MASK if is_secret(name) else _masked(value) for name, value in args.items()}


def mask_words(words: Sequence[str]) -> list[str]:
    """A command line: the value behind a secret's flag, or in it."""
    shown: list[str] = []
    for word in words:
        flag, equals, _ = word.partition("=")
        if equals and is_secret(flag.lstrip("-")):
            shown.append(f"{flag}={MASK}")
        elif shown and shown[-1].startswith("-") and "=" not in shown[-1] and is_secret(shown[-1].lstrip("-")):
            shown.append(MASK)
        else:
            shown.append(mask_url(word))
    return shown


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret."""
    return _NAME.search(name) is not None


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return mask_args(value)
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return mask_url(value) if isinstance(value, str) else value

"""What real engines wrote and answered: tests/data, as the engine plug-ins get to see it."""

import json
import re
from pathlib import Path
from typing import Any

from tokenmill.machine.logtail import KEPT_LINES

DATA = Path(__file__).parents[1] / "data"


def text(name: str) -> str:
    return (DATA / name).read_bytes().decode()


def page(name: str) -> bytes:
    return (DATA / name).read_bytes()


def reply(name: str, key: str) -> bytes:
    """One of several replies in a .json file, as it came over the wire."""
    found: Any = json.loads(text(name))[key]
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def lines(name: str) -> list[str]:
    """A log's lines as machine/logtail.py gives them out."""
    return [line for line in re.split(r"[\r\n]+", text(name)) if line]


def tail(name: str) -> list[str]:
    """The last lines, which is all that a diagnosis gets."""
    return lines(name)[-KEPT_LINES:]

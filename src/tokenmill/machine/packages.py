"""What an engine's own environment holds, read without importing anything of it."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.errors import PreflightError

TIMEOUT_S = 60.0
"""Starting an interpreter takes 30 ms on a disk; an environment on a cold network mount took more than 15 s."""

_SCRIPT = """
import importlib.metadata as m, json, sys
try:
    d = m.distribution(sys.argv[1])
    print(json.dumps({"version": d.version, "root": str(d.locate_file(""))}))
except m.PackageNotFoundError:
    print(json.dumps({"version": "", "root": ""}))
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution's version (empty: not installed) and the texts of the files that were asked for, by path."""

    version: str
    sources: dict[str, str] = field(default_factory=dict)


def read(python: str, name: str, globs: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Package:
    """Asks an interpreter for a distribution; raises PreflightError where the interpreter does not run.

    `env` are variables that the engine is started with: a PYTHONPATH decides what it finds.
    """
    command = [python, "-c", _SCRIPT, name]
    variables = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=variables)
        answer = json.loads(done.stdout)
    except FileNotFoundError as error:
        raise PreflightError(f"engine.python = {python}: no such file", fix="which python3") from error
    except subprocess.TimeoutExpired as error:
        message = f"engine.python = {python} did not answer within {TIMEOUT_S:.0f} s: is it on a network mount?"
        raise PreflightError(message) from error
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        detail = getattr(error, "stderr", "") or error
        raise PreflightError(f"engine.python = {python} does not run: {str(detail).strip()[-300:]}") from error
    root = Path(answer["root"] or "/nonexistent")
    files = sorted({file for pattern in globs for file in root.glob(pattern)} if answer["version"] else set())
    texts = {str(file.relative_to(root)): file.read_text(encoding="utf-8", errors="replace") for file in files}
    return Package(answer["version"], texts)

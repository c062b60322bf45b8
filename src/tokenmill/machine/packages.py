"""What an engine's own environment holds, read without importing anything of it.

Its own interpreter is asked, since that alone knows what it would find: a virtual environment, a PYTHONPATH, its own
version of Python for the conditions in requirements. Only metadata is read, which takes milliseconds; importing torch
takes 10 s and touches the GPU.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.errors import PreflightError

TIMEOUT_S = 60.0
"""Starting an interpreter takes 30 ms on a disk; an environment on a cold network mount took more than 15 s."""

_SCRIPT = """
import importlib.metadata as m, json, os, platform, re, sys, time
begun = time.monotonic()
def find(name):
    try:
        return m.distribution(name)
    except m.PackageNotFoundError:
        return None
def names(requires):
    return [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in requires]
engine = find(sys.argv[1])
answer = {"version": "", "root": "", "prefix": sys.prefix}
if engine:
    needs = {sys.argv[1]: list(engine.requires or ())}
    installed = {}
    for name in names(needs[sys.argv[1]]) + sys.argv[2:]:
        found = find(name)
        if found and name not in installed:
            installed[name] = found.version
            if name in sys.argv[2:] and name != sys.argv[1]:
                needs[name] = list(found.requires or ())
                for other in names(needs[name]):
                    if other not in installed and find(other):
                        installed[other] = find(other).version
    version = ".".join(platform.python_version_tuple()[:2])
    answer.update(version=engine.version, root=str(engine.locate_file("")), needs=needs, installed=installed, markers={
        "python_version": version, "python_full_version": platform.python_version(), "sys_platform": sys.platform,
        "platform_machine": platform.machine(), "platform_system": platform.system(), "os_name": os.name,
        "implementation_name": sys.implementation.name, "platform_python_implementation":
        platform.python_implementation(), "platform_release": platform.release(), "platform_version":
        platform.version(), "implementation_version": platform.python_version()})
answer["seconds"] = time.monotonic() - begun
print(json.dumps(answer))
"""

PINNING = (
    *("torch", "torchvision", "torchaudio", "triton", "xformers", "flashinfer-python", "sgl-kernel", "sglang-kernel"),
    *("vllm", "transformers", "xgrammar", "compressed-tensors"),
)
"""Distributions whose own needs are looked at, too: compiled against one torch, they break quietly with another."""

_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
"""torch/version.py: `cuda: Optional[str] = '13.0'`; None in builds for the CPU or for other makers' cards."""


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution's version (empty: not installed) and the texts of the files that were asked for, by path.

    `needs` are the requirements of the distribution and of those in PINNING, by name, as their metadata words them;
    `installed` the versions of what they name. `markers` are that interpreter's values for conditions in them. `cuda`
    is what torch was built for, `prefix` where the environment lies, `seconds` what it took to read all that.
    """

    version: str
    sources: dict[str, str] = field(default_factory=dict)
    needs: dict[str, list[str]] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    markers: dict[str, str] = field(default_factory=dict)
    cuda: str = ""
    prefix: str = ""
    seconds: float = 0.0


def read(python: str, name: str, globs: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Package:
    """Asks an interpreter for a distribution; raises PreflightError where the interpreter does not run.

    `env` are variables that the engine is started with: a PYTHONPATH decides what it finds.
    """
    answer = _ask(python, name, env or {})
    root = Path(answer["root"] or "/nonexistent")
    files = sorted({file for pattern in globs for file in root.glob(pattern)} if answer["version"] else set())
    texts = {str(file.relative_to(root)): file.read_text(encoding="utf-8", errors="replace") for file in files}
    built = _CUDA.search(_text(root / "torch" / "version.py")) if answer["version"] else None
    return Package(
        answer["version"],
        texts,
        needs=answer.get("needs", {}),
        installed=answer.get("installed", {}),
        markers=answer.get("markers", {}),
        cuda=built[1] if built else "",
        prefix=answer["prefix"],
        seconds=answer["seconds"],
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _ask(python: str, name: str, env: Mapping[str, str]) -> dict[str, Any]:
    command = [python, "-c", _SCRIPT, name, *PINNING]
    variables = {**os.environ, **env}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=variables)
        answer: dict[str, Any] = json.loads(done.stdout)
    except FileNotFoundError as error:
        raise PreflightError(f"engine.python = {python}: no such file", fix="which python3") from error
    except subprocess.TimeoutExpired as error:
        message = f"engine.python = {python} did not answer within {TIMEOUT_S:.0f} s: is it on a network mount?"
        raise PreflightError(message) from error
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        detail = getattr(error, "stderr", "") or error
        raise PreflightError(f"engine.python = {python} does not run: {str(detail).strip()[-300:]}") from error
    return answer

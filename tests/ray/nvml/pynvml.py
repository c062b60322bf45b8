"""NVML of a machine with four cards, first on the PYTHONPATH of raylets: the real package, but for what reads a card.

What is not answered here has no driver behind it and raises, which the readings take for "unknown".
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

_others = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]
_spec = importlib.machinery.PathFinder.find_spec("pynvml", _others)
assert _spec is not None
assert _spec.loader is not None
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)
globals().update({name: value for name, value in vars(_real).items() if not name.startswith("__")})

CARDS = 4


def nvmlInit() -> None:
    """There is a driver."""


def nvmlShutdown() -> None:
    """It stays."""


def nvmlDeviceGetCount() -> int:
    return CARDS


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return int(uuid[-1])


def nvmlDeviceGetUUID(card: int) -> str:
    return f"GPU-0000000{card}"


def nvmlDeviceGetName(card: int) -> str:
    return "a card on paper"


def nvmlDeviceGetPciInfo(card: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:0{card}:00.0")


def nvmlDeviceGetMemoryInfo(card: int) -> SimpleNamespace:
    return SimpleNamespace(total=80 << 30, used=1 << 20)


def nvmlDeviceGetComputeRunningProcesses(card: int) -> list[SimpleNamespace]:
    return []

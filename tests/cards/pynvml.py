"""NVML of a machine that has none: the real bindings' names and errors, the readings of `TEST_CARDS` H200 cards.

A folder for PYTHONPATH: whoever imports pynvml gets this. A card's holders are the living processes that see it and no
other, by their CUDA_VISIBLE_DEVICES, each with `HELD` bytes; so a test sees who would have been where.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HELD = 100 << 30
TOTAL = 150_754_820_096
"""An H200's, as NVML told it on 2026-11-30."""

_elsewhere = (Path(entry) / "pynvml.py" for entry in sys.path if Path(entry) != Path(__file__).parent)
_path = next(path for path in _elsewhere if path.exists())
_spec = importlib.util.spec_from_file_location("real_pynvml", _path)
assert _spec is not None
assert _spec.loader is not None
_real: Any = importlib.util.module_from_spec(_spec)
sys.modules["real_pynvml"] = _real  # the bindings look for themselves there
_spec.loader.exec_module(_real)


def __getattr__(name: str) -> Any:
    """Constants and errors are the bindings' own; a question that is not answered below is not supported."""
    found = getattr(_real, name)
    return _unsupported if name.startswith(("nvmlDevice", "nvmlSystem")) else found


def _unsupported(*words: Any) -> Any:
    raise _real.NVMLError(_real.NVML_ERROR_NOT_SUPPORTED)


def nvmlInit() -> None:
    """It is open as soon as it is asked."""


def nvmlShutdown() -> None:
    """Nothing to close."""


def nvmlSystemGetDriverVersion() -> str:
    return "580.159.04"


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13000


def nvmlDeviceGetCount() -> int:
    return int(os.environ["TEST_CARDS"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if not 0 <= index < nvmlDeviceGetCount():
        raise _real.NVMLError(_real.NVML_ERROR_INVALID_ARGUMENT)
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))


def nvmlDeviceGetUUID(card: int) -> str:
    return f"GPU-{card:08d}"


def nvmlDeviceGetName(card: int) -> str:
    return "NVIDIA H200"


def nvmlDeviceGetMemoryInfo(card: int) -> SimpleNamespace:
    return SimpleNamespace(total=TOTAL, used=HELD * len(nvmlDeviceGetComputeRunningProcesses(card)), free=0)


def nvmlDeviceGetComputeRunningProcesses(card: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=HELD) for pid in holders(card)]


def holders(card: int) -> list[int]:
    """Processes that were given this card and no other; those of TEST_MACHINE alone, where several play on one."""
    given = {"CUDA_VISIBLE_DEVICES": str(card), "TEST_MACHINE": os.environ.get("TEST_MACHINE", "")}
    marks = [f"\0{name}={value}\0".encode() for name, value in given.items() if value]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = b"\0" + (process / "environ").read_bytes()
            if all(mark in variables for mark in marks):
                found.append(int(process.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return found

"""NVIDIA GPUs, as NVML tells of them. `read` is the seam: tests hand canned readings in."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card: `index` in PCI bus order, memory in bytes, `pids` the processes that hold memory on it."""

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    pids: tuple[int, ...] = ()


def read() -> list[Gpu]:
    """All GPUs of this machine; raises PreflightError with NVML's own words where there are none to be had."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise PreflightError(
            f"no NVIDIA GPU can be reached: {error}", fix='set fleet.gpus = "none" to run without'
        ) from error
    try:
        return [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise PreflightError(f"NVML cannot read the GPUs: {error}", fix="nvidia-smi   shows more") from error
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    holders = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    uuid, name = (_text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle)))
    return Gpu(index, uuid, name, int(memory.total), int(memory.used), tuple(holders))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """What CUDA_VISIBLE_DEVICES leaves of the cards: by index, UUID or its beginning, in that order; unset: all.

    Like CUDA, it stops at the first name that fits no card.
    """
    if variable is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in variable.split(",")):
        found = find(gpus, name)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def find(gpus: Sequence[Gpu], name: str | int) -> Gpu | None:
    """The card of an index or of a UUID or its beginning."""
    text = str(name)
    if text.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(text)), None)
    return next((gpu for gpu in gpus if text and gpu.uuid.startswith(text)), None)


def choose(gpus: Sequence[Gpu], asked: str | Sequence[int | str]) -> list[Gpu]:
    """The cards a run may use: "all" that we see, or the named ones. Raises PreflightError naming the lack."""
    if isinstance(asked, str):
        chosen = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not chosen:
            raise PreflightError(
                "fleet.gpus asks for GPUs, and none is visible", fix='set fleet.gpus = "none" to run without'
            )
        return chosen
    chosen = []
    for name in asked:
        found = find(gpus, name)
        if found is None:
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
            raise PreflightError(f"fleet.gpus names {name!r}, and there is no such GPU; there are: {there}")
        if found in chosen:
            raise PreflightError(f"fleet.gpus names GPU {found.index} twice")
        chosen.append(found)
    return chosen

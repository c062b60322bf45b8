"""NVIDIA GPUs: what is known of each card, which ones a run may use, which ones it cannot.

What NVML tells; it is read in nvml.py, and tests hand canned readings in.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, or one slice of a card in MIG mode. What NVML does not tell is None (texts: empty).

    `index` counts in PCI bus order, as CUDA does under CUDA_DEVICE_ORDER=PCI_BUS_ID; memory is in bytes, power in
    milliwatts. `pids` are the processes that hold memory on it, as far as they can be seen from here. `cuda` is the
    newest CUDA that the driver reaches. `ecc_errors` are uncorrectable ones since the driver was loaded. `recovery` is
    what NVIDIA's own diagnosis asks for, "" for nothing. `lost` are NVML's words where the card cannot be asked.
    """

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    pids: tuple[int, ...] = ()
    bus: str = ""
    driver: str = ""
    cuda: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None
    mig: bool | None = None
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery: str | None = None
    throttled: tuple[str, ...] | None = None
    power_limit: int | None = None
    power_default: int | None = None
    lost: str = ""

    @property
    def is_slice(self) -> bool:
        return self.uuid.startswith("MIG-")

    @property
    def cuda_id(self) -> int | str:
        """What CUDA_VISIBLE_DEVICES calls it: its index, which every engine reads; a slice has only its UUID."""
        return self.uuid if self.is_slice else self.index

    @property
    def label(self) -> str:
        return f"GPU {self.cuda_id}"


def counted(gpus: Sequence[Gpu]) -> str:
    """How many of which, in words."""
    names = Counter(gpu.name for gpu in gpus)
    return " and ".join(f"{count} × {name}" for name, count in names.items()) or "no GPUs"


def trouble(gpu: Gpu) -> str:
    """Why nothing should be started on a card until somebody has seen to it; empty where nothing is known.

    What a card went through and recovered from (a row to be remapped at the next reset, an error in its log) is no
    reason: it works.
    """
    if gpu.lost:
        return f"it cannot be asked any more ({gpu.lost})"
    if gpu.recovery:
        return f"NVIDIA's diagnosis says: {gpu.recovery}"
    if gpu.remap_failed:
        return "a broken row of its memory could not be replaced"
    if gpu.mig and not gpu.is_slice:
        return "it is in MIG mode and has no instances"
    return ""


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
            raise PreflightError(f"fleet.gpus names {found.label} twice")
        chosen.append(found)
    return chosen


def lent(gpus: Sequence[Gpu], asked: Sequence[int | str]) -> None:
    """Raises PreflightError where a node of a cluster would use a named card that the cluster has not given it: by
    CUDA_VISIBLE_DEVICES, and as many as are named, whichever are free."""
    given = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if strange := [gpu.label for gpu in choose(gpus, asked) if gpu not in given]:
        has = ", ".join(gpu.label for gpu in given) or "none"
        words = f"fleet.gpus names {', '.join(strange)}, and the cluster has given this node {has}"
        fix = 'fleet.gpus = "all", and where this machine joins the cluster CUDA_VISIBLE_DEVICES with those it may use'
        raise PreflightError(words, fix=fix)

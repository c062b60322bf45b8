"""NVML's readings of each card. A field that a card, driver or container does not tell is None, never a guess."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tokenmill.errors import PreflightError
from tokenmill.machine import threads
from tokenmill.machine.gpus import Gpu

Value = TypeVar("Value")

ANSWER_S = 60.0
"""Without its persistence daemon the driver wakes eight cards one after another, in seconds each."""

_GONE = ["NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_UNKNOWN", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_CORRUPTED_INFOROM"]
"""What `nvidia-smi` shows as ERR!: the card is in the list, and cannot be asked."""


def read() -> list[Gpu]:
    """All cards of this machine, a card in MIG mode as its slices; raises PreflightError with NVML's own words."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise PreflightError(
            f"no NVIDIA GPU can be reached: {error}", fix='set fleet.gpus = "none" to run without'
        ) from error
    try:
        reader = _Reader(pynvml)
        return [card for index in range(pynvml.nvmlDeviceGetCount()) for card in reader.cards(index)]
    except pynvml.NVMLError as error:
        raise PreflightError(f"NVML cannot read the GPUs: {error}", fix="nvidia-smi   shows more") from error
    finally:
        pynvml.nvmlShutdown()


async def answer() -> list[Gpu]:
    """`read`, off the event loop; a PreflightError also where the driver does not answer."""
    found = await threads.reading(read, None, ANSWER_S)
    if found is None:
        words = f"NVML has not answered for {ANSWER_S:.0f} s"
        raise PreflightError(words, fix="nvidia-smi; dmesg -T | grep -i xid   show what is wrong with the driver")
    return found


class Meter:
    """What cards hold and do, asked for again and again: NVML stays open. Raises PreflightError where there is none."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._handles: dict[int | str, Any] = {}
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise PreflightError(f"no NVIDIA GPU can be reached: {error}") from error

    def read(self, card: int | str) -> tuple[int, int | None, dict[int, int | None], int] | None:
        """Bytes in use, percent of the last moments in which a kernel ran (a slice does not tell), who holds how many
        of them, all bytes of the card; None where it cannot be asked. `card` is an index in PCI order, or a UUID."""
        nvml = self._nvml
        try:
            if card not in self._handles:
                by_index = isinstance(card, int)
                find = nvml.nvmlDeviceGetHandleByIndex if by_index else nvml.nvmlDeviceGetHandleByUUID
                self._handles[card] = find(card)
            handle = self._handles[card]
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            self._handles.pop(card, None)
            return None
        try:
            percent: int | None = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:
            percent = None
        try:
            holders = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            holders = []
        held = {process.pid: process.usedGpuMemory for process in holders}
        return int(memory.used), percent, held, int(memory.total)


class _Reader:
    """One pass over the cards with an open NVML."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._driver = _text(self._ask(nvml.nvmlSystemGetDriverVersion) or "")
        version = self._ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        self._cuda = (version // 1000, version % 1000 // 10) if version else None
        self._gone = {getattr(nvml, name) for name in _GONE}

    def _ask(self, question: Callable[..., Value], *words: Any) -> Value | None:
        try:
            return question(*words)
        except self._nvml.NVMLError:
            return None

    def cards(self, index: int) -> list[Gpu]:
        """One card, or its slices."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            card = self._card(handle, index)
        except self._nvml.NVMLError as error:
            if error.value not in self._gone:
                raise
            return [Gpu(index, "", "a GPU", 0, 0, driver=self._driver, cuda=self._cuda, lost=str(error))]
        return self._slices(handle, card) if card.mig else [card]

    def _card(self, handle: Any, index: int) -> Gpu:
        nvml, ask = self._nvml, self._ask
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        holders = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        bus = ask(nvml.nvmlDeviceGetPciInfo, handle)
        remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle)
        mig = ask(nvml.nvmlDeviceGetMigMode, handle)
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        return Gpu(
            index,
            _text(nvml.nvmlDeviceGetUUID(handle)),
            _text(nvml.nvmlDeviceGetName(handle)),
            int(memory.total),
            int(memory.used),
            tuple(process.pid for process in holders),
            bus=_text(bus.busId) if bus else "",
            driver=self._driver,
            cuda=self._cuda,
            capability=ask(nvml.nvmlDeviceGetCudaComputeCapability, handle),
            mig=None if mig is None else mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
            ecc_errors=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            recovery=self._recovery(handle),
            throttled=self._throttled(handle),
            power_limit=ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
            power_default=ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
        )

    def _recovery(self, handle: Any) -> str | None:
        """What NVIDIA's own diagnosis asks for; "" where all is well."""
        nvml = self._nvml
        fields = self._ask(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if not fields or fields[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        names = {
            nvml.NVML_GPU_RECOVERY_ACTION_NONE: "",
            nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "reset the GPU",
            nvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "reboot the machine",
            nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "drain peer-to-peer traffic",
            nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "drain and reset the GPU",
        }
        action = int(fields[0].value.uiVal)
        return names.get(action, f"recovery action {action}")

    def _throttled(self, handle: Any) -> tuple[str, ...] | None:
        """Why the clocks are lower than they could be; being idle and a full load's own power limit are no reasons."""
        nvml = self._nvml
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if bits is None:
            return None
        reasons = {
            nvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
            nvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature (hardware)",
            nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
        }
        return tuple(word for bit, word in reasons.items() if bits & bit)

    def _slices(self, handle: Any, card: Gpu) -> list[Gpu]:
        """The instances of a card in MIG mode; the card itself where it has none yet, since nothing can run on it."""
        nvml, found = self._nvml, []
        for number in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if instance is None:
                continue
            memory = nvml.nvmlDeviceGetMemoryInfo(instance)
            holders = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, instance) or []
            found.append(
                replace(
                    card,
                    uuid=_text(nvml.nvmlDeviceGetUUID(instance)),
                    name=_text(nvml.nvmlDeviceGetName(instance)),
                    memory_total=int(memory.total),
                    memory_used=int(memory.used),
                    pids=tuple(process.pid for process in holders),
                )
            )
        return found or [card]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

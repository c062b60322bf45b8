"""NVML's answers as readings: a real H200's (driver 580.159), and those of cards that tell less, are gone or sliced."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tokenmill.errors import PreflightError
from tokenmill.machine import cards, gpus, nvml
from tokenmill.machine.gpus import Gpu
from tokenmill.machine.nvml import _Reader


class H200:
    """Answers as recorded on the card; `refused` are questions that it says NVML_ERROR_NOT_SUPPORTED to."""

    refused: frozenset[str] = frozenset()
    mig = 0
    nvmlDeviceGetMemoryInfo: Any
    nvmlDeviceGetUUID: Any

    def __getattr__(self, name: str) -> Any:
        if name in self.refused:
            return self._refuse
        return getattr(pynvml, name)

    def _refuse(self, *_: object) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.159.04")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 13000)

    def __init__(self) -> None:
        field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))
        answers: dict[str, Any] = {
            "HandleByIndex": "card",
            "PciInfo": SimpleNamespace(busId="00000000:00:06.0"),
            "UUID": "GPU-2bf7423f",
            "Name": "NVIDIA H200",
            "MemoryInfo": SimpleNamespace(total=150754820096, used=644939776),
            "RemappedRows": (0, 0, 0, 0),
            "CudaComputeCapability": (9, 0),
            "CurrentClocksEventReasons": 1,
            "EnforcedPowerLimit": 700000,
            "PowerManagementDefaultLimit": 700000,
            "ComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=29 << 20)],
            "MaxMigDeviceCount": 3,
            "TotalEccErrors": 0,
            "FieldValues": [field],
        }
        self.answers = answers
        for name in answers:
            if f"nvmlDeviceGet{name}" not in self.refused:
                setattr(self, f"nvmlDeviceGet{name}", lambda *_, name=name: self.answers[name])

    def nvmlDeviceGetMigMode(self, _: object) -> list[int]:
        return [self.mig, self.mig]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _: object, number: int) -> Any:
        return self._refuse() if number == 1 else f"slice {number}"


HEALTHY = Gpu(
    0,
    "GPU-2bf7423f",
    "NVIDIA H200",
    150754820096,
    644939776,
    (7,),
    bus="00000000:00:06.0",
    driver="580.159.04",
    cuda=(13, 0),
    capability=(9, 0),
    mig=False,
    ecc_errors=0,
    remap_pending=False,
    remap_failed=False,
    recovery="",
    throttled=(),
    power_limit=700000,
    power_default=700000,
)


def test_a_real_cards_answers() -> None:
    assert _Reader(H200()).cards(0) == [HEALTHY]
    assert gpus.trouble(HEALTHY) == ""


def test_what_a_card_does_not_tell_is_unknown() -> None:
    class Older(H200):
        refused = frozenset(
            f"nvmlDeviceGet{name}"
            for name in ("RemappedRows", "TotalEccErrors", "FieldValues", "CurrentClocksEventReasons", "PciInfo")
        )

    unknown: dict[str, Any] = {
        "remap_pending": None,
        "remap_failed": None,
        "ecc_errors": None,
        "recovery": None,
        "throttled": None,
    }
    assert _Reader(Older()).cards(0) == [replace(HEALTHY, **unknown, bus="")]


@pytest.mark.parametrize(
    ("answers", "reading"),
    [
        ({"RemappedRows": (0, 2, 1, 1)}, {"remap_pending": True, "remap_failed": True}),
        ({"CurrentClocksEventReasons": 0x20 | 0x4}, {"throttled": ("temperature",)}),
        ({"TotalEccErrors": 3}, {"ecc_errors": 3}),
        (
            {"FieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=1))]},
            {"recovery": "reset the GPU"},
        ),
        ({"FieldValues": [SimpleNamespace(nvmlReturn=2, value=SimpleNamespace(uiVal=0))]}, {"recovery": None}),
    ],
)
def test_a_sick_cards_answers(answers: dict[str, Any], reading: dict[str, Any]) -> None:
    nvml = H200()
    nvml.answers |= answers
    assert _Reader(nvml).cards(0) == [replace(HEALTHY, **reading)]


def test_a_lost_card_stays_in_the_list_and_other_errors_are_errors() -> None:
    def lost(_: object) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    nvml = H200()
    nvml.nvmlDeviceGetMemoryInfo = lost
    (card,) = _Reader(nvml).cards(3)
    assert (card.index, card.lost) == (3, "GPU is lost")
    assert "cannot be asked any more" in gpus.trouble(card)
    nvml.nvmlDeviceGetMemoryInfo = nvml._refuse
    with pytest.raises(pynvml.NVMLError):
        _Reader(nvml).cards(3)


def test_a_card_in_mig_mode_is_its_slices() -> None:
    nvml = H200()
    nvml.mig = 1
    nvml.nvmlDeviceGetUUID = lambda handle: "GPU-2bf7423f" if handle == "card" else f"MIG-{handle[-1]}"
    found = _Reader(nvml).cards(2)
    assert [(card.index, card.uuid, card.cuda_id) for card in found] == [(2, "MIG-0", "MIG-0"), (2, "MIG-2", "MIG-2")]
    nvml.answers["MaxMigDeviceCount"] = 0
    (card,) = _Reader(nvml).cards(2)
    assert "has no instances" in gpus.trouble(card)


def test_without_a_driver_the_error_says_what_to_do() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(PreflightError) as caught:
            nvml.read()
        assert "fleet.gpus" in caught.value.fix
    else:
        assert nvml.read()


# -- asked again and again ---------------------------------------------------------------------------------------------
def meter(card: H200, monkeypatch: pytest.MonkeyPatch) -> nvml.Meter:
    monkeypatch.setattr(card, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=100), raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    found = nvml.Meter()
    found._nvml = card
    return found


def test_a_meter_tells_memory_use_and_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meter(H200(), monkeypatch).read(0) == (644939776, 100, {7: 29 << 20}, 150754820096)


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ("nvmlDeviceGetUtilizationRates", (644939776, None, {7: 29 << 20}, 150754820096)),  # a slice does not tell
        ("nvmlDeviceGetComputeRunningProcesses", (644939776, 100, {}, 150754820096)),
        ("nvmlDeviceGetMemoryInfo", None),
        ("nvmlDeviceGetHandleByIndex", None),
    ],
)
def test_what_a_meter_is_not_told_is_unknown(refused: str, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card = H200()
    found = meter(card, monkeypatch)
    monkeypatch.setattr(card, refused, card._refuse)
    assert found.read(0) == told


def test_a_machine_without_a_driver_has_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with pytest.raises(PreflightError, match="no NVIDIA GPU can be reached"):
        nvml.Meter()
    assert cards.Cards().use((0,)) is None
    assert cards.Cards().take((0,), 0) == (None,)

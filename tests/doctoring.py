"""A doctor's context with readings that a test decides: no GPU, environment or kernel log is asked."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.conftest import write_prompts
from tokenmill import configfile
from tokenmill.checks.base import Context, Finding
from tokenmill.folder import RunFolder
from tokenmill.machine.gpus import Gpu
from tokenmill.machine.packages import Package
from tokenmill.machine.probe import Probe
from tokenmill.machine.room import Room


def context(folder: Path, ours: Iterable[Any] = (), **sections: Any) -> Context:
    """A context on a config of these sections over 40 prompts; the run folder lies in `folder`."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts, 40)
    data: dict[str, Any] = {"prompts": {"path": str(prompts)}, "output": {"dir": str(folder / "runs")}}
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    made = configfile.validate(data, str(folder / "test.toml"))
    return Context(
        made,
        RunFolder(made.folder),
        list(ours),
        read_gpus=lambda: list(CARDS),
        read_kernel_log=lambda: "",
        read_package=lambda *_: Package("1.0"),
        read_mounts=lambda: MOUNTS,
        read_speed=lambda _: FAST,
        read_room=lambda: ROOM,
    )


CARDS = [
    Gpu(
        index=number,
        uuid=f"GPU-{number}{number}{number}{number}-aa",
        name="NVIDIA B200",
        memory_total=183 * 10**9,
        memory_used=10**9,
        bus=f"00000000:{number + 1:02X}:00.0",
        driver="580.95.05",
        cuda=(13, 0),
        capability=(10, 0),
        mig=False,
        ecc_errors=0,
        remap_pending=False,
        remap_failed=False,
        recovery="",
        throttled=(),
        power_limit=1_000_000,
        power_default=1_000_000,
    )
    for number in range(7)
]
"""The reference machine's cards, in good health and idle."""

MOUNTS = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n25 22 0:23 / /dev/shm rw - tmpfs tmpfs rw\n"
"""One local disk and a RAM disk."""

FAST = Probe(stat_ms=0.003, read_mb_s=2000.0, parallel_mb_s=4000.0, cached=True)

ROOM = Room(
    shm_total=923 * 10**9,
    shm_free=923 * 10**9,
    memory=1500 * 10**9,
    machine=1800 * 10**9,
    files=1 << 20,
    leaked=[],
    removes_ipc=False,
)
"""The reference machine's."""

Check = Callable[[Context], Iterable[Finding]]


def told(check: Check, found: Context, *levels: str) -> list[str]:
    """The messages of a check's findings with one of these levels (without: all above ok)."""
    wanted = levels or ("warn", "fail", "unknown")
    return [finding.message for finding in check(found) if finding.level in wanted]


def levels(check: Check, found: Context) -> list[str]:
    return [finding.level for finding in check(found)]

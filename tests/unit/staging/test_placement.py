"""Where a model is loaded from: by the source's kind and speed, and by the room there is (case C04)."""

from pathlib import Path

import pytest

from tokenmill.machine.filesystems import Mount
from tokenmill.machine.probe import Probe
from tokenmill.staging.placement import Place, Source, decide

GB = 10**9
RAM = Place(Path("/dev/shm/tokenmill-0"), "RAM disk", 900 * GB, 56 * GB)
DISK = Place(Path("/cache"), "local disk", 180 * GB, 10 * GB)
SLOW, FAST = Probe(5.0, 129.0, 900.0, False), Probe(0.1, 2400.0, 2500.0, True)


def source(kind: str, probe: Probe | None = SLOW, size: int = 54 * GB) -> Source:
    return Source(Mount("/models", kind, ""), size, probe)


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.gcsfuse", "fuse.juicefs", "fuse", "9p", "virtiofs"])
def test_from_a_slow_mount_to_ram_and_it_says_why(kind: str) -> None:
    plan = decide(source(kind), (RAM, DISK))
    assert plan.place is RAM
    assert plan.why == (
        f"{kind} is a network mount that reads 129 MB/s, 900 with several at once; the RAM disk has room"
    )


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "tmpfs", "fuse.fuse-overlayfs", "fuseblk"])
def test_a_local_file_system_is_left_alone(kind: str) -> None:
    assert decide(source(kind, None), (RAM, DISK)).place is None


def test_a_network_mount_as_fast_as_a_disk_is_left_alone() -> None:
    plan = decide(source("lustre", FAST), (RAM, DISK))
    assert (plan.place, plan.why) == (None, "lustre is a network mount, but reads 2,400 MB/s and is kept in memory")


@pytest.mark.parametrize("probe", [Probe(0.1, 2400.0, 2500.0, False), Probe(9.0, 2400.0, 2500.0, True), Probe(), None])
def test_a_mount_that_keeps_nothing_in_memory_or_was_not_measured_is_slow(probe: Probe | None) -> None:
    assert decide(source("lustre", probe), (RAM, DISK)).place is RAM


def test_without_room_in_ram_the_disk_is_next_and_then_nothing() -> None:
    assert decide(source("nfs", size=850 * GB), (RAM, DISK)).place is None
    tight = Place(RAM.root, "RAM disk", 100 * GB, 56 * GB)
    assert decide(source("nfs"), (tight, DISK)).place is DISK
    full = Place(DISK.root, "local disk", 60 * GB, 10 * GB)
    assert decide(source("nfs"), (tight, full)).why.endswith(
        "there is no room: 54.0 GB are needed; the RAM disk has 100.0 GB, of which 56.0 GB stay free; "
        "the local disk has 60.0 GB, of which 10.0 GB stay free"
    )


def test_a_cache_on_a_network_mount_is_no_better_than_the_source() -> None:
    assert decide(source("nfs"), (Place(DISK.root, "local disk", DISK.free, DISK.reserve, slow=True),)).place is None

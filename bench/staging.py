"""Staging against cp and dd: a mount with 4 ms a read (tests/slowfs.py), a RAM disk, a disk. Ratios within one run.

Every contestant reads a cold source: the page cache is told to forget it before each. On a disk all of them sync.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slowfs import mounted
from tests.staging import contents, staging_config, write_model

from tokenmill import stage
from tokenmill.machine import filesystems

FILES, ROUNDS = 4, 5
RAM = Path("/dev/shm")

Contestant = Callable[[Path, Path], object]


def measure_all(scratch: Path, megabytes: int) -> Iterator[tuple[str, str, str, str]]:
    """Rows: what, goal, ratio and rates here, the best other's rate."""
    model = write_model(scratch / "model", shards=FILES, size=megabytes * 10**6)
    size = f"{FILES} files of {megabytes} MB"
    with _folder(RAM if filesystems.mount_of(RAM).is_ram else scratch) as ram:
        with mounted(model, scratch / "mount") as mount:
            yield _row(f"staging ÷ cp, 4 ms a read, {size}", "≥ 10", mount, ram, {"cp": _cp})
        assert contents(model), "the source is still there"
        others: dict[str, Contestant] = {"cp": _cp, "dd": _dd}
        shutil.copytree(model, ram / "model")
        yield _row(f"staging ÷ best of cp and dd, RAM disk to RAM disk, {size}", "≥ 0.9", ram / "model", ram, others)
        shutil.rmtree(ram / "model")
    with _folder(scratch) as disk:
        yield _row(f"staging ÷ best of cp and dd, disk to disk, synced, {size}", "≥ 0.9", model, disk, others)


def _row(what: str, goal: str, source: Path, root: Path, others: dict[str, Contestant]) -> tuple[str, str, str, str]:
    """Rates are the best of rounds in which all take turns: what else runs on the machine only makes a round slower."""
    rates: dict[str, list[float]] = {name: [] for name in ("staging", *others)}
    total = sum(path.stat().st_size for path in source.iterdir())
    for _ in range(ROUNDS):
        for name, contestant in {"staging": _stage, **others}.items():
            _forget(source)
            began = time.perf_counter()
            contestant(source, root / "copy")
            rates[name].append(total / 1e6 / (time.perf_counter() - began))
            _remove(root / "copy")
    fastest = {name: max(found) for name, found in rates.items()}
    best = max(others, key=lambda name: fastest[name])
    here = f"{fastest['staging'] / fastest[best]:.2f} ({fastest['staging']:,.0f} MB/s)"
    return what, goal, here, f"{best} {fastest[best]:,.0f} MB/s"


def _stage(source: Path, target: Path) -> None:
    stage.stage(staging_config(source, target)).close()


def _cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-rL", str(source), str(target)], check=True)
    _sync(target)


def _dd(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        words = [f"if={path}", f"of={target / path.name}", "bs=16M", "status=none"]
        subprocess.run(["dd", *words], check=True)
    _sync(target)


def _sync(target: Path) -> None:
    for path in target.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _forget(source: Path) -> None:
    for path in source.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _remove(target: Path) -> None:
    shutil.rmtree(target)


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    path = parent / f"tokenmill-bench-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)

"""Memory that may still be used: the least of all cgroups above us, of either version."""

from pathlib import Path

import pytest

from tokenmill.machine import memory

GB = 10**9


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def room(root: Path, membership: str) -> list[int]:
    (root / "membership").write_text(membership)
    return sorted(memory._cgroup_room(root, root / "membership"))


def test_version_two_counts_every_group_above_and_the_files_that_can_go(tmp_path: Path) -> None:
    group(
        tmp_path / "a", memory__max=str(8 * GB), memory__current=str(5 * GB), memory__stat=f"anon 1\ninactive_file {GB}"
    )
    group(tmp_path / "a/b", memory__max="max", memory__current=str(4 * GB))
    group(tmp_path / "a/b/c", memory__max=str(3 * GB), memory__current=str(2 * GB))
    assert room(tmp_path, "0::/a/b/c\n") == [GB, 4 * GB]


def test_version_one_counts_the_memory_controller(tmp_path: Path) -> None:
    files = {"memory__limit_in_bytes": str(4 * GB), "memory__usage_in_bytes": str(3 * GB)}
    group(tmp_path / "memory/docker/x", **files, memory__stat=f"inactive_file 5\ntotal_inactive_file {GB}")
    assert room(tmp_path, "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/docker/x\n") == [2 * GB]


@pytest.mark.parametrize("membership", ["", "nonsense", "0::/gone/away\n", "4:memory:/gone\n", "0::/\n"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, membership: str) -> None:
    group(tmp_path / "memory")
    assert room(tmp_path, membership) == []


def test_the_root_of_a_container_counts_too(tmp_path: Path) -> None:
    group(tmp_path, memory__max=str(2 * GB), memory__current=str(GB))
    assert room(tmp_path, "0::/\n") == [GB]


def test_this_machine_has_some() -> None:
    assert 0 < memory.available() < 1 << 50

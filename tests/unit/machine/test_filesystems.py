"""What a path really lies on: links followed, the deepest mount taken, FUSE told apart (cases C04)."""

from pathlib import Path

import pytest

from tokenmill.machine import filesystems
from tokenmill.machine.filesystems import Mount, mount_of


def table(*mounts: tuple[object, str]) -> str:
    """A text in the form of /proc/self/mountinfo."""
    lines = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
    lines += [f"{23 + n} 22 0:{n} / {point} rw shared:{n} - {kind} src{n} rw" for n, (point, kind) in enumerate(mounts)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "9p", "virtiofs")),
        *((kind, True) for kind in ("fuse", "fuse.gcsfuse", "fuse.juicefs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone")),
        *((kind, False) for kind in ("ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs")),
        *((kind, False) for kind in ("fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.lxcfs")),
    ],
)
def test_network_file_systems_are_told_from_local_ones(tmp_path: Path, kind: str, network: bool) -> None:
    found = mount_of(tmp_path / "model", table((tmp_path, kind)))
    assert (found.kind, found.is_network, found.is_ram) == (kind, network, kind == "tmpfs")


def test_a_link_from_a_local_folder_leads_to_the_network(tmp_path: Path) -> None:
    (tmp_path / "net" / "model").mkdir(parents=True)
    (tmp_path / "local").symlink_to(tmp_path / "net" / "model")
    assert mount_of(tmp_path / "local" / "config.json", table((tmp_path / "net", "nfs4"))).kind == "nfs4"


def test_the_deepest_mount_and_the_latest_of_equals_hold_a_path(tmp_path: Path) -> None:
    text = table(
        (tmp_path / "a", "nfs"), (tmp_path / "a/b", "xfs"), (tmp_path / "c", "autofs"), (tmp_path / "c", "nfs4")
    )
    kinds = {name: mount_of(tmp_path / name, text).kind for name in ("a", "a/x", "a/b", "a/b/x", "a/bb", "c/x", "d")}
    assert kinds == {"a": "nfs", "a/x": "nfs", "a/b": "xfs", "a/b/x": "xfs", "a/bb": "nfs", "c/x": "nfs4", "d": "ext4"}


def test_spaces_and_backslashes_of_a_mount_point_are_read() -> None:
    line = r"25 22 0:5 / /mnt/my\040disk\134x\011y rw - ext4 /dev/disk\040one rw"
    assert filesystems.parse(line) == [Mount("/mnt/my disk\\x\ty", "ext4", "/dev/disk one")]


def test_lines_of_another_form_are_passed_over() -> None:
    assert filesystems.parse("\nnonsense\n1 2 3 - ext4 x\n") == []
    assert filesystems.parse("1 2 3 / /a rw - ext4 x") == [Mount("/a", "ext4", "x")]
    assert mount_of(Path("/a"), "").kind == "unknown"


def test_this_machines_own_mounts_are_read(tmp_path: Path) -> None:
    assert mount_of(Path("/proc/self")).kind == "proc"
    assert mount_of(Path("/dev/shm")).is_ram
    assert filesystems.free_bytes(tmp_path / "not" / "yet" / "there") > 0


def test_the_size_of_a_model_follows_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").symlink_to(tmp_path / "blob")
    (folder / "config.json").write_bytes(b"{}")
    assert filesystems.size_of(folder) == 7
    assert filesystems.size_of(folder / "weights") == 5

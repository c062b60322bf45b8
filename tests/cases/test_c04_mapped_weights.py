"""C04: weights on a network mount are found through every link, brought near in parallel, and the rate is told."""

import re
from pathlib import Path

import pytest

from tests.conftest import Slow
from tests.staging import contents, staging_config, write_model
from tests.unit.machine.test_filesystems import table
from tokenmill import stage
from tokenmill.machine import filesystems
from tokenmill.machine.filesystems import mount_of
from tokenmill.staging import placement
from tokenmill.staging.placement import Place, Source, decide


@pytest.mark.parametrize(
    ("kind", "staged"),
    [("nfs4", True), ("lustre", True), ("fuse.gcsfuse", True), ("fuse.juicefs", True), ("ext4", False)],
)
@pytest.mark.parametrize("through", ["folder", "link to the folder", "links to the files"])
def test_the_real_files_mount_decides(tmp_path: Path, kind: str, staged: bool, through: str) -> None:
    model = write_model(tmp_path / "net" / "model")
    path = {"folder": model, "link to the folder": tmp_path / "link", "links to the files": tmp_path / "local"}[through]
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "local").mkdir()
    for file in model.iterdir():
        (tmp_path / "local" / file.name).symlink_to(file)
    largest = max(path.iterdir(), key=lambda file: file.stat().st_size)
    mount = mount_of(largest, table((tmp_path / "net", kind)))
    plan = decide(Source(mount, 54 * 10**9), (Place(Path("/ram"), "RAM disk", 10**12, 10**9),))
    assert (plan.place is not None, mount.kind) == (staged, kind)


def test_a_model_on_a_real_slow_mount_is_staged_by_itself(
    tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "link").symlink_to(slow(model))
    place = Place(tmp_path / "ram", "RAM disk", 10**12, 10**9)
    monkeypatch.setattr(placement, "places", lambda servers, keep="": (place,))
    monkeypatch.setattr(placement, "roots", lambda: (place.root,))
    said: list[str] = []
    staged = stage.stage(staging_config(tmp_path / "link", "auto"), said.append)
    assert staged.path is not None
    assert not filesystems.mount_of(staged.path).is_network
    assert contents(staged.path) == contents(model)
    assert re.search(r"fuse\.slowfs is a network mount that reads [\d,]+ MB/s, .*; the RAM disk has room", said[0])
    assert re.search(r"staged 9\.0 MB in [\d.]+ s, [\d.]+ GB/s, verified", said[-1])
    staged.close()

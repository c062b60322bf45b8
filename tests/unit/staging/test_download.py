"""A hub id: fetched straight to where it is loaded from, checked against the hub's list, resumed, asked for once.

The hub is a folder here: what is fetched from it comes file by file, as huggingface_hub's download to a folder does.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.staging import contents, staging_config, write_model
from tokenmill import stage
from tokenmill.errors import PluginError, PreflightError, StoppedError
from tokenmill.staging import download
from tokenmill.staging.download import HubFile

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class FolderHub:
    """A hub that serves one folder. `breaks_after` files the connection breaks, once; `spoils` a file's last byte."""

    folder: Path
    cache: Path | None = None
    breaks_after: int = 1000
    spoils: str = ""
    offline: bool = False
    fetched: list[str] = field(default_factory=list)

    def cached(self, name: str, revision: str) -> Path | None:
        return self.cache

    def listing(self, name: str, revision: str) -> tuple[str, tuple[HubFile, ...]]:
        if self.offline:
            raise PluginError("asking the hub for org/tiny: ConnectError: no network")
        found = sorted(contents(self.folder).items())
        hashes = ((file, data, hashlib.sha256(data).hexdigest()) for file, data in found)
        return COMMIT, tuple(HubFile(file, len(data), f"sha256:{value}") for file, data, value in hashes)

    def fetch(self, name: str, commit: str, folder: Path) -> None:
        assert commit == COMMIT
        (folder / ".cache" / "huggingface").mkdir(parents=True, exist_ok=True)
        for file, data in sorted(contents(self.folder).items()):
            if (folder / file).exists():
                continue
            if len(self.fetched) == self.breaks_after:
                self.breaks_after = 1000
                raise PluginError("fetching org/tiny: ReadTimeout: the connection broke")
            self.fetched.append(file)
            (folder / file).write_bytes(data[:-1] + b"?" if file == self.spoils else data)


@pytest.fixture
def hub(tmp_path: Path) -> FolderHub:
    return FolderHub(write_model(tmp_path / "hub"))


def test_it_is_fetched_straight_to_the_place_and_the_hub_is_not_asked_again(tmp_path: Path, hub: FolderHub) -> None:
    config, said = staging_config("org/tiny", tmp_path / "root"), list[str]()
    staged = stage.stage(config, said.append, hub=hub)
    assert staged.path == tmp_path / "root" / f"org--tiny-{COMMIT[:12]}"
    assert contents(staged.path) == contents(hub.folder)
    assert not (staged.path / ".cache").exists()
    assert config.served_name == "tiny"
    assert stage.resolve(config, hub=FolderHub(hub.folder, offline=True)) == staged.path
    assert len(hub.fetched) == len(set(hub.fetched)) == len(contents(hub.folder))
    staged.close()


def test_a_broken_download_goes_on_with_what_is_there(tmp_path: Path, hub: FolderHub) -> None:
    config = staging_config("org/tiny", tmp_path / "root")
    hub.breaks_after = 3
    with pytest.raises(PreflightError, match=r"org/tiny could not be fetched: .*the connection broke"):
        stage.stage(config, hub=hub)
    assert [path.name for path in (tmp_path / "root").iterdir() if not path.name.startswith(".")] == []
    staged = stage.stage(config, hub=hub)
    assert staged.path is not None
    assert contents(staged.path) == contents(hub.folder)
    assert len(hub.fetched) == len(set(hub.fetched)), "nothing is fetched twice"
    staged.close()


def test_what_the_hubs_own_cache_holds_whole_is_used(tmp_path: Path, hub: FolderHub) -> None:
    hub.cache = write_model(tmp_path / "cache")
    assert stage.resolve(staging_config("org/tiny", tmp_path / "root"), hub=hub) == hub.cache
    (hub.cache / "model-00001-of-00003.safetensors").unlink()
    assert stage.resolve(staging_config("org/tiny", tmp_path / "root"), hub=hub).parent == tmp_path / "root"


@pytest.mark.parametrize("verify", ["fast", "sha256"])
def test_spoilt_bytes_are_found_by_sha256_and_fetched_anew(tmp_path: Path, hub: FolderHub, verify: str) -> None:
    hub.spoils = "model-00002-of-00003.safetensors"
    config = staging_config("org/tiny", tmp_path / "root", verify=verify)
    if verify == "fast":
        stage.stage(config, hub=hub).close()
        return
    with pytest.raises(PreflightError, match=r"model-00002-of-00003\.safetensors has sha256:\w+, the hub says sha256:"):
        stage.stage(config, hub=hub)
    hub.spoils = ""
    staged = stage.stage(config, hub=hub)
    assert staged.path is not None
    assert contents(staged.path) == contents(hub.folder)
    staged.close()


def test_without_a_network_the_error_says_what_was_wanted(tmp_path: Path, hub: FolderHub) -> None:
    hub.offline = True
    with pytest.raises(PreflightError, match=r"model.path = org/tiny is no folder and cannot be fetched: .*no network"):
        stage.stage(staging_config("org/tiny", tmp_path / "root"), hub=hub)


def test_a_stop_ends_the_wait_for_a_download(tmp_path: Path, hub: FolderHub) -> None:
    with pytest.raises(StoppedError, match="the next start goes on with it"):
        download._fetch(
            download.Order("org/tiny", "", "fast", lambda name: (), lambda text: None, lambda: True),
            hub,
            COMMIT,
            tmp_path,
            100,
            lock=None,  # type: ignore[arg-type]
        )

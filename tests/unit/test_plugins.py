"""Names to classes: built-in and by entry point; what is not ours fails as a plug-in's error, once."""

import sys
from pathlib import Path

import pytest

from tokenmill import plugins
from tokenmill.engines.base import Engine
from tokenmill.errors import PluginError, TokenmillError, UsageError, boundary
from tokenmill.formats.base import Format


@pytest.mark.parametrize("name", plugins.TABLES["engines"])
def test_every_built_in_engine_loads_under_its_name(name: str) -> None:
    kind = plugins.load("engines", name)
    assert issubclass(kind, Engine)
    assert kind.kind == name
    kind()


@pytest.mark.parametrize("name", plugins.TABLES["formats"])
def test_every_built_in_format_loads_under_its_name(name: str) -> None:
    kind = plugins.load("formats", name)
    assert issubclass(kind, Format)
    assert kind.name == name
    kind(several=False)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of somebody's that adds two engines, one of which cannot be imported."""
    info = tmp_path / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tokenmill.engines]\nmine = somebodys_engine:Mine\nbroken = somebodys_broken:Mine\n"
    )
    (tmp_path / "somebodys_engine.py").write_text(
        "from tokenmill.engines.openai import OpenAI\nclass Mine(OpenAI):\n    kind = 'mine'\n"
    )
    (tmp_path / "somebodys_broken.py").write_text("raise RuntimeError('no such device')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.usefixtures("installed")
def test_a_package_adds_an_engine_by_entry_point() -> None:
    assert plugins.names("engines")[-2:] == ["broken", "mine"]
    assert plugins.load("engines", "mine").kind == "mine"


@pytest.mark.usefixtures("installed")
def test_a_plug_in_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(PluginError, match="engine broken from somebodys_broken:Mine: RuntimeError: no such device"):
        plugins.load("engines", "broken")


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no engine named 'x'") as caught:
        plugins.load("engines", "x")
    assert caught.value.fix.startswith("one of: sglang, vllm")


def test_a_typed_error_passes_the_boundary_as_it_is() -> None:
    with pytest.raises(UsageError, match=r"^ours$"), boundary("somewhere"):
        raise UsageError("ours")


def test_every_error_has_an_exit_code_of_the_table() -> None:
    def below(kind: type[TokenmillError]) -> set[type[TokenmillError]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    assert {kind.exit_code for kind in below(TokenmillError)} == {1, 2, 3, 4, 5, 6, 130}

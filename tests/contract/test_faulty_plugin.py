"""A plug-in of someone's own, found by its entry point, whose methods have bugs: named, and never the run's end."""

import asyncio
from pathlib import Path

import pytest

from tests import bynumber
from tests.conftest import free_port
from tests.harness import Case
from tokenmill import configfile, plugins
from tokenmill.errors import NoServerError
from tokenmill.node import LocalNode

SOURCE = """
from tokenmill.engines.fake import Fake

class Faulty(Fake):
    kind = "faulty"

    def {method}(self, *args, **kwargs):
        raise KeyError("a bug of its own")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a package's metadata, as pip leaves it."""
    info = tmp_path / "site" / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(info.parent)
    return info


@pytest.mark.parametrize(
    "method", ["command", "phase", "stranger", "info", "encode", "decode", "own_rendering", "load", "diagnose"]
)
def test_a_bug_in_a_plug_in_is_its_servers_failure(install: Path, tmp_path: Path, method: str) -> None:
    module = f"faulty_{method}"
    (install / "entry_points.txt").write_text(f"[tokenmill.engines]\nfaulty = {module}:Faulty\n")
    (install.parent / f"{module}.py").write_text(SOURCE.format(method=method))
    assert "faulty" in plugins.names("engines")

    case = Case(tmp_path, free_port())
    args = {"slots": 1} if method != "diagnose" else {"no-such-flag": True}
    model = {"path": str(tmp_path)}
    case.write(
        model=model,
        engine={"kind": "faulty", "args": args},
        fleet={"servers": 1, "restarts_per_hour": 0, "give_up": "5s"},
    )
    case.run_folder.create()
    node = LocalNode(configfile.load(case.config), case.run_folder, "settings-1", [])
    try:
        with pytest.raises(NoServerError, match="engine faulty: KeyError: 'a bug of its own'"):
            asyncio.run(asyncio.wait_for(node.run(), 30.0))
        assert [pid for entry in case.run_folder.state().servers for pid in bynumber.members(-1, entry.nonce)] == []
    finally:
        case.cleanup()

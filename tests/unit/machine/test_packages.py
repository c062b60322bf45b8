"""What an engine's own environment holds, asked of its own interpreter."""

import sys
from pathlib import Path

import pytest

from tokenmill.errors import PreflightError
from tokenmill.machine import packages


def test_a_distribution_and_its_files_are_found() -> None:
    found = packages.read(sys.executable, "msgspec", ("msgspec/_json_schema.py", "msgspec/none*.py"))
    assert found.version
    assert list(found.sources) == ["msgspec/_json_schema.py"]
    assert "def schema" in found.sources["msgspec/_json_schema.py"]


def test_what_is_not_installed_has_no_version() -> None:
    found = packages.read(sys.executable, "no-such-distribution-at-all", ("**/*.py",))
    assert (found.version, found.sources, found.needs, found.prefix) == ("", {}, {}, sys.prefix)


def test_an_interpreter_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"none/python: no such file"):
        packages.read(str(tmp_path / "none" / "python"), "x")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken environment >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(PreflightError, match="does not run: broken environment"):
        packages.read(str(broken), "x")
    broken.chmod(0o644)
    with pytest.raises(PreflightError, match="does not run"):
        packages.read(str(broken), "x")

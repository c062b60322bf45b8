"""C35: kernels that do not fit the engine are told from metadata, before an import or the first request fails.

The environment is a real one: dist-info folders on the PYTHONPATH of the engine's interpreter, as an installer writes.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctoring import CARDS, context
from tokenmill.checks.base import Context, Finding
from tokenmill.checks.engine import check_engine
from tokenmill.checks.needs import unmet
from tokenmill.machine import packages

FITTING = {
    "torch": "2.11.0+cu130",
    "sglang-kernel": "0.4.2",
    "flashinfer_python": "0.6.8.post1",
    "transformers": "5.6.0",
}
NEEDS = ["torch==2.11.0", "sglang-kernel==0.4.2", "flashinfer_python==0.6.8.post1", "transformers==5.6.0"]


def dist(site: Path, name: str, version: str, needs: list[str], extras: list[str] | None = None) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras or []] + [f"Requires-Dist: {need}" for need in needs]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def environment(
    tmp_path: Path, installed: dict[str, str], needs: list[str] | None = None, cuda: str = "13.0", **others: Any
) -> Context:
    """An engine's environment with these distributions; `others` are needs of some of them, by import name."""
    site = tmp_path / "site"
    dist(site, "sglang", "0.5.11", NEEDS if needs is None else needs, ["srt", "cpu"])
    for name, version in installed.items():
        dist(site, name, version, others.get(name.replace("-", "_"), []))
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text(f"__version__ = '2'\ncuda: Optional[str] = '{cuda}'\nhip = None\n")
    found = context(tmp_path, engine={"env": {"PYTHONPATH": str(site)}}, model={"path": "/models/m"})
    found.read_package = packages.read
    return found


def complaints(found: Context) -> list[Finding]:
    """Findings above ok, but for the flags: these environments hold no sources."""
    wanted = [finding for finding in check_engine(found) if finding.level in ("warn", "fail")]
    return [finding for finding in wanted if not finding.subject.startswith("engine.")]


def test_an_environment_that_fits_leaves_no_complaint(tmp_path: Path) -> None:
    assert complaints(environment(tmp_path, FITTING)) == []


def test_a_wrong_kernel_package_is_one_clear_line_with_found_and_wanted(tmp_path: Path) -> None:
    (finding,) = complaints(environment(tmp_path, {**FITTING, "sglang-kernel": "0.4.0rc1"}))
    assert finding.message == "sglang asks for sglang-kernel==0.4.2, and 0.4.0rc1 is installed"
    assert finding.level == "fail", "SGLang compares it at its start and ends"
    assert finding.fix.endswith("-m pip install 'sglang-kernel==0.4.2'")


@pytest.mark.parametrize(
    ("changed", "told", "level"),
    [
        ({"torch": "2.12.0+cu130"}, "sglang asks for torch==2.11.0, and 2.12.0+cu130 is installed", "warn"),
        ({"transformers": "5.19.0"}, "sglang asks for transformers==5.6.0, and 5.19.0 is installed", "warn"),
        ({"flashinfer_python": "0.7.2"}, "asks for flashinfer_python==0.6.8.post1, and 0.7.2 is installed", "warn"),
        ({"flashinfer_python": ""}, "asks for flashinfer_python==0.6.8.post1, and nothing is installed", "warn"),
    ],
)
def test_a_silent_upgrade_is_told(tmp_path: Path, changed: dict[str, str], told: str, level: str) -> None:
    installed = {name: version for name, version in {**FITTING, **changed}.items() if version}
    (finding,) = complaints(environment(tmp_path, installed))
    assert (told in finding.message, finding.level) == (True, level)


def test_packages_that_are_missing_are_told_in_one_line(tmp_path: Path) -> None:
    """A pruned SGLang 0.5.11 served for hours without IPython, anthropic, modelscope, kernels and flashinfer_cubin."""
    needs = [*NEEDS, "IPython", "anthropic>=0.20.0"]
    (finding,) = complaints(environment(tmp_path, FITTING, needs))
    assert finding.message == "sglang asks for IPython, anthropic>=0.20.0, and none of them is installed"
    assert finding.fix.endswith("-m pip install 'IPython' 'anthropic>=0.20.0'")


def test_what_was_compiled_against_another_torch_is_told(tmp_path: Path) -> None:
    """The engine is content with torch; the upgrade has broken torchvision, which nobody asked."""
    installed = {**FITTING, "torchvision": "0.23.0"}
    (finding,) = complaints(environment(tmp_path, installed, torchvision=["torch==2.8.0", "pillow>=1"]))
    assert finding.message == "torchvision asks for torch==2.8.0, and 2.11.0+cu130 is installed"


@pytest.mark.parametrize(
    ("need", "fits"),
    [
        ("kernels==0.3.1", False),
        ("kernels>=0.3.1", True),
        ("Kernels<0.5", True),
        ("kernels==0.3.1; python_version < '3'", True),
        ("xformers==0.3.1; extra == 'cpu'", False),
        ("kernels==0.3.1; extra == 'dev'", True),
        ("absent==1; extra == 'cpu'", True),
        ("kernels==0.4.*", True),
    ],
)
def test_conditions_extras_and_spellings_are_read_as_pip_reads_them(tmp_path: Path, need: str, fits: bool) -> None:
    found = environment(tmp_path, {**FITTING, "kernels": "0.4.0", "xformers": "0.4.0"}, [*NEEDS, need])
    assert (complaints(found) == []) is fits


def test_extras_that_disagree_are_content_with_one_of_them(tmp_path: Path) -> None:
    needs = [*NEEDS, "xformers==0.4.0; extra == 'srt'", "xformers==0.9.0; extra == 'cpu'"]
    assert complaints(environment(tmp_path, {**FITTING, "xformers": "0.4.0"}, needs)) == []


def test_what_the_user_told_the_engine_to_pass_over_is_no_end(tmp_path: Path) -> None:
    found = environment(tmp_path, {**FITTING, "sglang-kernel": "0.4.0"})
    found.config.engine.env["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"
    assert [finding.level for finding in complaints(found)] == ["warn"]


@pytest.mark.parametrize(
    ("built", "reach", "capability", "told"),
    [
        ("13.0", (13, 0), (10, 0), ""),
        ("13.2", (13, 0), (10, 0), ""),  # newer minor versions run on the same driver
        ("12.8", (13, 0), (10, 0), ""),
        ("13.0", (12, 8), (9, 0), "was built for CUDA 13.0, the driver 580.95.05 reaches CUDA 12.8"),
        ("12.6", (13, 0), (10, 0), "no kernels for compute capability 10.0"),
        ("13.0", (13, 0), (7, 0), "no kernels for compute capability 7.0"),
    ],
)
def test_torchs_cuda_against_the_driver_and_the_cards(
    tmp_path: Path, built: str, reach: tuple[int, int], capability: tuple[int, int], told: str
) -> None:
    found = environment(tmp_path, FITTING, cuda=built)
    found.read_gpus = lambda: [replace(card, cuda=reach, capability=capability) for card in CARDS]
    assert [bool(re.search(told, finding.message)) for finding in complaints(found)] == ([True] if told else [])


def test_a_real_environment_that_works_leaves_no_complaint() -> None:
    """This one: transformers pins tools of its developers in extras, at versions that nobody else has."""
    found = packages.read(sys.executable, "transformers")
    assert found.needs["transformers"]
    assert [str(need) for owner in found.needs for need, _ in unmet(found.needs[owner], found)] == []

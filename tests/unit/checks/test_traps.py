"""Variables that thwart a config: told by name, with what they do."""

from pathlib import Path
from typing import Any

import pytest

from tests.doctoring import context
from tokenmill.checks.traps import check_traps


def told(
    tmp_path: Path, own: dict[str, str] | None = None, shell: dict[str, str] | None = None, **fleet: Any
) -> list[tuple[str, str]]:
    found = context(tmp_path, engine={"env": own or {}}, model={"path": "/m"}, fleet=fleet)
    return [(finding.level, finding.subject) for finding in check_traps(found, shell or {})]


def test_a_plain_shell_and_the_reference_runs_variable_are_fine(tmp_path: Path) -> None:
    shell = {"PATH": "/usr/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": ""}
    assert told(tmp_path, {"SGLANG_ENABLE_SPEC_V2": "1"}, shell) == []


def test_one_choice_of_cards_for_all_servers_stops_the_run(tmp_path: Path) -> None:
    assert told(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}) == [("fail", "engine.env.CUDA_VISIBLE_DEVICES")]
    assert told(tmp_path, {"CUDA_VISIBLE_DEVICES": "{index}"}) == [("warn", "engine.env.CUDA_VISIBLE_DEVICES")]
    assert told(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}, servers=1)[0][0] == "warn"


def test_another_order_of_cards_is_told(tmp_path: Path) -> None:
    assert told(tmp_path, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == [("warn", "engine.env.CUDA_DEVICE_ORDER")]


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TMPDIR"])
def test_a_shared_cache_is_told_and_one_per_server_is_not(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, {name: "/cache"}) == [("warn", f"engine.env.{name}")]
    assert told(tmp_path, {name: "/cache/{index}"}) == []
    assert told(tmp_path, {name: "/cache"}, servers=1) == []


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "CUDA_LAUNCH_BLOCKING"])
def test_what_the_shell_hands_on_is_told_unless_the_config_means_it(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, shell={name: "/x"}) == [("warn", name)]
    assert told(tmp_path, {name: "/x"}, {name: "/x"}) == []


@pytest.mark.parametrize(
    ("shell", "count"),
    [
        ({"http_proxy": "http://p"}, 1),
        ({"HTTP_PROXY": "http://p", "no_proxy": "localhost"}, 1),
        ({"http_proxy": "http://p", "NO_PROXY": "localhost, 127.0.0.1"}, 0),
        ({"no_proxy": ""}, 0),
    ],
)
def test_a_proxy_between_a_server_and_itself_is_told(tmp_path: Path, shell: dict[str, str], count: int) -> None:
    assert len(told(tmp_path, shell=shell)) == count

"""What a server is launched with: its cards, its environment, its caches, and which launches are alike."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill import caches, launch, plugins
from tokenmill.config import Config
from tokenmill.configfile import validate
from tokenmill.engines.base import Engine, Launch, Spec
from tokenmill.errors import PreflightError
from tokenmill.launch import Place
from tokenmill.machine.gpus import Gpu
from tokenmill.machine.ports import Ports

CARDS = [Gpu(n, f"GPU-{n}", "H200", 100, 0) for n in range(5)]
ENGINES = plugins.names("engines")


def config(kind: str = "fake", **over: Any) -> Config:
    base: dict[str, Any] = {
        "engine": {"kind": kind},
        "model": {"path": "/models/m", "name": "m"},
        "prompts": {"path": "p.jsonl"},
    }
    if kind == "openai":
        base["engine"]["command"] = ["server", "--port", "{port}", "--model", "{model}", "--gpu", "{index}"]
    return validate({**base, **{name: {**base.get(name, {}), **values} for name, values in over.items()}}, "test")


def engine_of(made: Config) -> Engine:
    engine: Engine = plugins.load("engines", made.engine.kind)()
    return engine


def spec_of(made: Config, place: Place, first: int = 30000, nonce: str = "tm-a") -> Spec:
    where = Ports(first + place.index, first + 1000 + 10 * place.index)
    return launch.spec(made, place, where, nonce, model=Path("/models/m"), python="python3", version="1")


def environment(made: Config, index: int, folder: Path) -> dict[str, str]:
    engine, place = engine_of(made), Place(index, (index, index + 4), "H200")
    command = engine.command(spec_of(made, place))
    cache = caches.folder_for(made.engine.kind, "1", "H200", index, {})
    return launch.environment(made, place, engine, command, launch.tmp_folder(folder, index), cache)


# -- places ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fleet", "cards", "expected"),
    [
        ({}, CARDS, [(0,), (1,), (2,), (3,), (4,)]),
        ({"gpus_per_server": 2}, CARDS, [(0, 1), (2, 3)]),
        ({"gpus_per_server": 2, "servers": 3}, CARDS, [(0, 1), (2, 3), (0, 1)]),
        ({"servers": 2}, CARDS[3:], [(3,), (4,)]),
        ({"servers": 2}, None, [(), ()]),
        ({}, None, [()]),
    ],
)
def test_every_server_has_cards_of_its_own_as_far_as_they_go(
    fleet: dict[str, Any], cards: list[Gpu] | None, expected: list[tuple[int, ...]]
) -> None:
    found = launch.places(config(fleet=fleet), cards)
    assert [place.gpus for place in found] == expected
    assert [place.index for place in found] == list(range(len(expected)))


def test_too_few_cards_for_one_server_are_named() -> None:
    with pytest.raises(PreflightError, match="gpus_per_server = 8, and 5 GPUs may be used"):
        launch.places(config(fleet={"gpus_per_server": 8}), CARDS)


def test_addresses_are_the_servers() -> None:
    engine = {"kind": "openai", "addresses": ["http://a", "http://b"], "command": []}
    assert len(launch.places(config("openai", engine=engine), CARDS)) == 2


# -- the environment ---------------------------------------------------------------------------------------------------
RANKS = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
RANKS += ["TORCHELASTIC_RUN_ID", "VLLM_PORT", "VLLM_DP_RANK", "SGLANG_DP_RANK"]


@pytest.mark.parametrize("name", RANKS)
def test_a_shell_that_is_a_rank_of_some_job_makes_no_server_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, "7")
    assert name not in environment(config(), 0, tmp_path)


def test_a_server_sees_its_own_cards_in_pci_order_and_the_rest_of_our_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"CUDA_VISIBLE_DEVICES": "6", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "KEPT": "yes"}.items():
        monkeypatch.setenv(name, value)
    env = environment(config(), 1, tmp_path)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"], env["KEPT"]) == ("1,5", "PCI_BUS_ID", "yes")
    assert env["PATH"] == os.environ["PATH"]


def test_the_configs_variables_stand_over_all_and_know_the_servers_number(tmp_path: Path) -> None:
    made = config(engine={"env": {"PORT_FILE": "f{index}", "TOKENIZERS_PARALLELISM": "true", "RANK": "0"}})
    env = environment(made, 3, tmp_path)
    assert (env["PORT_FILE"], env["TOKENIZERS_PARALLELISM"], env["RANK"]) == ("f3", "true", "0")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_caches_of_eight_servers_are_eight(tmp_path: Path, kind: str) -> None:
    engine = engine_of(config(kind))
    envs = [environment(config(kind), index, tmp_path) for index in range(8)]
    for variable in engine.cache_variables:
        assert len({env[variable] for env in envs}) == 8
    assert len(engine.cache_variables) >= 5
    assert len({env[variable] for env in envs for variable in engine.cache_variables}) == 8 * len(
        engine.cache_variables
    )


def test_compiled_kernels_are_kept_apart_by_version_card_and_flags() -> None:
    base = ("sglang", "1", "H200", 0, {"a": 1})
    folders = {caches.folder_for(*base)}
    folders |= {caches.folder_for(*base[:4], {"a": 2}), caches.folder_for(*base[:2], "B200", *base[3:])}
    folders |= {caches.folder_for("sglang", "2", *base[2:]), caches.folder_for("vllm", *base[1:])}
    assert len(folders) == 5


def test_the_temporary_folder_is_short_and_the_servers_own(tmp_path: Path) -> None:
    deep = tmp_path / ("very-long-name" * 20)
    folders = [launch.tmp_folder(run, index) for run in (deep, tmp_path) for index in (0, 1)]
    assert len(set(folders)) == 4
    assert max(len(str(folder)) for folder in folders) < 40
    assert environment(config(), 1, deep)["TMPDIR"] == str(folders[1])


# -- arguments and their likeness --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    [
        "cpu-{index}",
        ["cpu-{index}"],
        {"a": "{index}"},
    ],
)
def test_an_argument_knows_the_servers_number(value: Any) -> None:
    made = config(engine={"args": {"numa": value}})
    found = spec_of(made, Place(3, ())).args["numa"]
    assert "{index}" not in str(found)
    assert "3" in str(found)


def made_of(made: Config, place: Place, first: int = 30000, nonce: str = "tm-a") -> dict[str, str]:
    return launch.made_of(engine_of(made), spec_of(made, place, first, nonce), made, place, "")


@pytest.mark.parametrize("kind", ENGINES)
def test_launches_that_differ_in_ports_and_identity_alone_are_alike(kind: str) -> None:
    made, place = config(kind), Place(2, (1,))
    assert made_of(made, place) == made_of(made, place, 45000, launch.new_nonce())


@pytest.mark.parametrize("kind", ENGINES)
def test_other_flags_variables_cards_or_models_are_another_launch(kind: str) -> None:
    place = Place(2, (1,))
    base = made_of(config(kind), place)
    others = [
        made_of(config(kind, engine={**config(kind).engine.model_dump(), "args": {"x": 1}}), place),
        made_of(config(kind, engine={**config(kind).engine.model_dump(), "env": {"A": "1"}}), place),
        made_of(config(kind), replace(place, gpus=(2,))),
        made_of(config(kind, model={"name": "other"}), place),
    ]
    assert base not in others[: 3 if kind == "openai" else 4]


def test_a_number_that_only_looks_like_a_port_still_counts() -> None:
    made, other = (config(engine={"args": {"context": context}}) for context in (4096, 8192))
    assert made_of(made, Place(0, ())) != made_of(other, Place(0, ()))


def test_a_flag_that_changes_from_one_port_number_to_the_other_counts() -> None:
    made, other = (config(engine={"args": {"max-tokens": number}}) for number in (30000, 31000))
    assert made_of(made, Place(0, ())) != made_of(other, Place(0, ()))


def test_every_life_has_a_name_of_its_own() -> None:
    assert len({launch.new_nonce() for _ in range(100)}) == 100


def test_a_cache_is_seeded_from_the_first_servers_once(tmp_path: Path) -> None:
    (tmp_path / "0" / "triton").mkdir(parents=True)
    (tmp_path / "0" / "triton" / "kernel.so").write_bytes(b"1")
    (tmp_path / "0" / "triton" / "kernel.lock").write_bytes(b"")
    assert [caches.seed(tmp_path / "0"), caches.seed(tmp_path / "1"), caches.seed(tmp_path / "1")] == [
        False,
        True,
        False,
    ]
    assert [path.name for path in (tmp_path / "1" / "triton").iterdir()] == ["kernel.so"]


def test_caches_beyond_the_limit_go_the_oldest_first_and_never_the_newest(tmp_path: Path) -> None:
    for age, name in enumerate(["newest", "new", "middle", "old"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    caches.prune(tmp_path, limit=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "newest"]
    caches.prune(tmp_path, limit=50)
    assert [path.name for path in tmp_path.iterdir()] == ["newest"]


def test_a_launch_without_variables_is_fine() -> None:
    assert Launch(("a",)).env == {}


def test_what_a_seed_left_whose_process_died_is_removed_and_no_other_copy(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, live = tmp_path / "set" / f".1.{dead.pid}", tmp_path / "set" / f".2.{os.getpid()}"
    for folder in (left, live, tmp_path / "set" / "0"):
        folder.mkdir(parents=True)
    caches.prune(tmp_path)
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [live.name, "0"]

"""The config: every mistake at once with its line, --set, paths, and what of it may be shown."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tokenmill import plugins
from tokenmill.config import Config, limits_of, rules_of, shown
from tokenmill.configfile import load, validate
from tokenmill.core.gate import Limits
from tokenmill.core.judge import BROKEN, TRUNCATED
from tokenmill.errors import ConfigError
from tokenmill.template import template

LEAST: dict[str, Any] = {"engine": {"kind": "fake"}, "prompts": {"path": "prompts.jsonl"}}


def checked(data: dict[str, Any]) -> Config:
    """Plain data over the least that a config needs."""
    whole = copy.deepcopy(LEAST)
    for section, values in data.items():
        whole[section] = whole.get(section, {}) | values if isinstance(values, dict) else values
    return validate(whole, "run.toml")


def complaint(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(data)
    return str(caught.value)


def loaded(folder: Path, text: str, *settings: str) -> Config:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return load(folder / "run.toml", list(settings))


def refused(folder: Path, text: str, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, *settings)
    return str(caught.value)


MINIMAL = '[engine]\nkind = "fake"\n[prompts]\npath = "prompts.jsonl"\n'

# -- mistakes ----------------------------------------------------------------------------------------------------------
MISTAKEN = """\
name = "a/b"
nmae = "x"
[engine]
kind = "sglagn"
[fleet]
port = 80
gpus = true
[prompts]
path = "p.jsonl"
shard = "4/4"
[generation]
max_tokns = 1
top_p = 1.5
thinking = "perhaps"
[judge]
purpose = "drafting"
reject = ["emty"]
[gate.later]
x = 1
"""


def test_every_mistake_is_listed_at_once_with_its_line_and_the_legal_values(tmp_path: Path) -> None:
    told = refused(tmp_path, MISTAKEN)
    place = f"{tmp_path}/run.toml"
    assert told.startswith(f"13 mistakes in {place}:")
    for line, words in {
        1: "name must be a folder name of letters, digits",
        2: "nmae is no known key, did you mean name?",
        4: "engine.kind must be one of sglang, vllm, llamacpp, openai, fake, not 'sglagn'",
        6: "fleet.port must be greater than or equal to 1024, not 80",
        7: "fleet.gpus must be 'all' or 'none', not True, or must be a valid list, not True",
        10: 'prompts.shard must be "i/n" with 0 <= i < n',
        12: "generation.max_tokns is no known key, did you mean max_tokens? (known here: attempts, ",
        13: "generation.top_p must be less than or equal to 1, not 1.5",
        14: "generation.thinking must be a valid boolean",
        16: "judge.purpose must be 'drafter' or 'sft', not 'drafting'",
        17: "judge.reject must be 'empty', 'empty_reasoning', ",
        18: "gate.later must be 'stop' or 'warn'",
    }.items():
        assert f"\n  {place}:{line}: {words}" in told
    assert f"\n  {place}: model.path is missing" in told


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"fleet": {"gpus": []}}, 'fleet.gpus names no GPU; say gpus = "none"'),
        ({"fleet": {"gpus": [0, 1.5]}}, "fleet.gpus must be 'all' or 'none'"),
        ({"fleet": {"servers": 2, "min_ready": 3}}, "fleet.min_ready 3 is more than servers = 2"),
        ({"fleet": {"stagger": "second"}}, "fleet.stagger must be 'first' or 'off', not 'second', or must be a time"),
        ({"fleet": {"stall_timeout": "0s"}}, "fleet.stall_timeout must be greater than 0"),
        ({"fleet": {"stall_timeout": "90 parsecs"}}, 'fleet.stall_timeout must be a time such as "90s"'),
        ({"generation": {"concurrency": 0}}, "generation.concurrency must be 'auto'"),
        ({"generation": {"concurrency": "many"}}, "not 'many'"),
        ({"output": {"segment": "128 MBytes"}}, 'output.segment must be a size such as "128MB"'),
        ({"stage": {"to": "ram"}}, "stage.to must be auto, off or an absolute folder"),
        ({"gate": {"max_failed": float("nan")}}, "gate.max_failed must be a finite number"),
        ({"engine": {"kind": "openai"}, "model": {"name": "m"}}, 'engine.kind "openai" needs command'),
        ({"engine": {"kind": "vllm", "addresses": ["http://a"]}}, 'engine.addresses go with kind = "openai" only'),
        ({"engine": {"kind": "openai", "addresses": ["a:1"]}, "model": {"name": "m"}}, "is not an address such as"),
        ({"engine": {"kind": "openai", "addresses": ["http://a"]}}, "model.name is missing: the name by which"),
        ({"engine": {"kind": "sglang"}}, "model.path is missing: a model folder, a .gguf file or a hub id"),
        ({"prompts": {"path": ""}}, "prompts.path is missing: the prompt set"),
        ({"engine": {"command": ["x"]}}, "engine.command goes with kind"),
        ({"engine": {"kind": "llamacpp", "command": [""]}}, "engine.command must begin with a program"),
        ({"engine": {"env": {"A=B": "c"}}}, "engine.env 'A=B' cannot be a variable"),
        ({"engine": {"env": {"A": "c\0"}}}, "engine.env 'A' cannot be a variable"),
        ({"engine": {"args": {"a": ["b\0"]}}}, "engine.args must hold no NUL character"),
        *(
            (
                {"engine": {"kind": "openai", "addresses": [address]}, "model": {"name": "m"}},
                "is not an address such as",
            )
            for address in ("http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://a b", "http://")
        ),
        ({"prompts": {"path": "a\0b"}}, "prompts.path must be a path, and holds a NUL character"),
        ({"output": {"dir": "x" * 256}}, "output.dir must be a path, and has a name of more than 255 bytes"),
        ({"prompts": {"path": "~no-such-user/p"}}, "prompts.path must be a path"),
        ({"prompts": {"path": "p", "shard": "0/99999999999999999999"}}, "with 0 <= i < n <= 1,000,000"),
        ({"name": "n" * 256}, "name must be a folder name"),
    ],
)
def test_a_mistake_is_named_with_what_is_legal(data: dict[str, Any], words: str) -> None:
    assert words in complaint(data)


ACROSS = """\
[engine]
kind = "vllm"
python = 1
addresses = ["http://a"]
command = ["serve"]
[fleet]
servers = 2
min_ready = 3
"""


def test_mistakes_across_keys_are_listed_with_the_others_each_with_its_line(tmp_path: Path) -> None:
    told = refused(tmp_path, ACROSS)
    place = f"{tmp_path}/run.toml"
    assert told.startswith(f"6 mistakes in {place}:")
    for where, words in (
        (":3", "engine.python must be a valid string"),
        (":4", 'engine.addresses go with kind = "openai" only, or exclude command'),
        (":5", 'engine.command goes with kind = "openai"'),
        (":8", "fleet.min_ready 3 is more than servers = 2"),
        ("", "prompts.path is missing"),
        ("", "model.path is missing"),
    ):
        assert f"\n  {place}{where}: {words}" in told


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file") as caught:
        load(tmp_path / "none.toml")
    assert "tokenmill init" in caught.value.fix
    assert "not valid TOML" in refused(tmp_path, "name = ")
    (tmp_path / "bad.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "bad.toml")


# -- values ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("section", "key", "value", "found"),
    [
        ("fleet", "stall_timeout", "90s", 90.0),
        ("fleet", "stall_timeout", "1.5 m", 90.0),
        ("fleet", "give_up", "250ms", 0.25),
        ("fleet", "give_up", "2d", 172800.0),
        ("fleet", "stagger", "off", "off"),
        ("fleet", "stagger", "10s", 10.0),
        ("fleet", "gpus", "none", "none"),
        ("fleet", "gpus", [0, "GPU-1111"], [0, "GPU-1111"]),
        ("fleet", "drain", "auto", "auto"),
        ("generation", "concurrency", 64, 64),
        ("generation", "timeout", "2h", 7200.0),
        ("output", "segment", "1GiB", 1 << 30),
        ("output", "segment", 4096, 4096),
    ],
)
def test_times_sizes_and_choices_are_read(section: str, key: str, value: Any, found: Any) -> None:
    assert getattr(getattr(checked({section: {key: value}}), section), key) == found


def test_a_config_is_frozen() -> None:
    config = checked({})
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"
    with pytest.raises(ValueError, match="frozen"):
        config.fleet.port = 1


def test_addresses_lose_what_tokenmill_adds_itself() -> None:
    engine = {"kind": "openai", "addresses": ["http://a:1/v1/", "https://b/"]}
    assert checked({"engine": engine, "model": {"name": "m"}}).engine.addresses == ["http://a:1", "https://b"]


def test_judge_and_gate_sections_become_the_cores_rules() -> None:
    config = checked({"judge": {"purpose": "sft"}, "gate": {"cohort": 7, "later": "warn"}})
    assert rules_of(config).reject == BROKEN | TRUNCATED
    assert limits_of(config) == Limits(7, later_stops=False)
    assert rules_of(checked({"judge": {"reject": ["empty"]}})).reject == {"empty"}


# -- --set -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("setting", "section", "key", "value"),
    [
        ("generation.max_tokens=64", "generation", "max_tokens", 64),
        ("generation.thinking=false", "generation", "thinking", False),
        ("fleet.gpus=[0, 1]", "fleet", "gpus", [0, 1]),
        ("fleet.stagger=off", "fleet", "stagger", "off"),
        ("fleet.stall_timeout=5s", "fleet", "stall_timeout", 5.0),
        ('fleet.stall_timeout = "5s"', "fleet", "stall_timeout", 5.0),
        ("engine.args.tokens=5", "engine", "args", {"tokens": 5}),
        ("generation.extra={ a = 1 }", "generation", "extra", {"a": 1}),
        ("stage.to=/dev/shm", "stage", "to", "/dev/shm"),
    ],
)
def test_a_setting_overrides_the_file(tmp_path: Path, setting: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(loaded(tmp_path, MINIMAL, setting), section), key) == value


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("generation.max_tokens", "must be key=value"),
        ("=5", "must be key=value"),
        ("generation..a=5", "must be key=value"),
        ("name.a=5", "--set name.a=5: name is a value"),
        ("generation.max_tokns=5", "did you mean max_tokens?"),
        ("generation.max_tokens=many", "generation.max_tokens must be a valid integer"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, setting: str, words: str) -> None:
    assert words in refused(tmp_path, 'name = "x"\n' + MINIMAL, setting)


# -- paths -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("models/here", "{base}/models/here"),
        ("../model.gguf", "{parent}/model.gguf"),
        ("./model", "{base}/model"),
        ("/models/Qwen", "/models/Qwen"),
    ],
)
def test_paths_are_relative_to_the_config_and_a_hub_id_is_no_path(tmp_path: Path, path: str, found: str) -> None:
    (tmp_path / "models" / "here").mkdir(parents=True)
    config = loaded(tmp_path, f'[model]\npath = "{path}"\n' + MINIMAL)
    assert config.model.path == found.format(base=tmp_path, parent=tmp_path.parent)
    assert config.prompts.path == f"{tmp_path}/prompts.jsonl"
    assert config.folder == tmp_path / "runs" / "run"


def test_the_copys_path_is_relative_to_the_config_and_none_stays_none(tmp_path: Path) -> None:
    minimal = '[model]\npath = "/m"\n' + MINIMAL
    assert loaded(tmp_path, minimal).output.copy_to == ""
    config = loaded(tmp_path, minimal, "output.copy_to=../bucket")
    assert config.copy_folder == tmp_path.parent / "bucket" / "run"


def test_the_served_name_is_the_folders_unless_it_is_given() -> None:
    assert checked({"model": {"path": "/models/Qwen3"}}).served_name == "Qwen3"
    assert checked({"model": {"path": "/models/Qwen3", "name": "q"}}).served_name == "q"


# -- what may be shown -------------------------------------------------------------------------------------------------
SECRET = "hush-1234"


def reloaded(folder: Path, config: Config) -> Config:
    """The config that a run folder keeps, read again."""
    return loaded(folder, tomli_w.dumps(shown(config)))


@pytest.mark.parametrize(
    "engine",
    [
        {"env": {"HF_TOKEN": SECRET, "MY_PASSWORD": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}},
        {"args": {"api-key": SECRET, "api_key": SECRET, "admin-password": SECRET}},
        {"kind": "openai", "addresses": [f"http://user:{SECRET}@127.0.0.1:8000"]},
        {"args": {"hf-token": SECRET}},
        {"kind": "openai", "command": ["server", "--api-key", SECRET, f"--token={SECRET}"]},
        {"env": {"HTTPS_PROXY": f"http://user:{SECRET}@proxy:3128"}},
    ],
)
def test_no_secret_is_kept_in_the_run_folder(tmp_path: Path, engine: dict[str, Any]) -> None:
    config = checked({"engine": engine, "model": {"name": "m"}})
    assert SECRET not in tomli_w.dumps(shown(config))
    reloaded(tmp_path, config)


def test_flags_and_variables_that_are_no_secrets_are_shown() -> None:
    engine = {"args": {"max-total-tokens": 5, "tokenizer-mode": "auto"}, "env": {"OMP_NUM_THREADS": "4"}}
    found = shown(checked({"engine": engine}))["engine"]
    assert (found["args"], found["env"]) == (engine["args"], engine["env"])


@pytest.mark.parametrize(
    "data",
    [
        {"fleet": {"gpus": [0, "GPU-1"], "stagger": "10s", "drain": "5m"}, "output": {"segment": "1GiB"}},
        {"judge": {"reject": ["empty"]}, "generation": {"temperature": 0.6, "seed": 1, "extra": {"a": [1, 2.5]}}},
        {"engine": {"args": {"speculative-config": {"method": "mtp"}, "flag": True}}, "fleet": {"backoff": "200ms"}},
        {"fleet": {"give_up": "14d"}},
        {"output": {"copy_to": "/mnt/bucket", "copy_every": "90s"}},
        {"fleet": {"start_timeout": "12345.678s", "backoff": 1e-07}},
    ],
)
def test_the_shown_config_loads_again_as_it_was(tmp_path: Path, data: dict[str, Any]) -> None:
    config = checked(
        {
            **data,
            "prompts": {"path": str(tmp_path / "p.jsonl")},
            "output": {"dir": str(tmp_path)} | data.get("output", {}),
        }
    )
    assert reloaded(tmp_path, config) == config


# -- tokenmill init ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", plugins.names("engines"))
def test_the_printed_config_is_valid_and_holds_every_key_with_its_default(tmp_path: Path, engine: str) -> None:
    text = template(engine)
    config = loaded(tmp_path, text, "name=run")
    assert config.engine.kind == engine
    unset = Config.model_fields
    for name in set(unset) - {"name", "model", "engine"}:
        section = unset[name].annotation
        assert section is not None
        default = section(path=str(tmp_path / "prompts.jsonl")) if name == "prompts" else section()
        found = getattr(config, name)
        relaxed = {"fleet": {"gpus": found.gpus if name == "fleet" else ""}, "output": {"dir": str(tmp_path / "runs")}}
        assert found == default.model_copy(update=relaxed.get(name, {}))
        assert {key for key in section.model_fields if f"{key} = " not in text} == set()

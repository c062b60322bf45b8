"""What decides what the model writes: recorded once, and a run is not continued with anything else."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import bytewise
from tests.exports import raw
from tokenmill import settings
from tokenmill.config import Config
from tokenmill.configfile import validate
from tokenmill.core.rendering import Rendering
from tokenmill.errors import GuardError
from tokenmill.settings import Settings

BASE: dict[str, dict[str, Any]] = {
    "engine": {"kind": "sglang", "args": {"mem-fraction-static": 0.9, "dtype": "auto"}},
    "model": {"path": "/models/none", "name": "m"},
    "prompts": {"path": "p.jsonl"},
    "generation": {"max_tokens": 100, "temperature": 0.6, "seed": 1, "extra": {"stop": ["x"], "n": 1.5}},
}


def config(**over: dict[str, Any]) -> Config:
    return validate({**BASE, **{name: {**BASE.get(name, {}), **values} for name, values in over.items()}}, "test")


def of(made: Config, model: Path | None = None, version: str = "1") -> Settings:
    return settings.of(made, model, version)


def recorded(row: Settings) -> Settings:
    """A row as it comes back from its file."""
    return msgspec.json.decode(msgspec.json.encode(row), type=Settings)


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"generation": {"thinking": False}}, "thinking: was True, is False"),
        ({"generation": {"max_tokens": 200}}, "'max_tokens': 200"),
        ({"generation": {"temperature": 0.7}}, "sampling: was {"),
        ({"generation": {"extra": {"stop": ["y"], "n": 1.5}}}, "sampling: was {"),
        ({"generation": {"seed": 2}}, "seed: was 1, is 2"),
        ({"model": {"name": "other"}}, "model: was 'm', is 'other'"),
        ({"engine": {"args": {"dtype": "bfloat16"}}}, "engine_args: was {'dtype': 'auto'}, is {'dtype': 'bfloat16'}"),
        ({"engine": {"args": {"dtype": "auto", "quantization": "fp8"}}}, "'quantization': 'fp8'"),
    ],
)
def test_a_run_is_not_continued_with_what_changes_the_text(over: dict[str, Any], told: str) -> None:
    with pytest.raises(GuardError, match="made with other settings") as caught:
        settings.guard(of(config(**over)), [recorded(of(config()))])
    assert told in str(caught.value)
    assert "another name" in caught.value.fix


@pytest.mark.parametrize(("was", "now"), [("last", "all"), ("all", "last")])
def test_one_answer_a_conversation_and_every_one_are_two_datasets(was: str, now: str) -> None:
    old, new = (of(config(generation={**BASE["generation"], "turns": turns})) for turns in (was, now))
    with pytest.raises(GuardError, match="turns: was "):
        settings.guard(new, [recorded(old)])
    settings.guard(new, [recorded(new)])


def test_every_difference_is_named() -> None:
    changed = config(generation={"thinking": False, "seed": 2}, model={"name": "other"})
    with pytest.raises(GuardError) as caught:
        settings.guard(of(changed), [recorded(of(config()))])
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"engine": {"args": {"mem-fraction-static": 0.8, "dtype": "auto", "context-length": 4096}}},
        {"engine": {"args": {"mem_fraction_static": 0.9, "dtype": "auto"}, "env": {"A": "b"}}},
        {"generation": {"samples": 4, "concurrency": 8, "timeout": "9m", "attempts": 1}},
        {"judge": {"purpose": "sft"}, "gate": {"cohort": 5}, "fleet": {"servers": 2}},
        {"prompts": {"path": "other.jsonl", "limit": 5}},
    ],
)
def test_throughput_judge_gate_and_prompts_may_change(over: dict[str, Any]) -> None:
    settings.guard(of(config(**over)), [recorded(of(config()))])


def test_another_version_of_the_engine_is_recorded_and_not_refused() -> None:
    old, new = of(config(), version="1"), of(config(), version="2")
    settings.guard(new, [recorded(old)])
    assert (old.id != new.id, new.engine_version) == (True, "2")


def test_flags_are_one_however_they_are_spelled() -> None:
    spelled = config(engine={"args": {"mem_fraction_static": 0.9, "dtype": "auto"}})
    assert of(spelled) == of(config())


def test_no_secret_is_recorded() -> None:
    secretive = config(engine={"args": {"api-key": "hush-1234"}})
    assert b"hush-1234" not in msgspec.json.encode(of(secretive))


# -- sampling ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def model(tmp_path: Path) -> Path:
    own = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True, "eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    return tmp_path


def test_the_configs_sampling_stands_over_the_models_own(model: Path) -> None:
    drawn = settings.sampling(config(generation={"temperature": 0.0, "extra": {"a": 1}}), model)
    assert drawn.fields() == {"temperature": 0.0, "top_p": 0.8, "top_k": 20, "a": 1}
    assert drawn.max_tokens == 100


def test_without_a_model_to_read_only_the_configs_is_sent() -> None:
    assert settings.sampling(config(generation={"extra": {}}), None).fields() == {"temperature": 0.6}


def test_sampling_is_told_in_a_line(model: Path) -> None:
    drawn = settings.sampling(config(generation={"extra": {"stop": ["x"]}}), model)
    assert settings.describe(drawn) == "temperature 0.6, top_p 0.8, top_k 20, stop (extra), max_tokens 100"
    plain = {**BASE, "generation": {}}
    bare = settings.sampling(validate(plain, "test"), None)
    assert settings.describe(bare) == "the server's own defaults, max_tokens 8192"


def test_another_model_under_the_same_name_is_noticed(model: Path) -> None:
    old = recorded(of(config(), model))
    (model / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(GuardError, match="model_fingerprint: was '"):
        settings.guard(of(config(), model), [old])


# -- the template and the table ----------------------------------------------------------------------------------------
def test_another_rendering_is_refused_with_both_values_once_both_are_known() -> None:
    row = of(config())
    known = Rendering("T", "a" * 64, "b" * 64, "m", "<user>hi", raw(1, 2))
    old = recorded(settings.complete(row, known))
    assert old.rendering == known
    for same in (known, Rendering(), Rendering(messages="others", prompt="<user>ho")):
        assert settings.guard_rendering(same, [old, row]) == []
    for changed, told in (
        ({"template_sha256": "c" * 64}, f"chat template, sha256: was {'a' * 16}, is {'c' * 16}"),
        ({"tokenizer_sha256": "c" * 64}, f"tokenizer, sha256: was {'b' * 16}, is {'c' * 16}"),
        ({"prompt": "<user>HI"}, "differs from character 6 on: was '<user>hi', is '<user>HI'"),
        ({"ids": raw(1, 3)}, "differ from number 1 on: was [2], is [3]"),
    ):
        with pytest.raises(GuardError) as caught:
            settings.guard_rendering(msgspec.structs.replace(known, **changed), [row, old])
        assert told in str(caught.value)
        assert "bring the old files back" in caught.value.fix


def test_another_date_in_the_prompt_is_told_and_not_refused() -> None:
    dated = Rendering("{{ strftime_now('%d %b') }}", messages="m", prompt="30 Nov: hi", ids=raw(1, 2, 3))
    old = settings.complete(of(config()), dated)
    later = msgspec.structs.replace(dated, prompt="1 Dec: hi", ids=raw(1, 4, 3))
    (told,) = settings.guard_rendering(later, [old])
    assert "was '30 Nov: hi', is '1 Dec: hi'" in told
    unknown = settings.complete(of(config()), Rendering(messages="m", ids=raw(*range(50))))
    assert len(settings.guard_rendering(Rendering(messages="m", ids=raw(99, *range(1, 50))), [unknown])) == 1
    with pytest.raises(GuardError):
        settings.guard_rendering(Rendering(messages="m", ids=raw(*range(40))), [unknown])


def test_what_nobody_tells_is_said() -> None:
    assert (
        Rendering().told == "prompts: nobody tells chat template and tokenizer here; a change of them would go unseen"
    )
    known = Rendering("T", "a" * 64, "b" * 64, ids=raw(1))
    assert known.told == f"prompts: held to chat template {'a' * 16}, tokenizer {'b' * 16}, the first prompt"


def test_changed_files_of_the_model_are_named_before_anything_is_launched(tmp_path: Path) -> None:
    folder = bytewise.folder(tmp_path / "m")
    made = config()
    old = recorded(of(made, folder))
    assert old.template == bytewise.PLAIN
    (folder / "chat_template.jinja").write_text(bytewise.PLAIN + "x")
    with pytest.raises(GuardError) as caught:
        settings.guard(of(made, folder), [old])
    assert "chat template, sha256: was " in str(caught.value)
    assert "tokenizer, sha256" not in str(caught.value)
    bytewise.folder(tmp_path / "m", merges=(("t", "h"),))
    with pytest.raises(GuardError) as caught:
        settings.guard(of(made, folder), [old])
    assert "tokenizer, sha256: was " in str(caught.value)
    assert "chat template, sha256" not in str(caught.value)
    bytewise.folder(tmp_path / "m")
    settings.guard(of(made, folder), [old])


def test_every_set_in_force_is_kept_once(tmp_path: Path) -> None:
    assert settings.read(tmp_path) == []
    first, second = of(config()), of(config(), version="2")
    for row in (first, second, first):
        settings.keep(tmp_path, row)
    assert settings.read(tmp_path) == [recorded(first), recorded(second)]

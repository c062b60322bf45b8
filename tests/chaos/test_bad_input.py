"""Bad input of every kind: a clear message, the right exit code, nothing launched; never a traceback."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import Here
from tests.harness import Case

SERVER_ARGS = """
parser.add_argument("--mem-fraction-static", type=float)
parser.add_argument("--max-running-requests", type=int)
parser.add_argument("--speculative-algorithm", type=str)
"""


def _nothing_ran(case: Case) -> bool:
    return not case.run_folder.state().servers and not list(case.run_path.glob("logs/*")) and case.leftovers() == []


# -- prompts -----------------------------------------------------------------------------------------------------------
def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_text("")


def _blank(path: Path) -> None:
    path.write_text("\n  \n\n")


def _folder_of_nothing(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "README.md").write_text("no prompts here")


def _torn_zst(path: Path) -> None:
    path.write_bytes(b"\x28\xb5\x2f\xfd\x04")


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("prompts.jsonl", _missing, "prompts.jsonl: no such file or folder"),
        ("prompts.jsonl", _empty, "prompts.jsonl holds no row"),
        ("prompts.jsonl", _blank, "prompts.jsonl holds no row"),
        ("prompts.jsonl", _folder_of_nothing, "holds no .jsonl, .jsonl.zst or .parquet file"),
        ("prompts.csv", _empty, "not a .jsonl, .jsonl.zst or .parquet file"),
        ("prompts.parquet", _empty, "prompts.parquet is damaged"),
        ("prompts.jsonl.zst", _torn_zst, "prompts.jsonl.zst is cut off"),
    ],
)
def test_a_prompt_set_that_is_none_is_refused_before_anything_starts(
    here: Here, name: str, make: Callable[[Path], None], words: str
) -> None:
    path = here.case.folder / name
    path.touch()
    make(path)
    code, said = here(prompts={"path": name})
    assert code == 3
    assert words in said
    assert _nothing_ran(here.case)


def test_every_bad_row_becomes_a_failed_record_with_its_place(here: Here) -> None:
    bad: list[Any] = [
        b"{",
        b"not json",
        b"[]",
        b"null",
        b"7",
        b'"a text"',
        b"{}",
        b'{"prompt": ""}',
        b'{"prompt": null}',
        b'{"messages": []}',
        b'{"messages": [{"role": "assistant", "content": "hello"}]}',
        b'{"conversations": [{"from": "system", "value": "x"}]}',
        b'{"custom_id": "a", "body": {}}',
        b"\xff\xfe\x00",
        b'{"prompt": "' + b"\xc3\x28" + b'"}',
        b'{"id": {"a": 1}, "prompt": ["x"]}',
    ]
    good = [json.dumps({"id": f"good-{n}", "prompt": f"Question {n}?"}).encode() for n in range(4)]
    lines = [*bad[:8], b"", good[0], good[1], *bad[8:], b"   ", good[2], good[3]]
    (here.case.folder / "prompts.jsonl").write_bytes(b"\n".join(lines))
    code, said = here(fleet={"servers": 1}, gate={"max_failed": 0.0})
    assert code == 0, said
    records = here.case.records()
    assert len(records) == len(bad) + len(good)
    places = {number for number, line in enumerate(lines, 1) if line in bad}
    failed = [record for record in records if "bad_prompt" in record.labels]
    assert {record.error.split(": ")[0] for record in failed} == {f"prompts.jsonl:{number}" for number in places}
    assert {record.key for record in records if not record.labels} == {f"good-{n}" for n in range(4)}


# -- model, engine, cards ----------------------------------------------------------------------------------------------
def test_a_model_that_is_not_there_is_named(here: Here) -> None:
    path = here.case.folder / "models" / "m.gguf"
    code, said = here(model={"path": str(path)}, engine={"kind": "llamacpp", "args": {}})
    assert code == 3
    assert f"{path}" in said
    assert _nothing_ran(here.case)


def test_a_model_whose_download_was_not_finished_is_named_with_the_file(here: Here) -> None:
    folder = here.case.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    code, said = here(model={"path": str(folder)}, engine={"kind": "sglang", "args": {}})
    assert code == 3
    assert "model-00002-of-00002.safetensors" in said
    assert _nothing_ran(here.case)


def test_a_flag_that_the_engine_has_not_is_found_before_its_minutes_of_start(here: Here) -> None:
    site = here.case.folder / "site"
    (site / "sglang" / "srt").mkdir(parents=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "srt" / "server_args.py").write_text(SERVER_ARGS)
    (site / "sglang-0.5.11.dist-info").mkdir()
    (site / "sglang-0.5.11.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.11\n")
    args = {"mem-fraction-static": 0.9, "max-runing-requests": 7, "port": 1}
    engine = {"kind": "sglang", "args": args, "env": {"PYTHONPATH": str(site)}}
    code, said = here(model={"path": str(here.case.folder)}, engine=engine)
    assert code == 3
    assert "sglang 0.5.11 has no flag --max-runing-requests" in said
    assert "tokenmill sets --port itself: from fleet.port" in said
    assert "no flag --mem-fraction-static" not in said
    assert _nothing_ran(here.case)


def test_an_engine_that_is_not_installed_is_named_with_the_way_to_get_it(here: Here) -> None:
    code, said = here(model={"path": str(here.case.folder)}, engine={"kind": "sglang", "args": {}})
    assert code == 3
    assert f"sglang is not installed for {sys.executable}" in said
    assert f"{sys.executable} -m pip install sglang" in said


@pytest.mark.parametrize("python", ["no/such/python", "/dev/null"])
def test_an_interpreter_that_does_not_run_is_named(here: Here, python: str) -> None:
    code, said = here(model={"path": str(here.case.folder)}, engine={"kind": "sglang", "args": {}, "python": python})
    assert code == 3
    assert f"engine.python = {python}" in said


@pytest.mark.parametrize("gpus", ["all", [97], ["GPU-5c2f6a8e"]])
def test_a_gpu_that_is_not_there_is_missed_at_once(here: Here, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, said = here(fleet={"gpus": gpus})
    assert code == 3
    assert "GPU" in said
    assert _nothing_ran(here.case)


# -- where it is written to --------------------------------------------------------------------------------------------
def test_a_run_folder_that_cannot_be_made_is_named(here: Here) -> None:
    (here.case.folder / "runs").write_text("a file, where the folder of all runs should be")
    code, said = here()
    assert code == 3
    assert f"the run folder {here.case.run_path} cannot be written: " in said
    assert "fix: df -h" in said


def test_a_run_folder_that_is_read_only_is_named(here: Here) -> None:
    code, said = here(output={"dir": "/proc/tokenmill"})
    assert code == 3
    assert "the run folder /proc/tokenmill/case cannot be written: " in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_of_someone_elses_is_named(here: Here) -> None:
    (here.case.folder / "runs").mkdir(mode=0o555)
    code, said = here()
    assert code == 3
    assert "Permission denied" in said


# -- the command line --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "{folder}/none.toml"], "none.toml: No such file"),
        (["run", "{folder}"], "Is a directory"),
        (["run", "{config}", "--set", "fleet.gpu=1"], "did you mean gpus?"),
        (["run", "{config}", "--set", "generation.max_tokens"], "must be key=value"),
        (["status", "{folder}"], "is no run folder"),
        (["down", "{folder}/none"], "is no run folder"),
        (["logs", "{folder}/none"], "is no run folder"),
        (["watch", "{folder}/none"], "is no run folder"),
        (["export", "{folder}/none", "messages", "{folder}/out"], "is no run folder"),
        (["report", "{folder}/none"], "is no run folder"),
        (["init", "--engine", "nothing"], "nothing"),
        (["inspect", "{folder}/none.jsonl"], "no such file"),
        (["up", "{config}", "--set", "fleet.cluster='ray'"], "up CONFIG --set fleet.cluster=local"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_wrong_argument_is_named_and_leaves_nothing_behind(here: Here, words: list[str], expected: str) -> None:
    here.case.write()
    before = sorted(here.case.folder.iterdir())
    places = {"folder": here.case.folder, "config": here.case.config}
    code, said = here.command(*(word.format_map(places) for word in words))
    assert code == 2
    assert expected in said
    assert sorted(here.case.folder.iterdir()) == before


def test_a_config_with_many_mistakes_tells_them_all_with_their_lines(here: Here) -> None:
    here.case.config.write_text('[engine]\nkind = "sglan"\n[fleet]\nport = 80\nservrs = 2\n[prompts]\nshard = "4/4"\n')
    code, said = here.command("run", here.case.config)
    assert code == 2
    for line in (
        ":2: engine.kind must be one of",
        ":4: fleet.port",
        ":5: fleet.servrs is no known key",
        ":7: prompts.",
    ):
        assert f"{here.case.config}{line}" in said
    assert "prompts.path is missing" in said

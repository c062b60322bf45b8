"""Runs that would make no one dataset are not merged: what differs is said with its values, and nothing is left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from msgspec.structs import replace

from tests.unit.make import jsonl, record
from tokenmill import asked, configfile, dataset, prompts, settings
from tokenmill.config import shown
from tokenmill.core.rendering import Rendering
from tokenmill.errors import ConfigError, GuardError, TokenmillError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.ledger import Ledger
from tokenmill.merge import lines, merge
from tokenmill.store import line_of

ROWS, SAMPLES, OF = 40, 2, 4


def made(folder: Path, number: int, of: int = OF, name: str = "", **over: dict[str, Any]) -> Path:
    """A run folder as a finished run leaves it but for the sealing, on the prompts in `folder`."""
    path = folder / "prompts.jsonl"
    if not path.exists():
        jsonl(path, [{"id": f"k{n}", "prompt": f"q{n}"} for n in range(ROWS)])
    base: dict[str, dict[str, Any]] = {
        "engine": {"kind": "fake", "args": {"slots": 4}},
        "prompts": {"path": str(path), "shard": f"{number}/{of}"},
        "generation": {"samples": SAMPLES, "max_tokens": 100, "temperature": 0.5},
    }
    tables = {name: {**base.get(name, {}), **over.get(name, {})} for name in {*base, *over} - {"row"}}
    data = {"name": name or f"shard{number}", "output": {"dir": str(folder)}, **tables}
    config = configfile.validate(data, "test")
    run = RunFolder(config.folder)
    with run.own("run"):
        run.write_config(tomli_w.dumps(shown(config)))
        index = prompts.scan(path)
        ledger = Ledger(index, config.generation.samples, (number, of))
        asked.keep(run.data, asked.of(index, ledger, (number, of)))
        row = settings.complete(
            settings.of(config, None, over.get("row", {}).get("version", "1")),
            Rendering(template_sha256="tttt", prompt="q"),
        )
        row = replace(row, **over.get("row", {}).get("fields", {}))
        settings.keep(run.data, row)
        own = [
            record(index.key(place, f"k{place}"), place, sample=sample, settings=row.id)
            for place in ledger.rows_asked().tolist()
            for sample in range(config.generation.samples)
        ]
        half = len(own) // 2
        (run.data / "journal-000001.jsonl").write_bytes(b"".join(map(line_of, own[:half])))
        (run.data / "journal-000002.jsonl").write_bytes(b"".join(map(line_of, own[half:])) + b'{"torn')
    return run.path


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    return [made(tmp_path, number) for number in range(OF)]


def refused(kind: type[TokenmillError], *paths: Path) -> str:
    """What a merge says that must not be one; nothing is left of it, and nothing is changed."""
    folder = paths[0].parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(kind) as caught:
        merge(paths[:-1], paths[-1], lambda text: None)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    assert caught.value.fix
    return str(caught.value)


def test_the_union_of_all_shards_is_the_whole_set(four: list[Path], tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "prompts.jsonl").unlink()  # as on another machine
    merged = merge(four, tmp_path / "out", told.append)
    assert (merged.keys, merged.prompts.total, merged.prompts.accepted, merged.superseded) == (ROWS, 80, 80, 0)
    assert sum(part.completions for part in merged.runs) == 80
    found = [(record.row, record.sample) for record in dataset.records(tmp_path / "out" / "data")]
    assert found == [(row, sample) for row in range(ROWS) for sample in range(SAMPLES)]
    assert "every key once: 40 keys, 80 completions; 80 accepted, 0 rejected, 0 failed" in lines(merged)
    assert told == ["the report is written"]
    status = RunFolder(tmp_path / "out").status()
    assert status is not None
    assert (status.state, status.prompts) == ("done", merged.prompts)


def test_of_an_id_that_was_stored_twice_the_newest_counts_afterwards_too(four: list[Path], tmp_path: Path) -> None:
    own = next(iter(dataset.records(four[1] / "data")))
    newer = record(own.key, own.row, settings=own.settings, labels=("empty_answer",))
    (four[1] / "data" / "journal-000003.jsonl").write_bytes(line_of(newer))
    merged = merge(four, tmp_path / "out", lambda text: None)
    assert (merged.superseded, merged.prompts.accepted, merged.prompts.rejected) == (1, 79, 1)
    found = {(r.key, r.sample): r.labels for r in dataset.records(tmp_path / "out" / "data")}
    assert found[own.key, 0] == ("empty_answer",)
    assert len(list(dataset.briefs(tmp_path / "out" / "data"))) == 81


def test_a_shard_without_a_prompt_is_one_all_the_same(tmp_path: Path) -> None:
    jsonl(tmp_path / "prompts.jsonl", [{"id": "k0", "prompt": "q0"}, {"id": "k1", "prompt": "q1"}])
    runs = [made(tmp_path, number) for number in range(OF)]
    for run in runs:
        if not any(path.stat().st_size > 10 for path in (run / "data").glob("journal-*")):
            (run / "data" / "settings.jsonl").unlink()
    merged = merge(runs, tmp_path / "out", lambda text: None)
    assert (merged.keys, merged.prompts.total, min(part.completions for part in merged.runs)) == (2, 4, 0)


def test_missing_and_doubled_shards_are_named(four: list[Path], tmp_path: Path) -> None:
    a, b, c, d = four
    out = tmp_path / "out"
    assert "2 of 4 shards are missing: 1/4, 3/4" in refused(UsageError, a, c, out)
    assert f"{a} is given 2 times" in refused(UsageError, a, b, a, out)
    twin = shutil.copytree(a, tmp_path / "twin")
    assert f"shard 0/4 is given 2 times: {a}, {twin}" in refused(UsageError, a, b, c, d, twin, out)
    assert "is no run folder" in refused(UsageError, a, b, c, tmp_path / "nowhere", out)
    assert f"{d} exists already" in refused(UsageError, a, b, c, d)
    assert "must be a folder name" in refused(ConfigError, a, b, c, d, tmp_path / "a b")
    many = made(tmp_path, 0, 1000, "many")
    assert "999 of 1000 shards are missing: 1/1000, 2/1000, 3/1000 and 996 more" in refused(UsageError, many, out)


def test_a_run_that_somebody_has_is_left_alone(four: list[Path], tmp_path: Path) -> None:
    with RunFolder(four[2]).own("run"):
        assert f"{four[2]} is in use by tokenmill run, pid" in refused(UsageError, *four, tmp_path / "out")


def _drop_a_line(run: Path) -> None:
    journal = run / "data" / "journal-000001.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[1:]))


def _add(run: Path, **fields: Any) -> None:
    own = next(iter(dataset.records(run / "data")))
    fields = {"key": own.key, "row": own.row, **fields}
    (run / "data" / "journal-000009.jsonl").write_bytes(line_of(record(**fields)))


def _lie(run: Path) -> None:
    """One key in another's place, and of the right shard."""
    own = next(iter(dataset.records(run / "data")))
    key = next(f"x{n}" for n in range(99) if prompts.key_hash(f"x{n}") % OF == prompts.key_hash(own.key) % OF)
    for journal in (run / "data").glob("journal-*"):
        kept = [line_of(record(key if r.key == own.key else r.key, r.row, sample=r.sample)) for r in _read(journal)]
        journal.write_bytes(b"".join(kept))


def _read(journal: Path) -> list[Any]:
    return [type("R", (), json.loads(line)) for line in journal.read_bytes().splitlines() if line.endswith(b"}")]


@pytest.mark.parametrize(
    ("harm", "kind", "told"),
    [
        (_drop_a_line, GuardError, "1 of "),
        (lambda run: _add(run, sample=SAMPLES), GuardError, f"not asked for: k6 (sample {SAMPLES})"),
        (lambda run: _add(run, key="stranger"), GuardError, "not asked for: stranger (sample 0)"),
        (lambda run: _add(run, turn=1), GuardError, "completions, and was asked for "),
        (_lie, GuardError, "the runs hold 40 keys, and they are not the 40 keys of their prompt set"),
        (lambda run: (run / "data" / "prompts.json").unlink(), UsageError, "does not say what it was asked for"),
        (lambda run: (run / "config.toml").unlink(), UsageError, "has no config.toml"),
    ],
)
def test_a_key_that_is_not_there_once_is_noticed(
    four: list[Path], tmp_path: Path, harm: Callable[[Path], None], kind: type[TokenmillError], told: str
) -> None:
    first = next(iter(dataset.records(four[2] / "data")))
    harm(four[2])
    said = refused(kind, *four, tmp_path / "out")
    assert told.replace("k6", first.key) in said
    assert str(four[2]) in said or "the runs hold" in said


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"generation": {"max_tokens": 200}}, "sampling.max_tokens: 100 in {a}, 200 in {b}"),
        ({"generation": {"temperature": None}}, "sampling.temperature: 0.5 in {a}, None in {b}"),
        ({"generation": {"thinking": False}}, "thinking: True in {a}, False in {b}"),
        ({"generation": {"samples": 3}}, "generation.samples: 2 in {a}, 3 in {b}"),
        ({"generation": {"seed": 3}}, "seed: None in {a}, 3 in {b}"),
        ({"model": {"name": "other"}}, "model: 'fake' in {a}, 'other' in {b}"),
        ({"prompts": {"dedup": True}}, "prompts.dedup: False in {a}, True in {b}"),
        ({"row": {"fields": {"engine": "vllm"}}}, "engine: 'fake' in {a}, 'vllm' in {b}"),
        (
            {"row": {"fields": {"template_sha256": "uuuu"}}},
            "from {a} to {b}: chat template, sha256: was tttt, is uuuu",
        ),
        (
            {"row": {"fields": {"first_prompt": "<s>q"}}},
            "from {a} to {b}: the first prompt, rendered again, differs from character 0 on: was 'q', is '<s>q'",
        ),
    ],
)
def test_what_would_mix_two_datasets_is_refused(
    four: list[Path], tmp_path: Path, over: dict[str, Any], told: str
) -> None:
    prompts_of = {"path": str(tmp_path / "prompts.jsonl"), "shard": "3/4", **over.get("prompts", {})}
    other = made(tmp_path, 3, name="other", **{**over, "prompts": prompts_of})
    said = refused(GuardError, *four[:3], other, tmp_path / "out")
    assert told.format(a=four[0], b=other) in said
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize("left", ["nothing", "a retry's row"])
def test_records_that_nobody_says_what_they_were_made_with_are_refused(
    four: list[Path], tmp_path: Path, left: str
) -> None:
    """They could be another model's."""
    data = four[2] / "data"
    (row,) = settings.read(data)
    settings.write(data, [settings.for_retry(row, 1, ("empty",))] if left == "a retry's row" else [])
    said = refused(GuardError, *four, tmp_path / "out")
    assert f"{data / 'settings.jsonl'} is lost or damaged" in said


def test_another_prompt_set_is_refused(four: list[Path], tmp_path: Path) -> None:
    with (tmp_path / "prompts.jsonl").open("ab") as out:
        out.write(b'{"id": "late", "prompt": "x"}\n')
    other = made(tmp_path, 3, name="other")
    said = refused(GuardError, *four[:3], other, tmp_path / "out")
    assert f"rows of the prompt set: 40 in {four[0]}, 41 in {other}" in said


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"judge": {"purpose": "sft"}}, "judge.purpose: 'drafter' in {a}, 'sft' in {b}"),
        ({"engine": {"args": {"slots": 8}}}, "engine.args.slots: 4 in {a}, 8 in {b}"),
        ({"row": {"version": "2"}}, "version of fake: '1' in {a}, '2' in {b}"),
        ({"gate": {"cohort": 5}, "fleet": {"port": 4444}}, ""),
    ],
)
def test_what_may_differ_is_told_and_merged(four: list[Path], tmp_path: Path, over: dict[str, Any], told: str) -> None:
    other = made(tmp_path, 3, name="other", **over)
    merged = merge([*four[:3], other], tmp_path / "out", lambda text: None)
    assert merged.differs == ([told.format(a=four[0], b=other)] if told else [])
    assert merged.keys == ROWS

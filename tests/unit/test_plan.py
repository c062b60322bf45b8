"""`tokenmill plan`: what a run will take, foretold or measured, never invented."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests import reference
from tests.chaos.conftest import Command
from tests.conftest import write_prompts
from tests.unit.make import record
from tokenmill import plan
from tokenmill.core.status import PromptCounts, RunStatus
from tokenmill.folder import RunFolder
from tokenmill.planning import lengths, page
from tokenmill.planning.answer import Plan, Range
from tokenmill.planning.measured import measure
from tokenmill.store import line_of

SHAPE = {
    *("servers", "running_per_server", "limited_by", "waiting_per_server", "tokens", "hours"),
    *("disk_bytes", "lost_with_the_machine_s", "changes"),
}


@pytest.fixture
def reference_run(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "prompts.jsonl", 1000)
    return tmp_path


def as_json(found: Plan) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(msgspec.json.encode(found))
    return decoded


# -- the reference run -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_there", [False, True], ids=["model elsewhere", "model here"])
@pytest.mark.parametrize(
    ("args", "running", "why"),
    [
        (reference.ARGS, 16, "max-mamba-cache-size"),
        ({**reference.ARGS, "max-mamba-cache-size": 40}, 8, "max-mamba-cache-size"),
        (reference.without("max-mamba-cache-size"), 48, "speculation's own default of 48"),
    ],
)
def test_the_reference_config_on_seven_cards(
    reference_run: Path, is_there: bool, args: dict[str, Any], running: int, why: str
) -> None:
    path = reference.model(reference_run) if is_there else Path("/nowhere/Qwen3.6-27B")
    config = reference.config(reference_run, args=args, model={"path": str(path)}, generation={"concurrency": 64})
    found = as_json(plan.build(config, reference.B200S))
    assert set(found) >= SHAPE
    assert found["servers"] == 7
    assert (found["running_per_server"], found["limited_by"]) == (running, why)
    assert found["waiting_per_server"] == 64 - running
    assert found["hours"] is None
    assert found["lost_with_the_machine_s"] is None


def test_the_changes_that_help_name_the_key_and_the_effect_and_hold(reference_run: Path) -> None:
    path = reference.model(reference_run)
    config = reference.config(reference_run, model={"path": str(path)}, generation={"concurrency": 64})
    found = plan.build(config, reference.B200S)
    assert len(found.changes) <= 3
    told = next(change for change in found.changes if "= 240" in change)
    assert told == "engine.args.max-mamba-cache-size = 240: 48 requests at once per server instead of 16"
    changed = reference.config(
        reference_run, model={"path": str(path)}, args={**reference.ARGS, "max-mamba-cache-size": 240}
    )
    assert plan.build(changed, reference.B200S).running_per_server == 48


def test_a_change_that_would_not_start_or_brings_nothing_is_not_told(reference_run: Path) -> None:
    config = reference.config(reference_run, generation={"concurrency": 16})
    assert not any("max-mamba" in change for change in plan.build(config, reference.B200S).changes)
    path = reference.model(reference_run)
    small = [replace(card, memory_total=60 << 30) for card in reference.B200S]
    found = plan.build(reference.config(reference_run, model={"path": str(path)}), small)
    assert not any("max-mamba" in change for change in found.changes)


def test_cards_that_nobody_uses_are_told(reference_run: Path) -> None:
    found = plan.build(reference.config(reference_run, fleet={"servers": 4}), reference.B200S)
    assert "fleet.servers = 0: a server on each GPU, 7 instead of 4" in found.changes


# -- tokens and hours --------------------------------------------------------------------------------------------------
def test_without_a_measured_rate_there_are_no_hours_but_the_reason(reference_run: Path) -> None:
    found = plan.build(reference.config(reference_run), reference.B200S)
    assert found.hours is None
    assert "no rate is known" in found.hours_from
    assert found.tokens is not None
    assert found.tokens.high == found.pending * (8192 - 4 - round(mean_prompt(reference_run)))


def mean_prompt(folder: Path) -> float:
    return lengths.measure(lengths.sample(folder / "prompts.jsonl"), None, thinking=True).mean


def test_a_given_rate_makes_hours_of_the_tokens(reference_run: Path) -> None:
    found = plan.build(reference.config(reference_run), reference.B200S, tokens_per_s=14_000)
    assert found.tokens is not None
    assert found.hours == Range(*(round(count / 14_000 / 3600, 2) for count in (found.tokens.low, found.tokens.high)))


def stored(folder: RunFolder, tokens: list[int], **fields: Any) -> None:
    """A run folder with a record of each of these lengths."""
    folder.create()
    lines = [line_of(record(f"p{row}", row, output_tokens=count, **fields)) for row, count in enumerate(tokens)]
    (folder.data / "journal-000001.jsonl").write_bytes(b"".join(lines))


def test_measured_lengths_and_rates_replace_assumptions(reference_run: Path) -> None:
    config = reference.config(reference_run)
    folder = RunFolder(config.folder)
    stored(folder, [2000] * 900)
    folder.write_status(running(tokens=1_800_000, seconds=180.0))
    found = plan.build(config, reference.B200S)
    assert (found.completions, found.pending) == (1000, 100)
    assert found.tokens is not None
    assert found.hours is not None
    assert found.tokens.low == 100 * 2000
    assert 100 * 2000 < found.tokens.high < 100 * 3000, "112 in flight may be as long as they may be"
    assert found.hours.low == round(found.tokens.low / 10_000 / 3600, 2)
    assert "900 completions" in found.tokens_from


def running(tokens: int, seconds: float, state: str = "stopped", now: float = 0.0) -> RunStatus:
    return RunStatus("r", state, PromptCounts(), (), now, None, None, tokens=tokens, seconds=seconds)


def test_a_rate_of_the_first_minute_is_none(reference_run: Path) -> None:
    config = reference.config(reference_run)
    folder = RunFolder(config.folder)
    folder.create()
    folder.write_status(running(tokens=50_000, seconds=59.0))
    assert plan.build(config, reference.B200S).hours is None


def test_the_true_mean_lies_within_the_bounds_although_the_short_end_first(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    inside = 0
    for number in range(20):
        every = [min(8000, int(rng.lognormvariate(7, 1))) for _ in range(400)]
        ended = sorted(every[:300])[:250]  # 50 of the first 300 are still in flight, the longest
        folder = RunFolder(tmp_path / str(number))
        stored(folder, ended)
        found = measure(folder, most=8000, in_flight=50)
        assert found.mean is not None
        inside += found.mean[0] <= sum(every) / len(every) <= found.mean[1]
    assert inside >= 15


def test_failed_records_have_no_length(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    stored(folder, [0] * 50, labels=("prompt_too_long",))
    found = measure(folder, most=8000, in_flight=0)
    assert (found.records, found.completions, found.mean) == (50, 0, None)


def test_samples_shards_and_limits_count(reference_run: Path) -> None:
    config = reference.config(
        reference_run, prompts={"limit": 300, "shard": "1/3"}, generation={"samples": 4, "concurrency": 8}
    )
    assert plan.build(config, reference.B200S).completions == 400


def test_turns_count_where_all_are_asked_for(reference_run: Path) -> None:
    said = [{"role": "user", "content": "why " * 40}, {"role": "assistant", "content": "so " * 40}]
    rows = [json.dumps({"messages": said * (1 + number % 4)}) for number in range(100)]
    (reference_run / "prompts.jsonl").write_text("\n".join(rows))
    last, every = (
        plan.build(
            reference.config(reference_run, generation={"turns": turns, "samples": 2, "concurrency": 8}),
            reference.B200S,
        )
        for turns in ("last", "all")
    )
    assert (last.completions, every.completions) == (200, 500)
    assert last.prompt_tokens is not None
    assert every.prompt_tokens is not None
    assert every.prompt_tokens["p99"] == last.prompt_tokens["p99"]
    assert every.prompt_tokens["p50"] < last.prompt_tokens["p50"], "a conversation's first turns are short"


# -- disk --------------------------------------------------------------------------------------------------------------
def test_what_is_foretold_for_the_disk_is_about_what_a_run_takes(tmp_path: Path) -> None:
    """The journal of records whose text and ids are as long as a model's."""
    words = ("the sea", " and", " a", " tide", ", which", " moon", "'s", " pull", " raises")
    rng = random.Random(1)
    text = "".join(rng.choice(words) for _ in range(1200))
    ids = msgspec.Raw(msgspec.json.encode([rng.randrange(100_000) for _ in range(1200)]))
    folder = RunFolder(tmp_path / "run")
    stored(folder, [1200] * 50, text=text, output_ids=ids)
    took = sum(file.stat().st_size for file in folder.data.glob("journal-*"))
    assert 0.5 < 50 * (1200 * plan.JOURNAL_BYTES + plan.RECORD_BYTES) / took < 2


def test_every_export_has_its_figure_and_the_staged_model_too(reference_run: Path) -> None:
    path, ram = reference.model(reference_run), Path("/dev/shm")
    config = reference.config(reference_run, model={"path": str(path)}, stage={"to": str(ram)})
    found = plan.build(config, reference.B200S).disk_bytes
    assert set(found) >= {"journal", "parquet", "export_messages", "export_parquet", "ram_disk"}
    if ram.is_dir():
        assert found["ram_disk"] == reference.WEIGHTS + (path / "config.json").stat().st_size


def test_storing_hidden_states_of_the_reference_run_takes_what_it_found(tmp_path: Path) -> None:
    """Five layers of 5,120 values of two bytes are 51,200 bytes a token. Its 90 TB over 902,087 rows are thus 1,949
    tokens a row, prompt and completion together: that mean is what the figure assumed, and all that it assumed."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "word " * 100}) + "\n")
    path = reference.model(tmp_path)
    config = reference.config(tmp_path, model={"path": str(path)})
    found = plan.build(config, reference.B200S)
    assert found.hidden_states_bytes is not None
    assert found.tokens is not None
    tokens = found.tokens.high + mean_prompt(tmp_path)
    assert found.hidden_states_bytes.high / tokens == pytest.approx(51_200, rel=0.001)
    assert pytest.approx(90e12, rel=0.001) == 902_087 * 1_949 * 51_200


# -- what cannot be known ----------------------------------------------------------------------------------------------
def test_without_prompts_all_else_is_told(tmp_path: Path) -> None:
    found = plan.build(reference.config(tmp_path), reference.B200S)
    assert (found.servers, found.running_per_server) == (7, 16)
    assert (found.tokens, found.hours) == (None, None)
    assert any("prompts.jsonl" in note for note in found.notes)


def test_prompts_are_measured_by_the_models_own_tokenizer_and_template(reference_run: Path) -> None:
    path = reference.model(reference_run)
    vocabulary = {"[UNK]": 0, **{word: number for number, word in enumerate(["Question", "number", "what", "is"], 1)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for turn in messages %}<turn> {{ turn.content }} {% endfor %}<answer>"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    found = plan.build(reference.config(reference_run, model={"path": str(path)}), reference.B200S)
    assert found.prompt_tokens_from == "by the model's tokenizer"
    words = len(["Question", "number", "1:", "what", "is", "1", "+", "1?"]) + 2
    assert found.prompt_tokens == {"p1": words, "p50": words, "p99": words}


def test_lengths_by_bytes_are_said_to_be_so(reference_run: Path) -> None:
    assert "bytes ÷ 4" in plan.build(reference.config(reference_run), reference.B200S).prompt_tokens_from


def test_a_sample_is_spread_over_the_whole_set_and_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{number}\n" + "\n" * (number % 3) for number in range(100_000)))
    found = lengths.sample(path)
    taken = [int(row) for row in found.rows]
    assert found.total == 100_000
    assert lengths.SAMPLED <= len(taken) < 2 * lengths.SAMPLED
    assert len({after - before for before, after in pairwise(taken)}) == 1, "evenly"
    assert taken[-1] > 99_000
    assert lengths.sample(path, limit=777).total == 777


def test_a_glance_sees_rows_of_the_whole_set_whole(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for part in range(2):
        rows = (json.dumps({"id": part * 50_000 + number, "prompt": "x" * (number % 500)}) for number in range(50_000))
        (folder / f"{part}.jsonl").write_text("\n".join(rows))
    found = [json.loads(row)["id"] for row in lengths.glance(folder).rows]
    assert lengths.SAMPLED <= len(found) <= lengths.SAMPLED + 2
    assert found == sorted(set(found))
    assert max(after - before for before, after in pairwise([0, *found, 100_000])) < 1_000
    assert lengths.glance(folder, limit=10).total == 10


# -- the page and the command ------------------------------------------------------------------------------------------
def test_the_page_fits_a_terminal_and_says_what_matters(reference_run: Path) -> None:
    path = reference.model(reference_run)
    config = reference.config(reference_run, model={"path": str(path)}, generation={"concurrency": 64})
    lines = page.lines(plan.build(config, reference.B200S, tokens_per_s=14_000))
    shown = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "16 at once on each, limited by max-mamba-cache-size" in shown
    assert "48 of them would only wait" in shown
    assert "14,000 tokens/s, as given" in shown


def test_the_command_prints_one_object_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 40)
    path = tmp_path / "run.toml"
    path.write_text(
        '[engine]\nkind = "fake"\nargs = { slots = 3 }\n[fleet]\ngpus = "none"\nservers = 2\n'
        '[prompts]\npath = "prompts.jsonl"\n[generation]\nmax_tokens = 100\n'
    )
    code, said = Command(monkeypatch, capsys)("plan", path, "--json", "--tokens-per-s", "50")
    found = json.loads(said)
    assert code == 0
    assert (found["servers"], found["running_per_server"], found["limited_by"]) == (2, 3, "slots")
    assert found["hours"]["high"] == round(4000 / 50 / 3600, 2)
    assert not (tmp_path / "runs").exists(), "a plan writes nothing"

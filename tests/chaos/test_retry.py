"""Second chances: only what was asked for is made again, each id once whatever is killed, and the accounts add up."""

import json
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import pytest

from tests.chaos.conftest import Command, Here, write_short_prompts
from tests.conftest import write_prompts
from tests.harness import Case, answered_prompts, assert_whole, wait_until
from tokenmill import dataset, settings
from tokenmill.core.records import Record

ROWS, SAMPLES = 120, 2
LENIENT = {"max_rejected": 1.0, "max_truncated": 1.0}


def thoughtless(case: Case, share: float, **more: Any) -> None:
    """A fleet of which that share of prompts gets no thought: always the same ones."""
    args = {"slots": 4, "quick-canary": True, "empty-reasoning": share, **more}
    case.write(engine={"args": args}, generation={"samples": SAMPLES, "max_tokens": 400}, gate=LENIENT)


def status(case: Case, tokenmill: Command) -> dict[str, Any]:
    code, said = tokenmill("status", case.run_path, "--json")
    assert code == 0, said
    return dict(json.loads(said.strip().splitlines()[-1]))


def stored(case: Case) -> Counter[tuple[str, int]]:
    return Counter((brief.key, brief.sample) for brief in dataset.briefs(case.run_path / "data"))


def bad(records: list[Record]) -> list[Record]:
    return [record for record in records if "empty_reasoning" in record.labels]


@pytest.mark.timeout(180)
def test_a_retry_that_is_killed_goes_on_and_makes_nothing_twice(case: Case, tokenmill: Command) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    (case.folder / "prompts.jsonl").unlink()
    write_prompts(case.folder / "prompts.jsonl", ROWS)
    thoughtless(case, 0.3)
    assert tokenmill("run", case.config)[0] == 0
    keys = {f"p{number}" for number in range(ROWS)}
    before = {(record.key, record.sample): record for record in case.records()}
    again = {place for place, record in before.items() if bad([record])}
    assert 20 < len(again) < ROWS * SAMPLES // 2

    asked = case.folder / "asked.jsonl"
    thoughtless(case, 0.0, requests=str(asked), **{"latency-ms": 60})
    words = ("--retry", "empty_reasoning", "--set", "generation.max_tokens=800")
    process = case.start(*words)
    least = random.Random(seed).randrange(1, len(again) - 8)
    wait_until(lambda: case.done() >= least, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    made = sum(stored(case).values()) - ROWS * SAMPLES
    assert 0 < made < len(again)

    # The run itself says that a retry was cut short, how to go on with it, and that all its records count.
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert "retry 1 (empty_reasoning) was cut short" in said
    assert "--retry empty_reasoning --set generation.max_tokens=800   goes on with it" in " ".join(said.split("\n"))
    assert status(case, tokenmill)["prompts"]["pending"] == 0
    assert_whole(case, keys, samples=SAMPLES)
    assert len(bad(case.records())) == len(again) - made

    code, said = tokenmill("run", case.config, *words)
    assert code == 0, said
    assert f"{len(again) - made} completions once more, {made} are made again already" in said
    assert_whole(case, keys, samples=SAMPLES)
    assert bad(case.records()) == []
    after = {(record.key, record.sample): record for record in case.records()}
    assert {place for place, record in after.items() if record != before[place]} == again
    assert all(after[place].cohort == before[place].cohort for place in again)
    # Exactly what was asked for, once: what was in flight at the kill was asked of a server once more.
    assert stored(case) == Counter({place: 2 if place in again else 1 for place in before})
    texts = Counter(f"Question number {key[1:]}: what is {key[1:]} + 1?" for key, _ in again)
    extra = answered_prompts(asked) - texts
    assert extra.total() <= 8
    assert set(answered_prompts(asked)) == set(texts)
    counts = status(case, tokenmill)
    assert counts["prompts"] == {"total": 240, "accepted": 240, "rejected": 0, "failed": 0, "pending": 0}
    assert counts["labels"] == {}
    rows = settings.read(case.run_path / "data")
    assert [(row.retry, row.labels, row.ended) for row in rows] == [(0, (), False), (1, ("empty_reasoning",), True)]
    assert {record.settings for record in after.values()} == {row.id for row in rows}

    code, said = tokenmill("run", case.config, *words)
    assert (code, "nothing to do" in said) == (0, True)
    out = case.folder / "out"
    assert tokenmill("export", case.run_path, "parquet", out)[0] == 0
    card = (out / "README.md").read_text()
    assert all(f"settings {row.id}" in card for row in rows)
    assert case.ended()


def test_an_attempt_that_fails_loses_nothing(here: Here, case: Case, tokenmill: Command) -> None:
    """A refusal (more tokens than the server has, for one) must not put a failed record in an older one's place."""
    args = {"slots": 4, "empty-reasoning": 1.0}
    code, said = here(engine={"args": args}, gate=LENIENT)
    assert code == 0, said
    before = case.records()
    case.write(engine={"args": {"slots": 4, "refuse-word": "number 1"}})  # 11 of the 40
    code, said = tokenmill("run", case.config, "--retry", "rejected,truncated")
    assert code == 0, said
    assert "11 completions were not made again; their older records go on counting" in said
    assert said.count("its older record goes on counting") == 5
    records = case.records()
    assert {record.key for record in records if record in before} == {f"p{n}" for n in (1, *range(10, 20))}
    assert status(case, tokenmill)["prompts"] == {
        "total": 40,
        "accepted": 29,
        "rejected": 11,
        "failed": 0,
        "pending": 0,
    }
    # It has ended, so the same command is another one: for what is still so.
    case.write(engine={"args": {"slots": 4}})
    code, said = tokenmill("run", case.config, "--retry", "rejected,truncated")
    assert (code, "retry 2 (rejected, truncated_in_answer, truncated_in_thinking): 11 completions" in said) == (0, True)
    assert status(case, tokenmill)["prompts"]["accepted"] == 40
    assert case.ended()


def test_what_the_gate_stopped_is_made_again_within_its_cohorts(here: Here, case: Case, tokenmill: Command) -> None:
    """The retried rows leave their cohorts for the time being: it is not stopped for what it is to repair."""
    code, said = here(engine={"args": {"slots": 2, "empty-reasoning": 1.0, "latency-ms": 20}})
    assert code == 5, said
    ended = len(case.records())
    assert ended < 20
    case.write(engine={"args": {"slots": 2}})
    code, said = tokenmill("run", case.config, "--retry", "empty_reasoning")
    assert code == 0, said
    assert f"{40 - ended} completions have no record yet" in said
    assert status(case, tokenmill)["state"] == "stopped"
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert_whole(case, {f"p{number}" for number in range(40)})
    assert status(case, tokenmill)["prompts"]["accepted"] == 40
    code, said = tokenmill("run", case.config, "--retry", "empty_reasonings")
    assert (code, "no label named empty_reasonings" in said, "truncated_in_thinking" in said) == (2, True, True)
    assert tokenmill("run", case.config, "--retry", "")[0] == 2
    code, said = tokenmill("run", case.config, "--retry", "empty_answer", "--set", "generation.thinking=false")
    assert (code, "thinking: was True, is False" in said) == (2, True)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_real_answers_that_were_cut_off_are_made_longer(llama: Case, tokenmill: Command) -> None:
    """llama.cpp at 3 tokens, then the same prompts at 24, killed in the middle, detached the second time."""
    keys = write_short_prompts(llama.folder / "prompts.jsonl", 16)
    llama.write(fleet={"servers": 1, "keep_servers": "always"})
    assert llama.run() == 0, llama.output()
    cut = [record.finish_reason for record in llama.records()].count("length")
    assert cut >= 12, "a real model may end an answer by itself after three tokens, now and then"
    words = ("--retry", "truncated", "--set", "generation.max_tokens=24")
    process = llama.start(*words)
    wait_until(lambda: llama.done() >= 5, process, 60.0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert llama.run(*words, "--detach") == 0, llama.output()
    wait_for_end(llama)
    assert_whole(llama, keys)
    records = llama.records()
    print(Counter((record.finish_reason, record.output_tokens) for record in records))
    assert all(record.finish_reason == "stop" or record.output_tokens == 24 for record in records)
    assert sum(stored(llama).values()) == len(keys) + cut
    assert tokenmill("down", llama.run_path)[0] == 0
    assert llama.ended()


def wait_for_end(case: Case) -> None:
    deadline = time.monotonic() + 60.0
    while case.run_folder.owner() is not None:
        assert time.monotonic() < deadline, case.output()
        time.sleep(0.1)

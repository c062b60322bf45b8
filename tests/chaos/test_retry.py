"""Second chances: only what was asked for is made again, each id once whatever is killed, and the accounts add up."""

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
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
    rows = random.Random(seed).randrange(1, len(again) - 8)
    wait_until(lambda: case.done() >= rows, process)
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

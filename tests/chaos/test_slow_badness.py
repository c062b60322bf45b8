"""tokenmill killed (-9) around the moment at which a server goes bad: every id once, the accounts right, nothing left.

A row that was rejected before the kill, and not yet made anew, stays as it is: rejected. A sick server that outlived
the kill is adopted, since it passes a canary, and is found out again.
"""

import json
import os
import random
import signal
import time

import pytest

from tests.conftest import write_prompts
from tests.harness import Case, assert_whole, wait_until
from tokenmill import dataset, events
from tokenmill.core.judge import Rules, Verdict, judged

ROWS = 800


def named(case: Case) -> bool:
    return any(event.kind == "server_went_bad" for event, _ in events.read(case.run_folder.events))


@pytest.mark.timeout(180)
@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_a_kill_while_rows_are_made_anew_loses_and_doubles_nothing(case: Case, number: int) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}, {number}")
    rng = random.Random(seed)
    write_prompts(case.folder / "prompts.jsonl", ROWS - 40, start=40)
    args = {"slots": 4, "latency-ms": 40, "bad-after": 100, "bad-once": str(case.folder / "bad")}
    case.write(engine={"args": args}, gate={"cohort": 200}, generation={"max_tokens": 2000})
    process = case.start()
    # From the first bad answer until well after the verdict.
    wait_until(lambda: named(case) if number % 2 else (case.folder / "bad").exists(), process)
    time.sleep(rng.uniform(0.0, 0.6))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert case.run() == 0, case.output()
    assert_whole(case, {f"p{number}" for number in range(ROWS)})
    verdicts = [judged(record, Rules())[0] for record in case.records()]
    bad = [record for record in case.records() if "!!!!" in record.text]
    assert len(bad) == verdicts.count(Verdict.REJECTED) <= 60
    counts = json.loads((case.run_path / "status.json").read_text())["prompts"]
    assert counts == {
        "total": ROWS,
        "accepted": verdicts.count(Verdict.ACCEPTED),
        "rejected": len(bad),
        "failed": 0,
        "pending": 0,
    }
    stored = sum(1 for _ in dataset.briefs(case.run_path / "data"))
    print(f"{len(bad)} bad rows stay, {stored - ROWS} were made anew")
    assert case.ended()

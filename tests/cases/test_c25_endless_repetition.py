"""C25: one sentence or one character until the budget is gone, from the model or from a server that has gone bad.

(Thought and answer are judged together, by the last 4,000 characters: a loop in a thought that ends, with a long answer
behind it, is not seen. That, and run lengths, is data's work.)
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_prompts
from tests.harness import Case, assert_whole
from tokenmill import dataset, events
from tokenmill.core import judge
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import Completion, Record

PROSE = (
    "The river turns north below the mill, and the road leaves it there to climb between two fields of rye. Whoever"
    " walks it early meets nobody but the miller's dog, which knows every cart by its wheels and barks at none of them."
)
TABLE = PROSE + "\n\n| n | n² | n³ |\n|---|---|---|\n" + "".join(f"| {n} | {n * n} | {n**3} |\n" for n in range(1, 41))
LIST = (
    PROSE + "\n\n" + "".join(f"- Step {n}: open valve {n * 7 % 31}, wait {n * 3 % 17} s, note it.\n" for n in range(40))
)
CJK = (
    "石磨在河边转动了一百年，村里的人都说它的声音像老人讲故事。春天水涨，轮子转得快，面粉细得像雪；到了冬天，"
    "冰从岸边慢慢合拢，磨坊主便把窗子关好，点上灯，修补麻袋，等着第一场东风。孩子们放学后常来看水车，数它转了几圈，"
    "谁也没有数到过一千，因为总有人喊他们回家吃饭。后来修了公路，面粉改用汽车运，水车却没有拆，留给了麻雀和青苔。"
)


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("I should check the sign of the second term again. " * 300, True),
        ("!" * 2000, True),
        ("Let me try x = 3.\nThat does not work, so x = 4.\n" * 100, True),
        (TABLE + LIST, False),
        (CJK, False),
    ],
    ids=["one sentence", "one character", "two lines", "a table and a list", "CJK without spaces"],
)
@pytest.mark.parametrize("where", ["thought", "answer"])
def test_a_loop_is_told_from_text_that_is_only_alike(text: str, loops: bool, where: str) -> None:
    whole = (
        f"<think>\n{text}\n</think>\n\nSo it is 42." if where == "thought" else f"<think>\n{PROSE}\n</think>\n\n{text}"
    )
    found = judge.measure(Completion(whole, "stop", output_tokens=900), Reading(thinking=True), Rules())
    assert ("repetition" in found.labels) == loops


def superseded(case: Case) -> list[dict[str, Any]]:
    """The records that a newer one of their id stands behind, in the order of their writing."""
    newest: dict[str, dict[str, Any]] = {}
    old = []
    for path in sorted((case.run_path / "data").glob("part-*.parquet")):
        for record in dataset.part_records(path):
            row = {"key": record.key, "attempt": record.attempt, "labels": record.labels, "server": record.server}
            kept = newest.get(record.key)
            if kept is not None:
                old.append(min(kept, row, key=lambda one: one["attempt"]))
            newest[record.key] = row if kept is None else max(kept, row, key=lambda one: one["attempt"])
    return old


def is_bad(record: Record) -> bool:
    return "!!!!" in record.text


@pytest.mark.timeout(120)
def test_a_server_that_turns_to_one_character_is_named_restarted_and_its_rows_are_made_anew(case: Case) -> None:
    write_prompts(case.folder / "prompts.jsonl", 760, start=40)
    once = case.folder / "bad"
    args = {"slots": 4, "latency-ms": 100, "bad-after": 100, "bad-once": str(once)}
    case.write(engine={"kind": "fake", "args": args}, gate={"cohort": 200}, generation={"max_tokens": 2000})
    assert case.run() == 0, case.output()
    assert once.exists(), "no server went bad"
    # The dataset: whole, each id once, nothing of it bad.
    records = case.records()
    assert_whole(case, {f"p{number}" for number in range(800)})
    assert [record.key for record in records if is_bad(record)] == []
    # Who it was, and what came of it.
    told = [event for event, _ in events.read(case.run_folder.events)]
    (named,) = (event for event in told if event.kind == "server_went_bad" and event.level == "warn")
    print(named.text)
    assert "repetition" in named.text
    ended = [event for event in told if event.kind == "server" and "it has gone bad" in event.text]
    assert [event.server for event in ended] == [named.server]
    assert Counter(event.server for event in told if event.kind == "launch")[named.server] == 2
    over = [event for event in told if event.kind == "server_went_bad" and event.level == "info"]
    assert [event.server for event in over] == [named.server]
    # Its bad rows are kept as superseded ones, and are few; the gate and the accounts count the new ones.
    old = superseded(case)
    assert {row["server"] for row in old} == {named.server}
    assert 10 <= len(old) <= 30
    assert all("repetition" in row["labels"] for row in old)
    again = {record.key: record.attempt for record in records if record.attempt > 1}
    assert set(again) == {row["key"] for row in old}
    status = json.loads((case.run_path / "status.json").read_text())
    assert status["prompts"] == {"total": 800, "accepted": 800, "rejected": 0, "failed": 0, "pending": 0}
    assert status["labels"] == {}
    report = json.loads((case.run_path / "report.json").read_text())
    (finding,) = (row for row in report["findings"] if row["kind"] == "server_went_bad")
    assert (finding["server"], finding["text"]) == (named.server, named.text)
    assert finding["ended"]
    assert "800 of 800 completions are accepted" in report["verdict"]
    assert named.text.split(" (")[0].replace("'", "&#39;") in (case.run_path / "report.html").read_text()


@pytest.mark.timeout(120)
def test_a_server_alone_that_goes_bad_is_restarted_before_the_gate_ends_the_run(case: Case, tmp_path: Path) -> None:
    write_prompts(case.folder / "prompts.jsonl", 260, start=40)
    args = {"slots": 4, "latency-ms": 10, "bad-after": 170, "bad-once": str(tmp_path / "bad")}
    case.write(engine={"kind": "fake", "args": args}, fleet={"servers": 1}, gate={"cohort": 200})
    assert case.run() == 0, case.output()
    assert "of its first 100" in case.output()
    assert_whole(case, {f"p{number}" for number in range(300)})
    assert not any(map(is_bad, case.records()))

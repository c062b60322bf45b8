"""The accounts: accepted + rejected + failed + pending = all ids asked for, always."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.make import jsonl, record
from tokenmill import dataset, prompts
from tokenmill.core.gate import Gate, Limits
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record
from tokenmill.dataset import Brief
from tokenmill.ledger import Found, Ledger
from tokenmill.store import line_of

REJECTED: dict[str, Any] = {"labels": ("empty_answer",)}
FAILED: dict[str, Any] = {"labels": ("aborted",)}


def index_of(folder: Path, count: int = 6) -> prompts.Index:
    """Rows k0, k1 … whose content is their number."""
    return prompts.scan(jsonl(folder / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"q{n}"} for n in range(count)]))


def digest(row: int) -> str:
    return prompts.identity(f'{{"prompt": "q{row}"}}'.encode()).digest


def stored(row: int, **fields: Any) -> Record:
    return record(f"k{row}", row, **{"digest": digest(row), **fields})


def briefs(*files: Sequence[Record]) -> list[Brief]:
    """What is read of journals, the oldest first."""
    with TemporaryDirectory() as folder:
        for number, records in enumerate(files, 1):
            (Path(folder) / f"journal-{number:06d}.jsonl").write_bytes(b"".join(map(line_of, records)))
        return list(dataset.briefs(Path(folder)))


def load(ledger: Ledger, *records: Record, gate: Gate | None = None, rules: Rules | None = None) -> Found:
    return ledger.load(briefs(records), rules or Rules(), gate or Gate(Limits()))


def counts(ledger: Ledger) -> tuple[int, int, int, int, int]:
    found = ledger.counts()
    return (found.total, found.accepted, found.rejected, found.failed, found.pending)


def test_what_is_stored_is_counted_by_its_verdict(tmp_path: Path) -> None:
    ledger = Ledger(index_of(tmp_path), samples=1)
    found = load(ledger, stored(0), stored(2, **REJECTED), stored(5, **FAILED))
    assert counts(ledger) == (6, 1, 1, 1, 3)
    assert (found.rows, found.changed, found.strangers) == (3, [], 0)
    assert ledger.labels == {"empty_answer": 1, "aborted": 1}
    assert ledger.tokens == 120
    assert [ledger.pending_samples(row) for row in range(6)] == [[], [0], [], [0], [0], []]


def test_other_rules_judge_what_is_stored_anew(tmp_path: Path) -> None:
    ledger = Ledger(index_of(tmp_path), samples=1)
    load(ledger, stored(0, reasoning_tokens=10), rules=Rules(min_reasoning_tokens=11))
    assert (counts(ledger), ledger.labels) == ((6, 0, 1, 0, 5), {"empty_reasoning": 1})


def test_samples_of_a_prompt_are_ids_of_their_own(tmp_path: Path) -> None:
    ledger = Ledger(index_of(tmp_path), samples=3)
    load(ledger, stored(1, sample=2))
    ledger.mark(stored(1, sample=0, **REJECTED), Verdict.REJECTED)
    assert counts(ledger) == (18, 1, 1, 0, 16)
    assert ledger.pending_samples(1) == [1]


def test_rows_that_nobody_asks_for_now_are_strangers(tmp_path: Path) -> None:
    ledger = Ledger(index_of(tmp_path), samples=1)
    found = load(ledger, record("other"), stored(1, sample=1), stored(2))
    assert (found.strangers, found.changed) == (2, [])
    assert counts(ledger) == (6, 1, 0, 0, 5)


def test_a_row_with_other_content_now_is_named(tmp_path: Path) -> None:
    ledger = Ledger(index_of(tmp_path), samples=1)
    found = load(ledger, stored(3, digest="00000000000000ff"), stored(4))
    assert (found.changed, found.strangers) == (["k3"], 0)
    assert ledger.pending_samples(3) == [0]


def test_rows_are_found_again_by_key_wherever_they_stand_now(tmp_path: Path) -> None:
    rows = [{"id": f"k{n}", "prompt": f"q{n}"} for n in reversed(range(6))]
    ledger = Ledger(prompts.scan(jsonl(tmp_path / "prompts.jsonl", rows)), samples=1)
    load(ledger, stored(0))
    assert ledger.pending_samples(5) == []
    assert ledger.pending_samples(0) == [0]


FIRST, LATER = stored(0, **FAILED), stored(0, attempt=2)


@pytest.mark.parametrize(
    "files",
    [
        ([FIRST], [LATER]),
        ([FIRST, stored(1)], [stored(2)], [LATER, stored(3)]),
        ([FIRST, LATER],),
    ],
)
def test_a_superseded_attempt_counts_nowhere(tmp_path: Path, files: tuple[list[Record], ...]) -> None:
    ledger, gate = Ledger(index_of(tmp_path), samples=1), Gate(Limits())
    found = ledger.load(briefs(*files), Rules(), gate)
    ids = len({record.row for file in files for record in file})
    assert counts(ledger) == (6, ids, 0, 0, 6 - ids)
    assert (ledger.labels, ledger.tokens, found.cohorts[0], gate.tallies[0].ended) == ({}, 40 * ids, ids, ids)
    assert found.rows == sum(map(len, files))


def test_the_gate_sees_every_stored_record_in_its_cohort(tmp_path: Path) -> None:
    gate = Gate(Limits())
    found = load(Ledger(index_of(tmp_path), 1), stored(0), stored(1, cohort=4, **REJECTED), stored(2), gate=gate)
    assert (gate.tallies[0].ended, gate.tallies[4].ended, gate.tallies[4].rejected) == (2, 1, 1)
    assert (found.cohorts[0], max(found.cohorts)) == (2, 4)


def test_an_empty_set_and_an_empty_store_are_no_trouble(tmp_path: Path) -> None:
    ledger = Ledger(index_of(tmp_path, 0), samples=2)
    assert load(ledger, stored(0)).strangers == 1
    assert counts(ledger) == (0, 0, 0, 0, 0)
    assert load(Ledger(index_of(tmp_path), 1)) == Found()


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_shards_are_disjoint_and_hold_all_rows_together(tmp_path: Path, of: int) -> None:
    index = index_of(tmp_path, 200)
    shards = [Ledger(index, 2, (part, of)) for part in range(of)]
    asked = [row for shard in shards for row in shard.rows_asked().tolist()]
    assert sorted(asked) == list(range(200))
    assert sum(shard.counts().total for shard in shards) == 400
    assert all(len(shard.rows_asked()) > 200 / of / 2 for shard in shards)


def test_a_record_of_another_shard_is_a_stranger(tmp_path: Path) -> None:
    index = index_of(tmp_path, 20)
    mine = Ledger(index, 1, (0, 2))
    row = int(Ledger(index, 1, (1, 2)).rows_asked()[0])
    assert load(mine, stored(row)).strangers == 1
    assert mine.pending_samples(row) == []


VERDICTS = st.sampled_from([{}, REJECTED, FAILED, {"labels": ("bad_prompt",)}, {"reasoning_tokens": 0}])


@settings(max_examples=30, deadline=None)
@given(
    seen=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), VERDICTS), max_size=20),
    samples=st.integers(1, 3),
    shard=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
)
def test_the_accounts_add_up_whatever_is_stored(
    seen: list[tuple[int, int, dict[str, Any]]], samples: int, shard: tuple[int, int]
) -> None:
    with TemporaryDirectory() as folder:
        ledger = Ledger(index_of(Path(folder)), samples, shard)
        before = ledger.counts().total
        load(ledger, *(stored(row, sample=sample, **fields) for row, sample, fields in seen))
    total, accepted, rejected, failed, pending = counts(ledger)
    assert accepted + rejected + failed + pending == total == before
    assert total == samples * len(ledger.rows_asked())
    assert pending == sum(len(ledger.pending_samples(row)) for row in range(6))


# -- every turn of a conversation
def talks(folder: Path, *turns: int) -> prompts.Index:
    """Rows k0, k1 … of so many turns each."""
    rows = [
        {"id": f"k{row}", "messages": [{"role": "user", "content": f"q{row}.{turn}"} for turn in range(count)]}
        for row, count in enumerate(turns)
    ]
    return prompts.scan(jsonl(folder / "prompts.jsonl", rows), every_turn=True)


def said(index: prompts.Index, row: int, turn: int, **fields: Any) -> Record:
    return record(f"k{row}", row, turn=turn, digest=f"{int(index.digests[row]):016x}", **fields)


CUT: dict[str, Any] = {"labels": ("truncated_in_answer",), "finish_reason": "length"}
BROKEN: dict[str, Any] = {"labels": ("broken_off",), "cohort": -1}


def test_every_turn_of_every_sample_is_an_id(tmp_path: Path) -> None:
    index = talks(tmp_path, 3, 1, 2)
    ledger = Ledger(index, samples=2)
    found = load(ledger, said(index, 0, 0), said(index, 2, 1, sample=1), said(index, 1, 1), said(index, 0, 1, sample=2))
    assert (found.strangers, counts(ledger)) == (2, (12, 2, 0, 0, 10))
    assert [ledger.pending_turns(0, 0), ledger.pending_turns(0, 1)] == [range(1, 3), range(3)]
    assert [ledger.pending_turns(2, 0), ledger.pending_turns(2, 1)] == [range(2), range(1)]
    assert ledger.under_way() == {(0, 0): 0}
    ledger.mark(said(index, 0, 1), Verdict.ACCEPTED)
    ledger.mark(said(index, 0, 2), Verdict.ACCEPTED)
    assert (ledger.pending_samples(0), ledger.under_way()) == ([1], {})
    assert ledger.rows_pending().tolist() == [True, True, True]


def test_turns_that_were_broken_off_are_open_again_once_the_turn_before_them_is_good(tmp_path: Path) -> None:
    index = talks(tmp_path, 3, 3, 3, 2)
    stored = [
        *(said(index, 0, 0, repetition=9.0), said(index, 0, 1, **BROKEN), said(index, 0, 2, **BROKEN)),
        *(said(index, 1, 0), said(index, 1, 1, **CUT), said(index, 1, 2, **BROKEN)),
        *(said(index, 2, 0, **FAILED), said(index, 2, 1, **BROKEN), said(index, 2, 2, **BROKEN)),
        *(said(index, 3, 0), said(index, 3, 1)),
    ]
    ledger = Ledger(index, samples=1)
    load(ledger, *stored)
    assert counts(ledger) == (11, 4, 1, 6, 0)
    anew = Ledger(index, samples=1)
    load(anew, *stored, rules=Rules(max_repetition=10.0))
    assert counts(anew) == (11, 5, 0, 4, 2)
    assert anew.labels == {"broken_off": 3, "truncated_in_answer": 1, "aborted": 1}
    assert anew.under_way() == {(0, 0): 0}


def test_the_gate_does_not_count_what_was_never_asked_for(tmp_path: Path) -> None:
    index, gate = talks(tmp_path, 3), Gate(Limits())
    load(Ledger(index, 1), said(index, 0, 0), said(index, 0, 1, **CUT), said(index, 0, 2, **BROKEN), gate=gate)
    assert {number: tally.ended for number, tally in gate.tallies.items()} == {0: 2}
    assert gate.observe(-1, Verdict.FAILED, ["broken_off"]) is None


def test_shards_share_the_turns(tmp_path: Path) -> None:
    index = talks(tmp_path, *[1 + row % 4 for row in range(40)])
    shards = [Ledger(index, 2, (part, 3)) for part in range(3)]
    assert sum(counts(ledger)[0] for ledger in shards) == 2 * 100
    assert sorted(row for ledger in shards for row in ledger.rows_asked().tolist()) == list(range(40))

"""The collector between a node and a slow prompt file, and what it tells the gate of cohorts."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.make import jsonl
from tests.unit.test_collect_again import Moody, accounts_of, collected
from tests.unit.test_feed import all_of, said
from tokenmill.collect import Collector
from tokenmill.core.gate import Limits
from tokenmill.events import EventLog
from tokenmill.feed import BATCH, Feed
from tokenmill.folder import RunFolder
from tokenmill.rows import Mask, RawRow
from tokenmill.store import Store, line_of

ROWS, READ = 3 * BATCH, 2 * BATCH


class Slow(Feed):
    """A prompt file that gives no more rows after READ, until nearly all answers to those before are stored."""

    def _rows(self, wanted: Mask) -> Iterator[RawRow]:
        for number, raw in enumerate(super()._rows(wanted)):
            deadline = time.monotonic() + 20
            while number == READ and self._ledger.counts().done < READ - 20:
                assert time.monotonic() < deadline, f"only {self._ledger.counts().done} answers are stored"
                time.sleep(0.01)
            yield raw


def test_prompt_file_that_hangs_holds_up_no_answer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    path = jsonl(tmp_path / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"q{n}"} for n in range(ROWS)])
    accounts = accounts_of(folder, path, 1)
    accounts.feed.close()
    accounts = replace(accounts, feed=Slow(path, accounts.ledger, "s", cohort=20, held={}, dedup=False))
    node = Moody(random.Random(1))
    collected(folder, accounts, node, node)
    accounts.feed.close()
    assert accounts.ledger.counts().pending == 0


class Good(Moody):
    """A node whose answers are all good."""

    def _make(self) -> None:
        self.records.append(said(self.waiting.pop()))


@pytest.mark.parametrize("missing", [0, 1, 15])
@pytest.mark.parametrize(("bad", "stops"), [(2, False), (3, True)])
def test_the_last_cohort_is_judged_by_its_own_size_in_every_life(
    tmp_path: Path, missing: int, bad: int, stops: bool
) -> None:
    """It has 10 ids, and a fifth may be rejected. What a killed run had in flight was of cohort 1."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    path = jsonl(tmp_path / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"q{n}"} for n in range(110)])
    limits = Limits(cohort=20)
    first = accounts_of(folder, path, 1, limits)
    first.feed.close()
    items = all_of(path, first.ledger, cohort=20)
    assert [item.cohort for item in items[-11:]] == [4, *[5] * 10]
    stored = [said(item) for item in (*items[:20], *items[20 + missing : -bad])]
    stored += [said(item, labels=("empty_answer",)) for item in items[-bad:]]
    (folder.data / "journal-000001.jsonl").write_bytes(b"".join(map(line_of, stored)))
    accounts = accounts_of(folder, path, 1, limits)
    if missing:
        node = Good(random.Random(1))
        collected(folder, accounts, node, node)
    accounts.feed.close()
    assert accounts.ledger.left == 0
    collector = Collector(accounts, Store(folder.data, 1, lambda *told: None), folder, EventLog(folder.events))
    collector.check_cohorts()
    assert str(collector.alarm).startswith("cohort 5: 3 of 10 rejected after 10 ended") == stops
    assert (collector.alarm is not None) == stops

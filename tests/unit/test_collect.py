"""The collector between a node and a slow prompt file."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.unit.make import jsonl
from tests.unit.test_collect_again import Moody, accounts_of, collected
from tokenmill.feed import BATCH, Feed
from tokenmill.folder import RunFolder
from tokenmill.rows import Mask, RawRow

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

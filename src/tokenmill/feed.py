"""The prompts of a run in order of dispatch, as a stream: the first cohort spread over the whole set, then the rest.

Reading happens in one worker thread, a batch ahead; rows that cannot be used come out as failed records.

Where every turn is asked for, a conversation that was begun goes on before another one begins: a turn's record makes
the next turn's prompt. What is still to be said waits here, of those conversations only that have a prompt out.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from msgspec import Raw
from msgspec.structs import replace

from tokenmill import prompts
from tokenmill.core.records import NO_COHORT, NULL, Label, Prompt, Record, failed
from tokenmill.core.schedule import cohorts, spread
from tokenmill.core.turns import following
from tokenmill.errors import BadPromptError, UsageError
from tokenmill.ledger import Ledger
from tokenmill.rows import Mask, RawRow

BATCH = 256
"""Prompts read ahead: a quarter of a megabyte of usual rows."""

LATER = -2
"""In place of the cohort's number of whatever is not of the first: it gets one as it is handed out."""

Item = Prompt | Record

Begun = Mapping[tuple[int, int], tuple[Record, str]]
"""Of conversations that an earlier life began, by row and sample: the record of the last turn, and why the next cannot
be asked for, empty where it can."""


class Feed:
    """`first_cohort` are the rows of cohort 0 that are still to be made, `first_cohort_pending` its ids without any
    record: first turns. Later cohorts are counted by ids, `held` those that each has from before: the turns of a
    conversation come to be in several. What is made again stays in its cohort, asked as it was before: `before` has the
    older records of later turns.
    """

    def __init__(
        self,
        path: Path,
        ledger: Ledger,
        settings: str,
        *,
        cohort: int,
        held: Mapping[int, int],
        dedup: bool,
        begun: Begun | None = None,
        before: Mapping[tuple[int, int, int], Record] | None = None,
    ) -> None:
        self._read_all = not ledger.left
        self._is_partial = ledger.counts().pending > ledger.left
        self._path = path
        self._ledger = ledger
        self._settings = settings
        self._sizes = Counter(held)
        self._untold = set(held)
        self._numbers = cohorts(held, cohort)
        self._begun = dict(begun or {})
        self._before = dict(before or {})
        self._reopened: dict[tuple[int, int], tuple[Record, str]] = {}
        self._to_say: dict[tuple[int, int], list[Raw]] = {}
        self._next_turns: deque[Prompt] = deque()
        self._repeats = ledger.index.repeats_content() if dedup else None
        asked = ledger.rows_asked()
        rows = -(-cohort // ledger.samples)
        chosen = [int(asked[place]) for place in spread(len(asked), rows)]
        self.first_cohort = [row for row in chosen if ledger.pending_samples(row)]
        self.first_cohort_pending = sum(map(ledger.unrecorded, chosen))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._stream = self._items()
        self._ahead: asyncio.Future[list[Item]] | None = None
        self._ready: list[Item] = []

    @property
    def ended(self) -> bool:
        """Whether every prompt of the set has been taken, and every turn that can be asked for."""
        waiting = self._ready or self._to_say or self._next_turns or self._reopened
        return self._read_all and not waiting

    async def take(self, count: int) -> list[Item]:
        """The next items, `count` at most; fewer only at the end of the set."""
        turns = [self._next_turns.popleft() for _ in range(min(count, len(self._next_turns)))]
        return [self._numbered(item) for item in (*turns, *await self._read_ahead(count - len(turns)))]

    async def _read_ahead(self, count: int) -> list[Item]:
        loop = asyncio.get_running_loop()
        if self._read_all and self._reopened:
            self._begun, self._reopened = self._reopened, {}
            self._stream, self._read_all = self._gone_on_after_all(set(self._begun)), False
        while len(self._ready) < count and not self._read_all:
            if self._ahead is None:
                self._ahead = loop.run_in_executor(self._thread, self._read)
            batch = await self._ahead
            self._ahead = loop.run_in_executor(self._thread, self._read) if batch else None
            self._read_all = not batch
            self._ready += batch
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def _numbered(self, item: Item) -> Item:
        """What is made again has its cohort's number already, and that cohort its size."""
        if item.cohort != LATER:
            return item
        number = next(self._numbers)
        self._sizes[number] += 1
        self._untold.add(number)
        return replace(item, cohort=number)

    def final_sizes(self) -> dict[int, int]:
        """Of the cohorts after the first, once nothing more can be asked for: each is as large as what it holds. Those
        alone that were not told of before. None in a retry of a run that has not asked for everything yet."""
        if not self.ended or self._is_partial:
            return {}
        untold, self._untold = self._untold, set()
        return {number: self._sizes[number] for number in untold if number > 0}

    # -- the turns of a conversation
    def broken_off(self, record: Record, why: str) -> list[Record]:
        """The records of the turns that can never be asked for, since this one ended as it did."""
        given_up = self._to_say.pop((record.row, record.sample), [])
        return [
            failed(self._prompt_after(record, NULL, turn, NO_COHORT), "broken_off", why, settings=self._settings)
            for turn in range(record.turn + 1, record.turn + 1 + len(given_up))
        ]

    def answered(self, record: Record) -> None:
        """A turn's record is stored, and the conversation goes on: its next turn can be asked for. So can those that an
        older record of the turn had broken off, once the rest of the set is read."""
        own = (record.row, record.sample)
        if to_say := self._to_say.get(own):
            asked = following(record, to_say.pop(0))
            if not to_say:
                del self._to_say[own]
            self._next_turns.append(self._prompt_after(record, asked, record.turn + 1, LATER))
        elif self._ledger.reopen(record):
            self._reopened[own] = replace(record, prompt_ids=NULL, output_ids=NULL), ""

    def _prompt_after(self, record: Record, asked: Raw, turn: int, cohort: int) -> Prompt:
        own = (record.key, record.sample, record.row, cohort, record.digest)
        return Prompt(*own, asked, record.tools, turn)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> list[Item]:
        return list(islice(self._stream, BATCH))

    def _items(self) -> Iterator[Item]:
        first = np.zeros(len(self._ledger.index), dtype=np.bool_)
        first[self.first_cohort] = True
        rest = self._ledger.rows_pending() & ~first
        for raw in self._rows(first):
            yield from self._row_items(raw, 0)
        for raw in self._rows(rest):
            yield from self._row_items(raw, LATER)

    def _rows(self, wanted: Mask) -> Iterator[RawRow]:
        return prompts.rows(self._path, wanted, self._ledger.index.marks)

    def _gone_on_after_all(self, wanted: set[tuple[int, int]]) -> Iterator[Item]:
        """Conversations that an answer broke off which was made anew since; their rows are read once more."""
        rows = np.zeros(len(self._ledger.index), dtype=np.bool_)
        rows[[row for row, _ in wanted]] = True
        for raw in self._rows(rows):
            yield from self._row_items(raw, LATER, [sample for row, sample in sorted(wanted) if row == raw.row])

    def _row_items(self, raw: RawRow, cohort: int, only: list[int] | None = None) -> Iterator[Item]:
        samples = self._ledger.pending_samples(raw.row) if only is None else only
        if not samples:
            return
        own = prompts.identity(raw.data)
        key = self._ledger.index.key(raw.row, own.key)
        if (
            prompts.key_hash(key) != self._ledger.index.keys[raw.row]
            or int(own.digest, 16) != self._ledger.index.digests[raw.row]
        ):
            raise UsageError(
                f"{raw.place} was changed while it was being read: another row stood there",
                fix="the same command goes on with the new file",
            )
        problem: str = ""
        label: Label = "bad_prompt"
        asked, tools = [NULL], NULL
        try:
            if self._repeats is not None and self._repeats[raw.row]:
                problem, label = f"{raw.place}: the same content as an earlier row", "duplicate"
            elif self._ledger.index.turns is not None:
                asked, tools = prompts.conversation(raw.data)
            else:
                asked[0], tools = prompts.messages(raw.data)
        except BadPromptError as error:
            problem = f"{raw.place}: {error}"
        for sample in samples:
            again = {} if only else self._ledger.again(raw.row, sample)
            for turn, in_cohort in again.items():
                prompt = Prompt(key, sample, raw.row, in_cohort, own.digest, asked[0], tools, turn)
                yield from self._once_more(prompt, problem, label)
            if again:
                continue
            turns = self._ledger.pending_turns(raw.row, sample)
            prompt = Prompt(key, sample, raw.row, cohort, own.digest, asked[0], tools)
            if problem:
                for turn in turns:
                    bad = replace(prompt, turn=turn, cohort=NO_COHORT if turn else cohort)
                    yield failed(bad, label, problem, settings=self._settings)
            elif turns.start == 0:
                self._wait(prompt, asked[1 : turns.stop])
                yield prompt
            else:
                yield from self._gone_on(replace(prompt, turn=turns.start), asked[turns.start : turns.stop])

    def _once_more(self, prompt: Prompt, problem: str, label: Label) -> Iterator[Item]:
        """What a retry asks for: a later turn with the history that it was asked with before."""
        older = self._before.pop((prompt.row, prompt.sample, prompt.turn), None)
        if problem:
            yield failed(prompt, label, problem, settings=self._settings)
        elif older is not None:
            yield replace(prompt, messages=older.messages, tools=older.tools)
        elif prompt.turn == 0:
            yield prompt

    def _wait(self, prompt: Prompt, to_say: list[Raw]) -> None:
        if to_say:
            self._to_say[prompt.row, prompt.sample] = to_say

    def _gone_on(self, prompt: Prompt, to_say: list[Raw]) -> Iterator[Item]:
        """The next turn of a conversation that an earlier life of the run began."""
        record, why = self._begun.pop((prompt.row, prompt.sample), (None, ""))
        if record is None:
            return  # its record was there a moment ago: the turn stays pending, and the run says so at its end
        record = replace(record, row=prompt.row)
        if why:
            self._wait(prompt, to_say)
            yield from self.broken_off(record, why)
        else:
            self._wait(prompt, to_say[1:])
            yield self._prompt_after(record, following(record, to_say[0]), prompt.turn, LATER)

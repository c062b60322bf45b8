"""Token ids for records whose engine gave none, and how often such ids are what an engine would have given.

Asked for by name alone (`export --retokenise`): a tokenizer does not cut a text as a model wrote it, so what is trained
on is then not quite what was generated. The rate at which they differ is measured on the run's own rows that have ids;
where none has, nobody knows it, and only that the ids read back as the text can be told.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec
from msgspec.structs import replace

from tokenmill.core import agree
from tokenmill.core.agree import Agreement
from tokenmill.core.records import FAILURES, NULL, Record
from tokenmill.formats.base import RETOKENISED
from tokenmill.tokens.retokenise import Again, Retokeniser

MEASURED = 2000
"""Rows with ids on which the rate is measured, the first of the run: half a percent is then seen for what it is."""

BATCH = 64
"""Rows tokenised at once, so that every core has some."""


class Filling:
    """Fills ids in, and counts: `filled` rows got some, `refused` cannot be rendered; of `measured` rows that have ids
    `same` come back with all of them the same; of those filled `read_back` spell their own text."""

    def __init__(self, again: Retokeniser) -> None:
        self._again = again
        self._clear()

    def _clear(self) -> None:
        self.filled = self.refused = self.measured = self.same = self.read_back = 0

    def fill(self, records: Iterable[Record]) -> Iterator[Record]:
        """The same records in their order; counts from the beginning."""
        self._clear()
        rest = iter(records)
        while batch := list(islice(rest, BATCH)):
            asked = [record for record in batch if self._is_asked(record)]
            again = dict(zip(map(id, asked), self._again.again(asked), strict=True))
            for record in batch:
                yield self._filled(record, again[id(record)]) if id(record) in again else record

    def _is_asked(self, record: Record) -> bool:
        if not FAILURES.isdisjoint(record.labels):
            return False
        return _lacks_ids(record) or self.measured < MEASURED

    def _filled(self, record: Record, again: Again) -> Record:
        if not _lacks_ids(record):
            self.measured += 1
            self.same += (_raw(again.prompt), _raw(again.output)) == (record.prompt_ids, record.output_ids)
            return record
        if again.problem:
            self.refused += 1
            return record
        self.filled += 1
        spelled = self._again.decode(again.output)
        how = agree.compare(record.text, spelled, self._again.specials, (record.reasoning, record.answer))
        self.read_back += how in (Agreement.EXACT, Agreement.SPECIALS)
        return replace(
            record,
            prompt_ids=_raw(again.prompt),
            output_ids=_raw(again.output),
            labels=(*record.labels, RETOKENISED),
        )

    def words(self) -> list[str]:
        """What whoever trains on it must know; nothing where no row was filled."""
        if not self.filled and not self.refused:
            return []
        found = [f"{self.filled:,} rows got their token ids from their text: the engine gave none."]
        if self.refused:
            found.append(f"{self.refused:,} rows could not be rendered again and have none.")
        if self.measured:
            wrong = self.measured - self.same
            share = f"{wrong:,} ({wrong / self.measured:.1%})"
            found.append(
                f"Mismatch: of {self.measured:,} rows of this run that have ids, {share} come back from their text "
                "with other ones."
            )
        else:
            share = f"{self.read_back:,} of {self.filled:,} ({self.read_back / max(1, self.filled):.1%})"
            found.append(
                f"Mismatch: not known, since no row of this run has ids to compare with; {share} spell their text."
            )
        return found


def _lacks_ids(record: Record) -> bool:
    return NULL in (record.prompt_ids, record.output_ids)


def _raw(ids: list[int]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(ids))

"""What nodes bring of an earlier life of the run, until the feed comes to it.

The feed gives out each id once in a life, with all that it is asked with. A record of an earlier life takes its
prompt's place where it was asked with the same messages (a turn of a conversation: with the history that is stored)
under settings of this run, in a retry: of this very retry. So does a prompt that a node still has in hand. Nothing else
of an earlier life counts.
"""

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from tokenmill import settings
from tokenmill.cluster.base import Node
from tokenmill.core.dispatch import Dispatch, Id, id_of
from tokenmill.core.records import Prompt, Record
from tokenmill.feed import Item
from tokenmill.resume import Accounts


class Earlier:
    """Its length is how much of it the feed has not come to. `dispatch` is told of what a node has in hand."""

    def __init__(self, accounts: Accounts, dispatch: Dispatch, data: Path) -> None:
        self._ledger = accounts.ledger
        self._retry = accounts.retry
        self._own = accounts.row.id
        self._dispatch = dispatch
        self._data = data
        self._records: dict[Id, Record] = {}
        self._held: dict[Id, tuple[Node, Prompt]] = {}

    def __len__(self) -> int:
        return len(self._records.keys() | self._held.keys())

    def __contains__(self, own: Id) -> bool:
        return own in self._records or own in self._held

    def bring(self, node: Node, records: Iterable[Record], held: Iterable[Prompt]) -> list[Record]:
        """A node has these. Returns the records that count at once, since their prompts are out: with another node, or
        waiting for one, as after a node that was believed lost."""
        known = {self._own, *(row.id for row in settings.read(self._data))}
        if self._retry is not None:
            known &= self._retry.made
        out = self._dispatch.out()
        counting: dict[Id, Record] = {}
        for record in records:
            own = id_of(record)
            self._held.pop(own, None)
            if record.settings not in known:
                continue
            if (prompt := out.get(own)) is not None:
                if prompt.messages == record.messages:
                    self._dispatch.settled(own)
                    counting[own] = replace(record, row=prompt.row, cohort=prompt.cohort)
            elif self._is_asked_for(record):
                self._records[own] = record  # the last one made, where there are two
        for prompt in held:
            if id_of(prompt) not in out and self._is_asked_for(prompt):
                self._held[id_of(prompt)] = node, prompt
        return list(counting.values())

    def _is_asked_for(self, what: Prompt | Record) -> bool:
        """By the accounts; rows may have moved since. Whether the history is the same the feed must show."""
        ledger = self._ledger
        row = ledger.index.find(what.key)
        if row is None or int(ledger.index.digests[row]) != int(what.digest, 16):
            return False
        return ledger.asks_for(row, what.sample, what.turn)

    def met(self, items: Iterable[Item]) -> tuple[list[Item], list[Record]]:
        """Of what the feed gives out: what is still to be asked for, and the records that stand in its place."""
        if not self:
            return list(items), []
        fresh: list[Item] = []
        made = []
        for item in items:
            own = id_of(item)
            record, (node, prompt) = self._records.pop(own, None), self._held.pop(own, (None, None))
            if isinstance(item, Record):
                fresh.append(item)
            elif record is not None and record.messages == item.messages:
                made.append(replace(record, row=item.row, cohort=item.cohort))
            elif prompt is not None and prompt.messages == item.messages:
                self._dispatch.offered(node, (item,))
            else:
                fresh.append(item)
        return fresh, made

    def leave(self, node: Node) -> None:
        """It is gone, with what it had in hand."""
        self._held = {own: has for own, has in self._held.items() if has[0] is not node}

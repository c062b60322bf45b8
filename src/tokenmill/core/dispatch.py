"""Which node has which prompts, and how many more it should have now. No I/O, no clock; times come with the records.

Invariants: a prompt is with one node at a time, and its record counts once: what a node gives back unasked is not
counted, nor what answers another question than the one it was asked. What a lost node had goes to the others.

Towards the end of a set a node is given less than it asks for (guided self-scheduling): its waiting room holds at most
half of its fair share of what is left, nothing before its first answer, and it gets nothing that the others would have
finished sooner. So no node waits for another that still has a queue. One node alone gets what it asks for.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from tokenmill.core.records import Again, Prompt, Record

Id = tuple[str, int, int]

SEEN = 200
"""Answers over which a node's seconds per answer are told: enough for heavy tails, few enough to see it slow down."""


def id_of(what: Prompt | Record | Again) -> Id:
    return (what.key, what.sample, what.turn)


@dataclass(slots=True)
class Load:
    """A node by what it can do: `capacity` answers at once, each in `seconds` (0: not known); `outstanding` are
    with it, those that wait there included."""

    capacity: int = 0
    outstanding: int = 0
    seconds: float = 0.0

    @property
    def queued(self) -> int:
        return max(0, self.outstanding - self.capacity)


def allowance(node: Load, others: Iterable[Load], credits: int, left: int) -> int:
    """How many prompts a node should be given now, of `left` that nobody has; at most its credits."""
    rest = [other for other in others if other.capacity]
    if not rest or credits <= 0 or not node.capacity:
        return max(0, credits)
    known = [load.seconds for load in (node, *rest) if load.seconds]
    usual = sum(known) / len(known) if known else 1.0
    seconds = node.seconds or usual
    rate = node.capacity / seconds
    rates = sum(other.capacity / (other.seconds or usual) for other in rest)
    # Before its first answer nobody knows whether it is a slow one, and what waits there may be what all wait for.
    room = int(left * rate / (rate + rates) / 2) if node.seconds else 0
    wanted = min(credits, node.capacity + room - node.outstanding)
    # When the others would be through with all that is left, those that wait with them included.
    others_s = (left + sum(other.queued for other in rest)) / rates + min(other.seconds or usual for other in rest)
    if seconds > usual:
        in_time = int((others_s - seconds) * rate) + node.capacity - node.outstanding
        wanted = min(wanted, in_time) if others_s > seconds else 0
    return max(0, wanted)


@dataclass(slots=True)
class _Share:
    """What one node has: `prompts` by id, `anew` the records that it makes once more, by id and attempt; `told` are all
    those that it ever made so, since it may say so twice."""

    prompts: dict[Id, Prompt] = field(default_factory=dict)
    anew: set[tuple[Id, int]] = field(default_factory=set)
    told: set[tuple[Id, int]] = field(default_factory=set)
    load: Load = field(default_factory=Load)
    seen: int = 0


class Dispatch:
    """Nodes by any name that tells them apart. `waiting` are prompts that were given out and that no node has: those of
    lost nodes, and what was read to find what nodes had brought."""

    def __init__(self) -> None:
        self.waiting: deque[Prompt] = deque()
        self.outstanding = 0
        self._shares: dict[object, _Share] = {}

    def join(self, node: object) -> None:
        self._shares[node] = _Share()

    def allowed(self, node: object, credits: int, capacity: int, left: int) -> int:
        """How many prompts to hand to it now; `left` are those that no node has."""
        share = self._shares[node]
        share.load.capacity = capacity
        if len(self._shares) == 1:
            return credits
        for each in self._shares.values():
            each.load.outstanding = len(each.prompts) + len(each.anew)
        others = [other.load for name, other in self._shares.items() if name != node]
        return allowance(share.load, others, credits, left)

    def offered(self, node: object, prompts: Iterable[Prompt]) -> None:
        """These are with the node now, or on their way to it."""
        mine = self._shares[node].prompts
        for prompt in prompts:
            mine[id_of(prompt)] = prompt
            self.outstanding += 1

    def again(self, node: object, old: Again) -> bool:
        """It makes this record once more: one more will come. Whether that is news."""
        share, one = self._shares[node], (id_of(old), old.attempt)
        if one in share.told:
            return False
        share.told.add(one)
        share.anew.add(one)
        self.outstanding += 1
        return True

    def returned(self, node: object, record: Record) -> Record | None:
        """The record where it counts, None where it does not: it was asked for, and nobody gave it before. Its row and
        its cohort are those of now: a node may have it from an earlier life of the run."""
        share = self._shares[node]
        own = id_of(record)
        prompt = share.prompts.get(own)
        if prompt is not None and prompt.messages == record.messages:
            del share.prompts[own]
            if (prompt.row, prompt.cohort) != (record.row, record.cohort):
                record = replace(record, row=prompt.row, cohort=prompt.cohort)
        elif older := [one for one in share.anew if one[0] == own and one[1] < record.attempt]:
            share.anew.remove(min(older))
        else:
            return None
        self.outstanding -= 1
        share.seen = min(share.seen + 1, SEEN)
        share.load.seconds += (record.seconds - share.load.seconds) / share.seen
        return record

    def out(self) -> dict[Id, Prompt]:
        """The prompts that any node has, or that wait for one."""
        found = {id_of(prompt): prompt for prompt in self.waiting}
        for share in self._shares.values():
            found |= share.prompts
        return found

    def settled(self, own: Id) -> None:
        """The record of a prompt that is out came another way: what any node still has of it does not count."""
        for share in self._shares.values():
            if share.prompts.pop(own, None) is not None:
                self.outstanding -= 1
                return
        self.waiting = deque(prompt for prompt in self.waiting if id_of(prompt) != own)

    def leave(self, node: object) -> int:
        """The node is gone: what it had waits for the others; returns how many prompts. What it made once more has a
        record already."""
        share = self._shares.pop(node)
        self.outstanding -= len(share.prompts) + len(share.anew)
        self.waiting.extend(share.prompts.values())
        return len(share.prompts)

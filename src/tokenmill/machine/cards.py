"""The cards of a node's servers: what each holds and does, what it held before any server of ours, and whose it is now.

What NVML does not tell is unknown, never a guess. NVML may take its time with a card that is ill: call from a thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from tokenmill.errors import PreflightError
from tokenmill.machine import nvml, processes

CardId = int | str
"""As CUDA_VISIBLE_DEVICES has it: the index in PCI order, or a slice's UUID."""

TOLERANCE = 1 << 30
"""Bytes by which a card may hold more than before: a driver's own context and another's desktop come and go."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """Of one card, or of several together: bytes in use; percent of the time in which a kernel ran, None where unknown;
    the processes that hold memory, as far as they can be seen from here, with their bytes, None where unknown; all that
    the card has, 0 where unknown."""

    memory: int
    percent: int | None = None
    holders: Mapping[int, int | None] = field(default_factory=dict)
    total: int = 0

    @property
    def unclaimed(self) -> int:
        """Bytes that no living process is known to hold: the driver's own, and those of processes that are ending."""
        return self.memory - sum(size or 0 for pid, size in self.holders.items() if processes.lives(pid))


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that a card holds beyond what it held before: bytes; who holds it as far as can be seen. `others`: living
    processes hold all of it, so that nothing of a server that is gone can be in it."""

    card: CardId
    size: int
    pids: tuple[int, ...] = ()
    others: bool = False

    def __str__(self) -> str:
        amount = f"GPU {self.card}: {self.size / 2**20:,.0f} MiB"
        return f"{amount} more in use than before, by others" if self.others else f"{amount} did not come back"


Reader = Callable[[CardId], CardUse | None]


@dataclass
class Cards:
    """Which of our servers have which card. `read` is the seam where canned readings come in."""

    read: Reader = field(default_factory=lambda: _Nvml().read)
    _users: dict[CardId, set[int]] = field(default_factory=dict)
    _bases: dict[CardId, int | None] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def take(
        self, cards: Sequence[CardId], server: int, bases: Sequence[int | None] | None = None
    ) -> tuple[int | None, ...]:
        """A server is about to start on these cards, or runs on them: then with the `bases` noted at its start.

        Returns for each what it held before any of our servers used it, None where nobody knows.
        """
        noted = dict(zip(cards, bases or (), strict=False))
        if bases is None:  # not under the lock: a card that is ill may hold a reading for ever
            found = {card: self.read(card) for card in cards if not self._users.get(card)}
            noted = {card: use.memory for card, use in found.items() if use is not None}
        with self._lock:
            for card in cards:
                users = self._users.setdefault(card, set())
                if not users:
                    self._bases[card] = noted.get(card)
                users.add(server)
            return tuple(self._bases[card] for card in cards)

    def leave(self, cards: Sequence[CardId], server: int) -> None:
        """The server's processes are gone."""
        with self._lock:
            for card in cards:
                self._users.get(card, set()).discard(server)

    def is_shared(self, cards: Sequence[CardId]) -> bool:
        return any(len(self._users.get(card, ())) > 1 for card in cards)

    def use(self, cards: Sequence[CardId]) -> CardUse | None:
        """What a server's cards hold and do, together; None where that is not its alone, or not known."""
        if not cards or self.is_shared(cards):
            return None
        found = [self.read(card) for card in cards]
        known = [each for each in found if each is not None]
        if len(known) < len(cards):
            return None
        percents = [each.percent for each in known if each.percent is not None]
        return CardUse(
            sum(each.memory for each in known),
            max(percents, default=None),
            {pid: size for each in known for pid, size in each.holders.items()},
            sum(each.total for each in known),
        )

    def unreturned(self, cards: Sequence[CardId], server: int, bases: Sequence[int | None]) -> tuple[Held, ...]:
        """What its cards hold beyond what they held before a server that is gone, all of whose processes have ended;
        nothing where another of ours has them, or nobody knows."""
        held = []
        for card, base in zip(cards, bases, strict=False):
            if base is None or self._users.get(card, set()) - {server}:
                continue
            found = self.read(card)
            if found is not None and found.memory > base + TOLERANCE:
                others = found.unclaimed <= TOLERANCE
                held.append(Held(card, found.memory - base, tuple(found.holders), others))
        return tuple(held)


class _Nvml:
    """NVML, opened at the first question and left open: opening it takes longer than all questions together."""

    def __init__(self) -> None:
        self._meter: nvml.Meter | None = None
        self._absent = False

    def read(self, card: CardId) -> CardUse | None:
        if self._meter is None and not self._absent:
            try:
                self._meter = nvml.Meter()
            except PreflightError:
                self._absent = True
        found = self._meter.read(card) if self._meter else None
        return CardUse(*found) if found else None

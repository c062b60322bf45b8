"""Who else holds a card on which a server has run out of memory: then no setting is wrong, and it may pass.

A log tells that memory was lacking, and torch's last words whose it was at that moment; where they do not, NVML is
asked. A start that finds its card taken, and a server whose card somebody takes meanwhile, are tried again until the
card is free; what was there before, and has let it get so far, leaves the failure what it was.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tokenmill.core.server import Failure, FailureKind
from tokenmill.engines.base import FRACTION_STEP
from tokenmill.machine import processes
from tokenmill.machine.cards import TOLERANCE, Cards, CardUse

_LATER = frozenset({FailureKind.MEMORY_GRAPHS, FailureKind.MEMORY})
"""Met by a server that had its weights and cache: what was there before it counts as known to it."""

_KINDS = _LATER | {FailureKind.MEMORY_WEIGHTS}
"""Without room for its weights a server has nothing to do with how the card is divided. Without room for a cache it may
have: its fraction is of what it found free."""

_TOTAL = re.compile(r"total capacity of ([\d.]+) ([KMG]iB)")
_HOLDER = re.compile(r"Process (\d+) has ([\d.]+) ([KMG]iB) memory in use")
"""torch.OutOfMemoryError: "GPU 0 has a total capacity of 139.80 GiB of which 4.75 MiB is free. Including non-PyTorch
memory, this process has 3.53 GiB memory in use. Process 23618 has 136.26 GiB memory in use." """

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Others:
    """What processes that are not a server's hold of its card, in bytes, and all that the card has."""

    held: Mapping[int, int]
    total: int

    @property
    def size(self) -> int:
        return sum(self.held.values())


def explain(
    failure: Failure, ours: Collection[int], cards: Cards, used: Sequence[int | str], bases: Sequence[int | None]
) -> Failure:
    """The failure, and `gpu_occupied` where others hold the memory that was lacking. `ours` are the server's pids,
    `used` its cards, `bases` the bytes in use on each before it was started. Reads NVML and /proc."""
    if failure.kind not in _KINDS or cards.is_shared(used):
        return failure  # with servers of ours on one card it is for less_memory to make room
    found = [others for line in failure.lines if (others := in_words(line, ours)) is not None]
    found += [seen(use, ours) for card in used if (use := cards.read(card)) is not None and use.total]
    most = max(found, key=lambda others: others.size, default=None)
    if most is None or most.size <= FRACTION_STEP * most.total:
        return failure  # a lower fraction makes up for so much
    before = sum(base or 0 for base in bases)
    if failure.kind in _LATER and most.size <= before + TOLERANCE:
        return failure
    names = ", ".join(processes.describe(pid) for pid in sorted(most.held, key=most.held.__getitem__, reverse=True))
    have = "has" if len(most.held) == 1 else "have"
    what = failure.cause.partition(":")[0]
    cause = f"{what}: {names} {have} {most.size / 2**30:.1f} of the card's {most.total / 2**30:.1f} GiB"
    fix = "nvidia-smi   shows who holds it; tried again until it is given back, for fleet.give_up at most"
    return dataclasses.replace(failure, kind=FailureKind.OCCUPIED, cause=cause, fix=fix)


def in_words(line: str, ours: Collection[int]) -> Others | None:
    """What torch says of a card that is full; None where the line is another."""
    total = _TOTAL.search(line)
    held = {int(pid): _bytes(size, unit) for pid, size, unit in _HOLDER.findall(line) if int(pid) not in ours}
    return Others(held, _bytes(total[1], total[2])) if total and held else None


def seen(use: CardUse, ours: Collection[int]) -> Others:
    """What NVML says of it now, of processes that live."""
    living = {pid: size for pid, size in use.holders.items() if size and pid not in ours and processes.lives(pid)}
    return Others(living, use.total)


def _bytes(size: str, unit: str) -> int:
    return int(float(size) * _UNITS[unit])

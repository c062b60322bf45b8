"""A run's moments as the columns that charts are drawn from: one array a line, all as long as `t`. Pure.

Labels are told as new records a minute, from one point to the next; where the run stood still a line is broken.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tokenmill.core.status import by_name
from tokenmill.history import Moment, ServerMoment
from tokenmill.web.timeline import GAP_S

Column = list[float | None]


class ServerColumns(msgspec.Struct, frozen=True):
    """One server's lines: tokens a second, share of its slots that work, tokens a step."""

    tokens_per_s: Column
    slots_busy: Column
    accept_length: Column


class Columns(msgspec.Struct, frozen=True):
    """`t` is Unix time; None is no point. `labels` are new records a minute, `rejected` all that were."""

    t: list[float]
    tokens_per_s: Column
    slots_busy: Column
    accept_length: Column
    rejected: Column
    labels: dict[str, Column]
    servers: dict[str, ServerColumns]


def columns(moments: Sequence[Moment]) -> Columns:
    """The lines of all moments, with a point without values in each gap."""
    spaced = _spaced(moments)
    names = sorted({server.name for _, moment in spaced if moment for server in moment.servers}, key=by_name)
    labels = sorted({label for _, moment in spaced if moment for label in moment.labels})
    found = [({server.name: server for server in moment.servers} if moment else {}) for _, moment in spaced]
    return Columns(
        t=[round(t, 1) for t, _ in spaced],
        tokens_per_s=[moment.tokens_per_s if moment else None for _, moment in spaced],
        slots_busy=[moment.slots_busy if moment else None for _, moment in spaced],
        accept_length=[_mean_accept(moment) if moment else None for _, moment in spaced],
        rejected=_per_minute(spaced, [moment.rejected if moment else 0 for _, moment in spaced]),
        labels={
            label: _per_minute(spaced, [moment.labels.get(label, 0) if moment else 0 for _, moment in spaced])
            for label in labels
        },
        servers={name: _of_server([moment.get(name) for moment in found]) for name in names},
    )


Spaced = list[tuple[float, Moment | None]]


def _spaced(moments: Sequence[Moment]) -> Spaced:
    """The moments, and a None inside each gap. Thinned ones lie wider apart: a gap is four times the usual."""
    widths = sorted(b.t - a.t for a, b in pairwise(moments))
    most = max(GAP_S, 4 * widths[(len(widths) - 1) // 2]) if widths else GAP_S
    found: Spaced = []
    for moment in moments:
        if found and moment.t - found[-1][0] > most:
            found.append((found[-1][0] + 0.1, None))
        if not found or moment.t > found[-1][0]:  # a clock that was set back draws nothing twice
            found.append((moment.t, moment))
    return found


def _mean_accept(moment: Moment) -> float | None:
    """Over servers that tell it, by their tokens."""
    told = [(server.accept_length, server.tokens_per_s) for server in moment.servers if server.accept_length]
    weight = sum(rate for _, rate in told)
    if not told:
        return None
    return round(sum(a * rate for a, rate in told) / weight if weight else sum(a for a, _ in told) / len(told), 3)


def _per_minute(spaced: Spaced, counts: Sequence[int]) -> Column:
    """Growth a minute since the point before; what goes down, since it was made anew, shows as nothing."""
    found: Column = [None] * min(1, len(spaced))
    for (before, now), (old, new) in zip(pairwise(spaced), pairwise(counts), strict=True):
        if before[1] is None or now[1] is None:
            found.append(None)
        else:
            found.append(round(max(new - old, 0) * 60 / (now[0] - before[0]), 2))
    return found


def _of_server(moments: Sequence[ServerMoment | None]) -> ServerColumns:
    return ServerColumns(
        tokens_per_s=[server.tokens_per_s if server else None for server in moments],
        slots_busy=[round(s.in_flight / s.capacity, 3) if s and s.capacity else None for s in moments],
        accept_length=[server.accept_length if server else None for server in moments],
    )

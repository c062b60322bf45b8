"""The run over time: tokens a second, shares of bad completions, slots and accept lengths, what each server did when.

Rates come from the records, so that also a run without history.jsonl has them: each completion's tokens are spread over
its seconds. What only the running tokenmill knew, slots and accept lengths of engines that do not tell them with an
answer, comes from history.jsonl; servers' states and starts from events.jsonl.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from msgspec.structs import replace

from tokenmill.core import starts
from tokenmill.core.server import LIVE, WAITING, State
from tokenmill.events import Event
from tokenmill.history import EVERY_S, Moment
from tokenmill.reporting.clock import BINS, Clock
from tokenmill.reporting.columns import FAILED, REJECTED, Columns, Flags, Floats

SHARE_BINS, SHARE_LEAST = 60, 200
"""Of shares at most, and the completions that a bin should hold, or it shows chance."""

FEW = 0.1
"""Of the completions that a bin has in the mean: the share of fewer is chance."""

SPARK_BINS = 48
"""Of the small lines in tables."""

BEGUN = LIVE | {State.STOPPING}
DOWN = WAITING | {State.FAILED}
"""A server that comes from the former to the latter was lost."""

Values = list[float | None]


class Series(msgspec.Struct, frozen=True):
    """Values over time; None where nothing is known. `times` are the middles of the bins, Unix seconds."""

    times: list[float]
    values: Values


class Stay(msgspec.Struct, frozen=True):
    """A server was in a state from `began` to `ended`, Unix seconds."""

    server: str
    state: str
    began: float
    ended: float


class Start(msgspec.Struct, frozen=True):
    """A server's way from its process to READY; `phases` are the engine's own, as far as it told them, in seconds."""

    server: str
    began: float
    seconds: float
    phases: list[tuple[str, float]]


class Loss(msgspec.Struct, frozen=True):
    """A server that could not go on: when, what its event said, and how long it was away, None where it did not come
    back."""

    server: str
    t: float
    text: str
    away_s: float | None


class Course(msgspec.Struct, frozen=True):
    """All that is drawn over time. Per server by name."""

    spans: list[tuple[float, float]]
    tokens_per_s: Series
    server_tokens_per_s: dict[str, Series]
    rejected: Series
    truncated: Series
    failed: Series
    labels: dict[str, Series]
    slots_busy: Series | None
    accept_length: Series | None
    server_accept_length: dict[str, Series]
    stays: list[Stay]
    starts: list[Start]
    losses: list[Loss]


@dataclass
class _Sums:
    """Values of one kind, summed by bins of time."""

    edges: list[Floats]
    sums: Floats = field(init=False)
    counts: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.starts = np.concatenate([edges[:-1] for edges in self.edges])
        self.ends = np.concatenate([edges[1:] for edges in self.edges])
        self.sums = np.zeros(len(self.starts))
        self.counts = np.zeros(len(self.starts))

    def add(self, moment: float, value: float) -> None:
        place = int(np.searchsorted(self.starts, moment, "right")) - 1
        if place >= 0 and moment <= self.ends[place]:
            self.sums[place] += value
            self.counts[place] += 1

    def series(self) -> Series | None:
        """The means; None without any value."""
        if not self.counts.any():
            return None
        with np.errstate(invalid="ignore", divide="ignore"):
            return _series(self.edges, self.sums / self.counts)


def _series(edges: Sequence[Floats], values: Floats) -> Series:
    middles = np.concatenate([(one[:-1] + one[1:]) / 2 for one in edges])
    rounded = [None if np.isnan(value) else round(float(value), 4) for value in values]
    return Series([round(float(middle), 1) for middle in middles], rounded)


def rates(found: Columns, chosen: Flags, edges: Sequence[Floats]) -> Floats:
    """Tokens a second in each bin, with each completion's tokens spread evenly over its seconds: exact sums."""
    origin = edges[0][0]
    began, ended = found.began[chosen] - origin, found.ended[chosen] - origin
    ended = np.maximum(ended, began + 1e-3)
    speed = found.output[chosen] / (ended - began)
    up = _Ramp(began, speed)
    down = _Ramp(ended, speed)
    per_span = []
    for one in edges:
        made = up.until(one - origin) - down.until(one - origin)
        per_span.append(np.diff(made) / np.diff(one))
    return np.concatenate(per_span)


class _Ramp:
    """The sum of speed × (t − begin) over all that has begun by t."""

    def __init__(self, begins: Floats, speeds: Floats) -> None:
        order = np.argsort(begins)
        self._begins = begins[order]
        self._speed = np.concatenate([[0.0], np.cumsum(speeds[order])])
        self._moment = np.concatenate([[0.0], np.cumsum(speeds[order] * begins[order])])

    def until(self, moments: Floats) -> Floats:
        place = np.searchsorted(self._begins, moments, "right")
        result: Floats = self._speed[place] * moments - self._moment[place]
        return result


def shares(found: Columns, chosen: Flags, edges: Sequence[Floats]) -> Series:
    """The share of the chosen among all that ended, by bins; unknown where only the last few of a stretch ended."""
    parts = []
    least = FEW * found.ended.size / max(1, sum(len(one) - 1 for one in edges))
    for one in edges:
        every = np.histogram(found.ended, one)[0]
        some = np.histogram(found.ended[chosen], one)[0]
        with np.errstate(invalid="ignore", divide="ignore"):
            parts.append(np.where(every >= least, some / every, np.nan))
    return _series(edges, np.concatenate(parts))


def course(
    found: Columns,
    clock: Clock,
    names: Sequence[str],
    history: Iterable[Moment],
    happened: Sequence[Event],
    signs: Floats,
) -> Course:
    """`names` are the servers, in order; `signs` as `stays` takes them."""
    fine, coarse, spark = clock.bins(BINS), clock.bins(_share_bins(found)), clock.bins(SPARK_BINS)
    answered = found.answered
    slots, accept, per_server = _told(history, clock)
    if not per_server:
        accept, per_server = _recorded(found, clock)
    return Course(
        spans=list(clock.spans),
        tokens_per_s=_series(fine, rates(found, answered, fine)),
        server_tokens_per_s={
            name: _series(spark, rates(found, answered & (found.server == found.servers.index(name)), spark))
            for name in names
        },
        rejected=shares(found, found.verdict == REJECTED, coarse),
        truncated=shares(found, found.truncated, coarse),
        failed=shares(found, found.verdict == FAILED, coarse),
        labels={
            label: shares(found, found.has(label), spark) for label in sorted({x for s in found.labels for x in s})
        },
        slots_busy=slots,
        accept_length=accept,
        server_accept_length=per_server,
        stays=list(stays(happened, clock.spans[-1][1], signs)),
        starts=list(began(happened)),
        losses=list(losses(happened)),
    )


def _share_bins(found: Columns) -> int:
    return min(SHARE_BINS, max(1, found.verdict.size // SHARE_LEAST))


def _told(history: Iterable[Moment], clock: Clock) -> tuple[Series | None, Series | None, dict[str, Series]]:
    edges = clock.bins(BINS, EVERY_S)
    slots, accept, per_server = _Sums(edges), _Sums(edges), dict[str, _Sums]()
    for moment in history:
        if moment.slots_busy is not None and moment.state == "generating":
            slots.add(moment.t, moment.slots_busy)
        for server in moment.servers:
            if server.accept_length is not None:
                accept.add(moment.t, server.accept_length)
                per_server.setdefault(server.name, _Sums(edges)).add(moment.t, server.accept_length)
    found = {name: series for name, sums in per_server.items() if (series := sums.series())}
    return slots.series(), accept.series(), found


def _recorded(found: Columns, clock: Clock) -> tuple[Series | None, dict[str, Series]]:
    """Accept lengths as they came with the answers."""
    edges = clock.bins(_share_bins(found))
    told = ~np.isnan(found.accept)
    if not told.any():
        return None, {}

    def means(chosen: Flags) -> Series:
        with np.errstate(invalid="ignore", divide="ignore"):
            parts = [
                np.histogram(found.ended[chosen], one, weights=found.accept[chosen])[0]
                / np.histogram(found.ended[chosen], one)[0]
                for one in edges
            ]
        return _series(edges, np.concatenate(parts))

    each = {name: means(told & (found.server == number)) for number, name in enumerate(found.servers) if name}
    return means(told), each


# -- events ------------------------------------------------------------------------------------------------------------
def stays(happened: Sequence[Event], end: float, signs: Floats) -> Iterable[Stay]:
    """What each server was, and for how long; the last state lasts until `end`.

    A server that is pending again after it was anything else is watched by another tokenmill: what the one before knew
    of all servers held until the last of `signs`, the moments, in order, at which servers were watched for sure.
    """
    now: dict[str, tuple[str, float]] = {}
    for event in happened:
        if event.change is None:
            continue
        before, after = event.change
        if before == "pending" != now.get(event.server, (before, 0.0))[0]:
            place = int(np.searchsorted(signs, event.t))
            last = float(signs[place - 1]) if place else event.t
            for server, (state, since) in now.items():
                yield Stay(server, state, since, max(since, last))
            now = {}
        if event.server in now:
            state, since = now[event.server]
            yield Stay(event.server, state, since, event.t)
        now[event.server] = (after, event.t)
    for server, (state, since) in now.items():
        yield Stay(server, state, since, max(end, since))


def began(happened: Sequence[Event]) -> Iterable[Start]:
    """Every start that came to READY: by its changes of state, with the phases that its event told."""
    begun: dict[str, float] = {}
    told: dict[str, list[tuple[str, float]]] = {}
    for event in happened:
        if event.kind == "ready" and (found := starts.told(event.text)):
            told[event.server] = found[1]
        if event.change is None:
            continue
        before, after = event.change
        if after == "starting":
            begun[event.server] = event.t
        elif after == "ready" and before in ("canary", "answering") and event.server in begun:
            since = begun.pop(event.server)
            seconds = round(event.t - since, 1)
            yield Start(event.server, since, seconds, told.pop(event.server, []))


def losses(happened: Sequence[Event]) -> Iterable[Loss]:
    """When a server that had been started could not go on, until it was ready again; it may fail again in between."""
    said: dict[str, Event] = {}
    away: dict[str, Loss] = {}
    for event in happened:
        if event.kind == "server" and event.level == "warn":
            said[event.server] = event
        if event.change is None:
            continue
        before, after = event.change
        if after in DOWN and before in BEGUN and event.server not in away:
            cause = said.pop(event.server, None)
            away[event.server] = Loss(event.server, event.t, cause.text if cause else "", None)
        elif after == "ready" and event.server in away:
            lost = away.pop(event.server)
            yield replace(lost, away_s=round(event.t - lost.t, 1))
    yield from away.values()

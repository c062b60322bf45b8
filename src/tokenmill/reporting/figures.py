"""What a run made, in figures: counts, lengths, masks, labels, servers. Pure, from the columns."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tokenmill.core.environment import Environment, unlike
from tokenmill.core.records import PROMPT_FAULTS
from tokenmill.core.status import by_name
from tokenmill.reporting.columns import ACCEPTED, FAILED, REJECTED, Columns, Ints

CUTS = (2048, 4096, 8192)
"""Where trainers cut rows."""

PER_DOUBLING = 4
"""Bins of a histogram of lengths: each bound is a fifth above the last."""

NARROW, BINS = 4, 20
"""Values of which the greatest is less than so many times the least are shown on an even scale, in so many bins."""

SHORT = 16
"""What is shorter is one bin."""

UNLIKELY = 1e-4
"""How seldom chance alone may mark a server's share of a label."""

TWICE = 2.0
"""A server's share is marked from this many times the others' on."""


class Spread(msgspec.Struct, frozen=True):
    """Values in tokens; `counts` lie between the neighbours of `bounds`."""

    count: int
    total: int
    p1: int
    p10: int
    p50: int
    p90: int
    p99: int
    most: int
    bounds: list[int]
    counts: list[int]


class Clip(msgspec.Struct, frozen=True):
    """What a trainer that cuts rows at `length` tokens loses: supervised tokens behind it, as a share of all, rows that
    are longer, and rows of which nothing supervised is left."""

    length: int
    tokens: int
    share: float
    rows: int
    emptied: int


class Masks(msgspec.Struct, frozen=True):
    """What a loss mask covers in the accepted records: their output."""

    supervised: Spread | None
    rows: Spread | None
    clips: list[Clip]


class Outlier(msgspec.Struct, frozen=True):
    """A server's share of a label that is beyond chance and twice the others' or more."""

    server: str
    label: str
    count: int
    share: float
    others: float


class LabelCount(msgspec.Struct, frozen=True):
    """`servers` are counts in the order of the report's servers; `share` is of all that ended."""

    label: str
    count: int
    share: float
    rejects: bool
    servers: list[int]


class ServerFigures(msgspec.Struct, frozen=True):
    """`request_tokens_per_s` is the mean of single requests; `tokens_per_s` of all the time that the run was on."""

    name: str
    completions: int
    tokens: int
    rejected: int
    truncated: int
    failed: int
    tokens_per_s: float
    request_tokens_per_s: float | None
    accept_length: float | None


class NodeFigures(msgspec.Struct, frozen=True):
    """A node's servers together. `environment` is the newest that is known of it; `unlike` says in what that differs
    from most nodes', empty where in nothing."""

    name: str
    servers: int
    completions: int
    tokens: int
    rejected: int
    truncated: int
    failed: int
    tokens_per_s: float
    environment: Environment | None
    unlike: str = ""


class Counts(NamedTuple):
    accepted: int
    rejected: int
    failed: int
    prompt_faults: int


def counts(found: Columns) -> Counts:
    """Records by verdict; `prompt_faults` are those of the failed that say something of the prompts only."""
    per = np.bincount(found.verdict, minlength=3).tolist()
    faults = [n for n, labels in enumerate(found.labels) if PROMPT_FAULTS.intersection(labels)]
    return Counts(per[ACCEPTED], per[REJECTED], per[FAILED], int(np.isin(found.label_set, faults).sum()))


def spread(values: Ints) -> Spread | None:
    """None without values."""
    if not values.size:
        return None
    p1, p10, p50, p90, p99 = np.percentile(values, [1, 10, 50, 90, 99]).astype(np.int64).tolist()
    least, most = int(values.min()), int(values.max())
    bounds = _even(least, most) if most < NARROW * max(1, least) else _growing(most)
    binned = np.histogram(values, bounds)[0].tolist()
    return Spread(int(values.size), int(values.sum(dtype=np.int64)), p1, p10, p50, p90, p99, most, bounds, binned)


def _even(least: int, most: int) -> list[int]:
    """Bounds of equal distance, 1, 2 or 5 times a power of ten."""
    wanted = max(1.0, (most - least + 1) / BINS)
    power = 10 ** int(np.log10(wanted))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= wanted)
    return list(range(least // step * step, most + step + 1, step))


def _growing(most: int) -> list[int]:
    """0, 1, 16, then each about a fifth above the last, until above `most`: an empty thought is no short one."""
    bounds = [0, 1, SHORT]
    step = 0
    while bounds[-1] <= most:
        step += 1
        bounds.append(round(SHORT * 2 ** (step / PER_DOUBLING)))
    return bounds


def masks(found: Columns) -> Masks:
    """Over the accepted records."""
    accepted = found.verdict == ACCEPTED
    prompt = found.prompt[accepted].astype(np.int64)
    output = found.output[accepted].astype(np.int64)
    rows = prompt + output
    supervised = int(output.sum())
    clips = []
    for length in CUTS:
        behind = np.clip(rows - length, 0, output)
        emptied = int(((prompt >= length) & (output > 0)).sum())
        share = int(behind.sum()) / max(1, supervised)
        clips.append(Clip(length, int(behind.sum()), round(share, 6), int((rows > length).sum()), emptied))
    return Masks(spread(found.output[accepted]), spread(rows.astype(np.uint32)), clips)


def finish_reasons(found: Columns) -> dict[str, int]:
    """Of the completions, the most frequent first."""
    per = np.bincount(found.finish[found.answered], minlength=len(found.finishes)).tolist()
    return {found.finishes[n]: per[n] for n in sorted(range(len(per)), key=lambda n: -per[n]) if per[n]}


def server_order(found: Columns) -> list[int]:
    """The servers' numbers in the order of their names, node by node; without failures that no server had part in."""
    named = (number for number, name in enumerate(found.servers) if name)
    return sorted(named, key=lambda number: by_name(found.servers[number]))


def servers(found: Columns, on_s: float) -> list[ServerFigures]:
    """One for each server that a record came from."""
    truncated = found.truncated
    rows = []
    for number in server_order(found):
        own = found.server == number
        answered = own & found.answered
        tokens = int(found.output[answered].sum(dtype=np.int64))
        seconds = float((found.ended[answered] - found.began[answered]).sum())
        told = answered & ~np.isnan(found.accept)
        weights = found.output[told]
        accept = float(np.average(found.accept[told], weights=weights)) if weights.sum() else None
        rows.append(
            ServerFigures(
                name=found.servers[number],
                completions=int(answered.sum()),
                tokens=tokens,
                rejected=int((found.verdict[own] == REJECTED).sum()),
                truncated=int(truncated[own].sum()),
                failed=int((found.verdict[own] == FAILED).sum()),
                tokens_per_s=round(tokens / max(on_s, 1.0), 1),
                request_tokens_per_s=round(tokens / seconds, 1) if seconds > 0 else None,
                accept_length=None if accept is None else round(accept, 3),
            )
        )
    return rows


def nodes(fleet: Sequence[ServerFigures], environments: Sequence[Environment]) -> list[NodeFigures]:
    """One for each node of several that a record came from or that is known; none for a run on one machine."""
    known = {row.node: row for row in environments if row.node}
    per: dict[str, list[ServerFigures]] = {name: [] for name in known}
    for server in fleet:
        if node := by_name(server.name)[0]:
            per.setdefault(node, []).append(server)
    usual = _usual(list(known.values()))
    return [
        NodeFigures(
            name=name,
            servers=len(own),
            completions=sum(server.completions for server in own),
            tokens=sum(server.tokens for server in own),
            rejected=sum(server.rejected for server in own),
            truncated=sum(server.truncated for server in own),
            failed=sum(server.failed for server in own),
            tokens_per_s=round(sum(server.tokens_per_s for server in own), 1),
            environment=known.get(name),
            unlike=unlike(known[name], usual) if usual and name in known else "",
        )
        for name, own in sorted(per.items())
    ]


def _usual(rows: Sequence[Environment]) -> Environment | None:
    """What most are like."""
    kinds = Counter(tuple(row.parts.items()) for row in rows)
    most = max(kinds.values(), default=0)
    return next((row for row in rows if kinds[tuple(row.parts.items())] == most), None)


def labels(found: Columns, rejecting: frozenset[str]) -> list[LabelCount]:
    """The most frequent first."""
    names = {label for labels in found.labels for label in labels}
    order = server_order(found)
    rows = []
    for name in names:
        has = found.has(name)
        count = int(has.sum())
        per = np.bincount(found.server[has], minlength=len(found.servers)).tolist()
        share = count / max(1, found.verdict.size)
        rows.append(LabelCount(name, count, round(share, 6), name in rejecting, [per[n] for n in order]))
    return sorted(rows, key=lambda row: (-row.count, row.label))


def outliers(rows: Sequence[LabelCount], fleet: Sequence[ServerFigures]) -> list[Outlier]:
    """Servers that have far more of a label than the others together, the most striking first."""
    totals = [server.completions + server.failed for server in fleet]
    found = []
    for row in rows:
        for count, total, server in zip(row.servers, totals, fleet, strict=True):
            rest = sum(totals) - total
            others = (sum(row.servers) - count) / rest if rest else 1.0
            if total and count / total >= TWICE * others and _tail(count, total, others) < UNLIKELY:
                found.append(Outlier(server.name, row.label, count, round(count / total, 6), round(others, 6)))
    return sorted(found, key=lambda outlier: -(outlier.share - outlier.others))


def _tail(count: int, total: int, share: float) -> float:
    """A bound (Chernoff's) on the chance of so many or more among `total`, each with this chance."""
    seen, share = count / total, max(share, 1 / total)  # none among the others does not make a single one impossible
    if seen <= share:
        return 1.0
    rest = (1 - seen) * np.log((1 - seen) / (1 - share)) if seen < 1 else 0.0
    return float(np.exp(-total * (seen * np.log(seen / share) + rest)))

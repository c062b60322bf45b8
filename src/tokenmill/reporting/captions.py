"""What the charts show, in words: a caption states the finding, so that nobody must read it off. Pure."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tokenmill.core.efficiency import Efficiency, of_peak
from tokenmill.plain import duration
from tokenmill.reporting.charts import ROWS, share
from tokenmill.reporting.course import Course, Loss, Series, Start
from tokenmill.reporting.figures import Clip, Masks, NodeFigures, Outlier, ServerFigures, Spread

DIP = 0.9
"""Of the median: a stretch below it is told of."""

FEW_BINS = 20
"""Too short a run for words about its pace."""

NAMED = 4
"""Servers that a sentence names one by one."""


@dataclass(frozen=True, slots=True)
class Dip:
    """A stretch in which the fleet made less than usual: `lost` is the share of the median that was missing."""

    began: float
    ended: float
    lost: float


def pace(course: Course) -> tuple[float, Dip | None]:
    """The median of all tokens a second while the run was on, and the stretch that cost the most tokens."""
    series = course.tokens_per_s
    spans = [
        [(t, value) for t, value in zip(series.times, series.values, strict=True) if value is not None and a <= t <= b]
        for a, b in course.spans
    ]
    made = [value for span in spans for _, value in span if value > 0]
    if not made:
        return 0.0, None
    median = float(np.median(made))
    stretches: list[list[tuple[float, float]]] = [[]]
    for span in spans:
        for t, value in _between(span, DIP * median) if len(span) >= FEW_BINS else []:
            if value < DIP * median:
                stretches[-1].append((t, value))
            elif stretches[-1]:
                stretches.append([])
        stretches.append([])
    worst = max(stretches, key=lambda found: sum(median - value for _, value in found))
    if not worst:
        return median, None
    half = (series.times[1] - series.times[0]) / 2
    lost = 1 - float(np.mean([value for _, value in worst])) / median
    return median, Dip(worst[0][0] - half, worst[-1][0] + half, lost)


def _between(span: list[tuple[float, float]], usual: float) -> list[tuple[float, float]]:
    """Without the beginning and the end, where the servers come and the last long answers are waited for."""
    high = [place for place, (_, value) in enumerate(span) if value >= usual]
    return span[high[0] : high[-1]] if high else []


def when(moment: float, course: Course) -> str:
    """A moment of the run: the day only where it lasted for more than one."""
    days = {time.strftime("%F", time.localtime(t)) for span in course.spans for t in span}
    return time.strftime("%b %-d, %H:%M" if len(days) > 1 else "%H:%M:%S", time.localtime(moment))


def throughput(course: Course, *, unfinished: bool) -> str:
    """The pace, its deepest dip, and what was away at that time."""
    median, dip = pace(course)
    if not median:
        return "No completion has ended yet: there is no pace to tell."
    words = f"The median is {median:,.0f} tokens/s."
    if dip:
        deep = f"{dip.lost:.0%} below that" if dip.lost < 0.99 else "at nothing"
        words += f" It stood {deep} for {duration(dip.ended - dip.began)} from {when(dip.began, course)}"
        words += f", {_meanwhile(course, dip)}."
    if course.losses:
        words += f" Red lines mark the {_times(len(course.losses), 'loss', 'losses')} of a server."
    if unfinished:
        words += " Completions that have not ended are not in it, so it falls off at its end."
    return words


def efficiency(found: Efficiency | None) -> str:
    """The share of the servers' own peak, and what is missing of it."""
    if found is None or found.share is None:
        return ""
    share, *parts = of_peak(msgspec.structs.replace(found, now=None))
    words = f"Since its last start the run made {share}, which is {found.peak_tokens_per_s:,.0f} tokens/s "
    words += f"(± {found.error:.1%}, seen on {found.measured} of {found.servers} servers)."
    return f"{words} {', '.join(parts).capitalize()}." if parts else words


def _meanwhile(course: Course, dip: Dip) -> str:
    ready = [stay for stay in course.stays if stay.state == "ready"]
    middle = (dip.began + dip.ended) / 2
    if ready and not any(stay.began <= middle <= stay.ended for stay in ready):
        return "while no server was ready"
    away = {
        loss.server
        for loss in course.losses
        if loss.t <= dip.ended and (loss.away_s is None or loss.t + loss.away_s >= dip.began)
    }
    return f"while {_servers(sorted(away))} {_was(away)} away" if away else "with every server there"


def _was(some: set[str]) -> str:
    return "was" if len(some) == 1 else "were"


def _servers(names: Sequence[str]) -> str:
    if len(names) > NAMED:
        return f"{len(names)} servers"
    return ("server " if len(names) == 1 else "servers ") + ", ".join(names)


def _times(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def lost(found: Sequence[Loss], servers: int) -> str:
    """Which servers were lost, how often, for how long."""
    if not found:
        return "No server was lost." if servers else "Nothing is known of any server."
    per = Counter(loss.server for loss in found)
    parts = [f"server {name} ({_often(count)})" for name, count in per.most_common(NAMED)]
    rest = len(per) - NAMED
    if rest > 0:
        parts.append(f"{rest} more at least once")
    away = [loss.away_s for loss in found if loss.away_s is not None]
    gone = sorted({loss.server for loss in found if loss.away_s is None})
    words = f"Lost: {', '.join(parts)}."
    if away:
        words += f" They were back after {duration(float(np.median(away)))}"
        words += f", at most {duration(max(away))}." if max(away) > 1.5 * float(np.median(away)) else "."
    if gone:
        words += f" {_servers(gone).capitalize()} did not come back."
    return words


def _often(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def starts(found: Sequence[Start]) -> str:
    """How long the last start of each server took, and what took the most of it."""
    last = list({start.server: start for start in found}.values())
    if not last:
        return "No server has come to READY in what events.jsonl holds."
    slow = max(last, key=lambda start: start.seconds)
    quick = min(last, key=lambda start: start.seconds)
    phases: Counter[str] = Counter()
    for start in last:
        for name, seconds in start.phases:
            phases[name] += seconds  # type: ignore[assignment]
    words = f"A server was ready after {duration(quick.seconds)}"
    if duration(quick.seconds) != duration(slow.seconds):
        words += f" to {duration(slow.seconds)} (server {slow.server})"
    if phases:
        name, seconds = phases.most_common(1)[0]
        words += f"; {name} took the most of it, {duration(seconds / len(last))} in the mean"
    if len(last) > ROWS:
        words += f". The {ROWS} slowest of {len(last)} are shown"
    return f"{words}."


def bad(course: Course, limits: dict[str, float]) -> str:
    """The shares of bad completions: do they drift, do they pass what the gate allows?"""
    parts = []
    for name, series in (("rejected", course.rejected), ("cut off", course.truncated), ("failed", course.failed)):
        known = [value for value in series.values if value is not None]
        if not any(known):
            continue
        third = max(1, len(known) // 3)
        early, late = float(np.mean(known[:third])), float(np.mean(known[-third:]))
        drift = "steady" if abs(late - early) <= max(0.01, 0.25 * max(early, late)) else "moved"
        if drift == "steady" or len(known) < FEW_BINS:
            parts.append(f"{name} {share(round(float(np.mean(known)), 4))}")
        else:
            change = f"{share(round(early, 4))} in the first third to {share(round(late, 4))} in the last"
            parts.append(f"{name} from {change}")
    if not parts:
        return "No completion was rejected, cut off or failed."
    allowed = ", ".join(f"{name} {share(value)}" for name, value in limits.items())
    return f"Of what ended: {'; '.join(parts)}." + (f" The gate allows a cohort: {allowed}." if allowed else "")


def slots(series: Series | None) -> str:
    """How full the servers were."""
    known = [value for value in series.values if value is not None] if series else []
    if not known:
        return ""
    least = min(known[len(known) // 10 : -max(1, len(known) // 10)] or known)
    return (
        f"Slots were {share(round(float(np.median(known)), 3))} busy in the median; "
        f"{share(round(least, 3))} at the least, but for the run's beginning and end."
    )


def accept(course: Course, fleet: Sequence[ServerFigures]) -> str:
    """Tokens accepted a step: all, and the server that differs the most."""
    if course.accept_length is None:
        return ""
    mean = float(np.mean([value for value in course.accept_length.values if value is not None]))
    means = {
        name: float(np.mean([value for value in series.values if value is not None]))
        for name, series in course.server_accept_length.items()
    }
    words = f"A step of the engine accepted {mean:.2f} tokens in the mean"
    if len(means) > 1:
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        words += f"; server {low} the fewest, {means[low]:.2f}, server {high} the most, {means[high]:.2f}"
    if mean < 1.05:
        words += ": speculation does not help"
    return f"{words}."


def length(found: Spread | None, what: str) -> str:
    """A distribution's middle and ends."""
    if found is None:
        return f"There is no {what}."
    return (
        f"Half of the {what}s have up to {found.p50:,} tokens; one in ten more than {found.p90:,}, "
        f"one in a hundred more than {found.p99:,}."
    )


def masked(found: Masks) -> str:
    """What a trainer would lose."""
    if found.supervised is None:
        return "No record is accepted: there is nothing to train on."
    words = f"{found.supervised.total:,} tokens are supervised, {found.supervised.p50:,} in the median record."
    return f"{words} {clipped(found.clips)}"


def clipped(clips: Sequence[Clip]) -> str:
    """The first cut that costs anything worth a word, and the last."""
    parts = [f"{share(round(clip.share, 3))} at {clip.length:,}" for clip in clips if clip.share >= 0.001]
    if not parts:
        return f"A trainer that cuts rows at {clips[-1].length:,} tokens, or even {clips[0].length:,}, loses none."
    return f"A trainer that cuts rows loses {', '.join(parts)}."


def outlying(found: Sequence[Outlier]) -> Iterator[str]:
    """A sentence for each server that has far more of a label than the others."""
    for outlier in found[:NAMED]:
        yield (
            f"Server {outlier.server} has {outlier.label} in {share(round(outlier.share, 4))} of its completions, the "
            f"others in {share(round(outlier.others, 4))}: more than chance."
        )


def unlike(found: Sequence[NodeFigures]) -> Iterator[str]:
    """A sentence for each node that is made of something else than most: its answers and its pace may differ."""
    odd = [node for node in found if node.unlike]
    for node in odd[:NAMED]:
        yield f"Node {node.name} is unlike the others: {node.unlike}."
    if len(odd) > NAMED:
        yield f"{len(odd) - NAMED} more nodes are unlike the others: see Nodes."

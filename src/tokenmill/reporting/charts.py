"""Charts as places in percent, which the page's template draws as SVG: they stretch with the page, their words do not.

No library: those that draw on the server bake in colours and sizes (and bring 30 MB), and these must follow the page
from a phone to paper, light or dark, without a script.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tokenmill.plain import duration
from tokenmill.reporting.clock import Clock, Tick
from tokenmill.reporting.course import Series, Start, Stay
from tokenmill.reporting.figures import Spread

WIDTH, HEIGHT = 1000, 100
"""Units of a path: a tenth of a percent, and a percent."""

ROWS = 24
"""Servers in a chart of rows: of more those that say the most, and the caption says so."""

NARROW = 0.15
"""Percent: a stay that is shorter would not be seen, and a restart must be."""


@dataclass(frozen=True, slots=True)
class Path:
    """`d` as SVG has it, in WIDTH × HEIGHT; `kind` is its class."""

    d: str
    kind: str


@dataclass(frozen=True, slots=True)
class Bar:
    """In percent of the plot; `y` from its top. `words` are shown when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the plot at `place`, 0 to 1 from the left (or from the top, for a level)."""

    place: float
    text: str = ""
    kind: str = "mark"


@dataclass(frozen=True, slots=True)
class Plot:
    """What the template draws. `x_ticks` from the left, `y_ticks` from the top; `keys` explain colours; `rows` says
    that the y ticks are names. `height` in pixels."""

    y_title: str
    x_title: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    paths: list[Path] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    levels: list[Mark] = field(default_factory=list)
    keys: list[tuple[str, str]] = field(default_factory=list)
    rows: bool = False
    height: int = 150


def scale(most: float, count: int = 3) -> tuple[float, list[float]]:
    """The top of an axis from 0, and its ticks: 1, 2, 2.5 or 5 times a power of ten apart."""
    if not most > 0:
        return 1.0, [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / count))
    step *= next(n for n in (1, 2, 2.5, 5, 10) if most / (n * step) <= count)
    ticks = [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]
    return ticks[-1], ticks


def number(value: float) -> str:
    """As short as it can be read: 0.25, 7, 2,500, 12k, 3.5M."""
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:,.1f}".removesuffix(".0") + letter
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def share(value: float) -> str:
    """A share as percent."""
    return f"{100 * value:.2f}".rstrip("0").rstrip(".") + "%"


def line(clock: Clock, series: Series, top: float, kind: str, *, area: bool = False) -> Path:
    """Broken where nothing is known and where time is cut."""
    pieces = []
    for piece in _pieces(clock, series):
        points = [f"{WIDTH * x:.1f} {HEIGHT * (1 - min(1.0, y / top)):.2f}" for x, y in piece]
        d = "M" + "L".join(points if len(points) > 1 else points * 2)
        if area:
            d += f"V{HEIGHT}H{WIDTH * piece[0][0]:.1f}Z"
        pieces.append(d)
    return Path("".join(pieces), kind)


def _pieces(clock: Clock, series: Series) -> Iterator[list[tuple[float, float]]]:
    places = clock.places(np.array(series.times)).tolist()
    ends = iter([end for _, end in clock.spans])
    end = next(ends, math.inf)
    piece: list[tuple[float, float]] = []
    for moment, place, value in zip(series.times, places, series.values, strict=True):
        while moment > end:
            end = next(ends, math.inf)
            if piece:
                yield piece
            piece = []
        if value is None:
            if piece:
                yield piece
            piece = []
        else:
            piece.append((place, value))
    if piece:
        yield piece


def most(series: Iterable[Series]) -> float:
    """The greatest value of all."""
    return max((value for one in series for value in one.values if value is not None), default=0.0)


def over_time(
    clock: Clock,
    y_title: str,
    lines: Sequence[tuple[Series, str]],
    *,
    percent: bool = False,
    area: bool = False,
    keys: Sequence[tuple[str, str]] = (),
    marks: Sequence[Mark] = (),
    levels: Sequence[tuple[float, str]] = (),
    least_top: float = 0.0,
) -> Plot:
    """A chart of values over the run; the first line may have its area filled. A level is drawn where it fits."""
    top, ticks = scale(max(most(series for series, _ in lines), least_top))
    paths = [line(clock, lines[0][0], top, "area", area=True)] if area and lines else []
    words = share if percent else number
    return Plot(
        y_title=y_title,
        x_title="",
        x_ticks=clock.ticks(),
        y_ticks=[Tick(1 - value / top, words(value)) for value in ticks],
        paths=paths + [line(clock, series, top, kind) for series, kind in lines],
        marks=[*(Mark(place, "", "cut") for place, _ in clock.cuts), *marks],
        levels=[Mark(1 - value / top, text, "level") for value, text in levels if value <= top],
        keys=list(keys),
    )


def histogram(found: Spread, cuts: Sequence[int] = ()) -> Plot:
    """Bins of equal width, though their bounds grow; `cuts` are marked where they lie."""
    first = next((n for n, count in enumerate(found.counts) if count), 0)
    bounds, shown = found.bounds[first:], found.counts[first:]
    top, ticks = scale(max(shown))
    width = 100 / len(shown)
    bars = []
    for place, count in enumerate(shown):
        if count:
            high = 100 * count / top
            words = f"{_bin(bounds, place)}: {count:,}"
            bars.append(Bar(width * place, 100 - high, width * 0.92, high, "fill", words))
    return Plot(
        y_title="completions",
        x_title="tokens",
        x_ticks=list(_length_ticks(bounds)),
        y_ticks=[Tick(1 - value / top, number(value)) for value in ticks],
        bars=bars,
        marks=[Mark(_within(bounds, cut), f"{cut:,}", "length") for cut in cuts if bounds[0] < cut < bounds[-1]],
    )


def _bin(bounds: Sequence[int], place: int) -> str:
    low, high = bounds[place], bounds[place + 1] - 1
    return f"{low:,} tokens" if low == high else f"{low:,} to {high:,} tokens"


def _within(bounds: Sequence[int], value: float) -> float:
    return float(np.interp(value, bounds, np.arange(len(bounds)))) / (len(bounds) - 1)


def _length_ticks(bounds: Sequence[int]) -> Iterator[Tick]:
    """0 and powers of two, or round numbers of an even scale, as far as they leave each other room."""
    last = -1.0
    even = len({high - low for low, high in pairwise(bounds)}) == 1
    for place, bound in enumerate(bounds if even else bounds[:-1]):
        at = place / (len(bounds) - 1)
        if (even or bound == 0 or (bound >= 16 and bound & (bound - 1) == 0)) and at - last > 0.11:
            last = at
            yield Tick(at, f"{bound:,}" if even or bound < 10_000 else f"{bound // 1024}k")


def lives(clock: Clock, names: Sequence[str], found: Sequence[Stay]) -> Plot:
    """A row for each server: what it was when. Restarts are made wide enough to be seen."""
    rows = {name: n for n, name in enumerate(names)}
    height = 100 / max(1, len(names))
    bars = []
    for stay in sorted(found, key=lambda stay: KINDS_ORDER.index(KINDS.get(stay.state, ""))):
        kind = KINDS.get(stay.state)
        if kind is None or stay.server not in rows:
            continue
        start, end = (100 * clock.place(moment) for moment in (stay.began, stay.ended))
        width = max(end - start, NARROW if kind == "down" else 0.0)
        words = f"server {stay.server}: {stay.state} for {duration(stay.ended - stay.began)}"
        bars.append(Bar(start, height * (rows[stay.server] + 0.2), width, 0.6 * height, kind, words))
    return Plot(
        y_title="server",
        x_title="",
        x_ticks=clock.ticks(),
        y_ticks=[Tick((n + 0.5) / len(names), name) for n, name in enumerate(names)],
        bars=bars,
        marks=[Mark(place, "", "cut") for place, _ in clock.cuts],
        keys=[
            ("up", "ready"),
            ("begins", "starting"),
            ("doubt", "in doubt"),
            ("down", "lost, waits or failed"),
            ("other", "ends"),
        ],
        rows=True,
        height=row_height(len(names)),
    )


KINDS = {
    **dict.fromkeys(("starting", "answering", "canary"), "begins"),
    "suspect": "doubt",
    "stopping": "other",
    **dict.fromkeys(("backoff", "failed", "quarantined"), "down"),
    "ready": "up",
}
"""States → how they are drawn; pending and stopped are not."""

KINDS_ORDER = ("", "up", "other", "begins", "doubt", "down")
"""A later one is drawn over an earlier one: a loss must be seen."""


def row_height(rows: int) -> int:
    """Pixels of a chart of rows."""
    return max(60, 24 * rows)


def start_bars(found: Sequence[Start]) -> Plot:
    """The last start of each server, its phases one after another."""
    last = {start.server: start for start in found}
    shown = sorted(last.values(), key=lambda start: -start.seconds)[:ROWS]
    names = list(dict.fromkeys(name for start in shown for name, _ in start.phases))
    kinds = {name: f"phase{n % PHASE_KINDS}" for n, name in enumerate(names)}
    top, ticks = scale(max((start.seconds for start in shown), default=1.0))
    height = 100 / max(1, len(shown))
    bars = []
    for row, start in enumerate(shown):
        at = 0.0
        rest = start.seconds - sum(seconds for _, seconds in start.phases)
        for name, seconds in [*start.phases, ("other", max(0.0, rest))]:
            words = f"server {start.server}: {name} {duration(seconds)}"
            bars.append(
                Bar(at, height * (row + 0.2), 100 * seconds / top, 0.6 * height, kinds.get(name, "other"), words)
            )
            at += 100 * seconds / top
    return Plot(
        y_title="server",
        x_title="seconds until ready",
        x_ticks=[Tick(value / top, number(value)) for value in ticks],
        y_ticks=[Tick((n + 0.5) / max(1, len(shown)), start.server) for n, start in enumerate(shown)],
        bars=bars,
        keys=[(kinds[name], name) for name in names] + [("other", "other")],
        rows=True,
        height=row_height(len(shown)),
    )


PHASE_KINDS = 6
"""Colours of phases; engines tell five or six."""

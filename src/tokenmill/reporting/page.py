"""report.html from the figures: its charts with their captions, and the template."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from msgspec.structs import replace

from tokenmill.core.records import FAILURES
from tokenmill.core.status import by_name
from tokenmill.plain import duration
from tokenmill.reporting import captions, charts
from tokenmill.reporting.answer import Report
from tokenmill.reporting.charts import Mark, Path, Plot
from tokenmill.reporting.clock import Clock
from tokenmill.reporting.figures import CUTS
from tokenmill.untrusted import pieces

MATRIX = 12
"""Servers in the table of labels by server: more columns do not fit on paper."""

MOST_MARKS = 60
"""Losses that are marked in a chart: more would hide it, and the chart of servers shows all."""

LONG = 12_000
"""Characters of a config or of words in trouble that are shown; the whole is in the run folder."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with what it shows in words."""

    plot: Plot | None
    title: str
    caption: str


def render(report: Report, clock: Clock) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("tokenmill", "data"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(pieces=pieces, moment=_moment, day=_day, duration=duration, share=charts.share)
    template = environment.get_template("report.html.j2")
    return template.render(
        report=report,
        course=_course(report, clock),
        made=_made(report),
        label_lines=_label_lines(report, clock),
        server_lines=_server_lines(report, clock),
        lost=Counter(loss.server for loss in report.course.losses),
        matrix=report.labels[:MATRIX] if 1 < len(report.servers) <= MATRIX else [],
        odd={(outlier.server, outlier.label) for outlier in report.outliers},
        node_lost=Counter(by_name(loss.server)[0] for loss in report.course.losses),
        environments=_alike(report),
        settings=[(row, _rows(row)) for row in report.settings],
        failures=FAILURES,
        long=LONG,
    )


def _alike(report: Report) -> list[list[Any]]:
    """The environments; those of nodes that say the same together."""
    groups: dict[Any, list[Any]] = {}
    for row in report.environment:
        groups.setdefault(replace(row, t=0.0, node="") if row.node else row, []).append(row)
    return list(groups.values())


def _moment(t: float) -> str:
    return time.strftime("%b %-d, %H:%M:%S", time.localtime(t))


def _day(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(t))


def _course(report: Report, clock: Clock) -> list[Figure]:
    went, names = report.course, [server.name for server in report.servers]
    unfinished = report.state != "done"
    figures = []
    pace = f"{captions.throughput(went, unfinished=unfinished)} {captions.efficiency(report.efficiency)}".rstrip()
    lost = [Mark(clock.place(loss.t), "", "loss") for loss in went.losses[:MOST_MARKS]]
    has_pace = bool(report.output_tokens)
    plot = charts.over_time(clock, "tokens/s", [(went.tokens_per_s, "line")], area=True, marks=lost)
    figures.append(Figure(plot if has_pace else None, "Throughput", pace))
    known = sorted({*names, *(stay.server for stay in went.stays)}, key=by_name)
    words = captions.lost(went.losses, len(known) if went.stays else 0)
    if len(known) > charts.ROWS:
        often = Counter(loss.server for loss in went.losses)
        worst = sorted(known, key=lambda name: -often[name])[: charts.ROWS]
        words += f" Shown are {charts.ROWS} of {len(known)} servers, those that were lost the most often."
        known = [name for name in known if name in worst]
    lives = charts.lives(clock, known, went.stays) if went.stays else None
    figures.append(Figure(lives, "What each server did", words))
    every = (("bad", "rejected", went.rejected), ("odd", "cut off", went.truncated), ("dark", "failed", went.failed))
    some = [(kind, words, series) for kind, words, series in every if any(series.values) and len(series.values) > 2]
    keys = [(kind, words) for kind, words, _ in some]
    shares = [(series, f"line {kind}") for kind, _, series in some]
    plot = charts.over_time(clock, "share of completions", shares, percent=True, keys=keys)
    figures.append(Figure(plot if some else None, "Bad completions", captions.bad(went, report.limits)))
    starts = charts.start_bars(went.starts) if went.starts else None
    figures.append(Figure(starts, "Start-up by phase", captions.starts(went.starts)))
    if went.slots_busy is not None:
        plot = charts.over_time(clock, "slots in use", [(went.slots_busy, "line")], percent=True, least_top=1.0)
        figures.append(Figure(plot, "Slots in use", captions.slots(went.slots_busy)))
    if went.accept_length is not None:
        each = [(series, "line thin") for series in went.server_accept_length.values()]
        keys = [("", "all"), ("thin", "each server")]
        lines = [*each, (went.accept_length, "line")]
        plot = charts.over_time(clock, "tokens a step", lines, keys=keys, levels=[(1.0, "no draft accepted")])
        figures.append(Figure(plot, "Accept length", captions.accept(went, report.servers)))
    return figures


def _made(report: Report) -> list[Figure]:
    masks = report.masks
    return [
        Figure(charts.histogram(found, cuts) if found else None, title, words)
        for title, found, words, cuts in (
            ("Thoughts", report.thought, captions.length(report.thought, "thought"), ()),
            ("Answers", report.answer, captions.length(report.answer, "answer"), ()),
            ("Supervised tokens a record", masks.supervised, captions.masked(masks), ()),
            ("Prompt and output together", masks.rows, captions.length(masks.rows, "accepted record"), CUTS),
        )
    ]


def _label_lines(report: Report, clock: Clock) -> dict[str, Path]:
    """A small line for each label, each on its own scale: when it came, not how often."""
    return {
        name: charts.line(clock, series, charts.most([series]) or 1.0, "line")
        for name, series in report.course.labels.items()
    }


def _server_lines(report: Report, clock: Clock) -> dict[str, Path]:
    """Tokens a second of each server, on one scale."""
    every = report.course.server_tokens_per_s
    top = charts.most(every.values()) or 1.0
    return {name: charts.line(clock, series, top, "line") for name, series in every.items()}


def _rows(settings: Any) -> list[tuple[str, str]]:
    """A row of settings as names and values, whatever it holds."""
    rows: list[tuple[str, str]] = []
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if name == "content":
            rows += [(key.replace("_", " "), _value(inner)) for key, inner in value.items()]
        elif name not in ("id", "first_prompt"):
            rows.append((name.replace("_", " "), _value(value)))
    return [(name, value) for name, value in rows if value]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} = {_value(inner)}" for key, inner in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else str(value)

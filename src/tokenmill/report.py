"""report.html and report.json: what a run made, for someone who was not there. One self-contained page, no script.

Everything is read from the run folder, so that the report of a finished, stopped or killed run can be written anew.
"""

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill import __version__, dataset, events, settings
from tokenmill.core import judge
from tokenmill.core.audit import FindingKind
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record
from tokenmill.dataset import Brief
from tokenmill.errors import StoreError
from tokenmill.folder import RunFolder, write_aside
from tokenmill.plain import duration

EXAMPLE_CHARS = 2000
EXAMPLES, EXAMPLES_FROM = 3, 1000
"""Examples of each kind, and the records among which they are looked for."""

FINDINGS = frozenset(kind.value for kind in FindingKind)

WARNINGS = 50
"""The last ones: a page of them, and what ended the run is among them."""


class Bin(msgspec.Struct, frozen=True):
    """`range` in tokens; `share` in percent of the largest bin."""

    range: str
    count: int
    share: float


class Histogram(msgspec.Struct, frozen=True):
    title: str
    bins: list[Bin]


class Example(msgspec.Struct, frozen=True):
    key: str
    labels: list[str]
    prompt: str
    reasoning: str
    answer: str
    error: str


class ServerRow(msgspec.Struct):
    """A server's share of the run; `seconds` are those of its requests, one by one."""

    name: str
    completions: int = 0
    tokens: int = 0
    rejected: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> str:
        return f"{self.tokens / self.seconds:,.0f}" if self.seconds else "–"


class FindingRow(msgspec.Struct):
    """What the watch found of a server; `ended` is empty where it held to the end. See core/audit.py for the kinds."""

    kind: str
    server: str
    text: str
    fix: str
    began: str
    ended: str = ""


class Report(msgspec.Struct, frozen=True):
    """`numbers` are name and value as shown; `verdict` is one sentence, `good` what it says."""

    run: str
    date: str
    version: str
    verdict: str
    good: bool
    numbers: list[tuple[str, str]]
    labels: list[tuple[str, int, str]]
    histograms: list[Histogram]
    servers: list[ServerRow]
    findings: list[FindingRow]
    warnings: list[str]
    examples: list[Example]
    settings: str
    config: str
    next: str


def write(folder: RunFolder, rules: Rules, total: int, trouble: str = "") -> Path:
    """Writes both files; returns the page. `total` are the completions asked for, `trouble` what ended the run.

    Raises StoreError.
    """
    report = build(folder, rules, total, trouble)
    from jinja2 import Environment, PackageLoader, select_autoescape

    path = folder.path / "report.html"
    environment = Environment(loader=PackageLoader("tokenmill", "data"), autoescape=select_autoescape(default=True))
    page = environment.get_template("report.html.j2").render(report=report)
    try:
        write_aside(path.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(report), indent=1))
        write_aside(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error.strerror}", fix=f"df -h {path.parent}") from error
    return path


def build(folder: RunFolder, rules: Rules, total: int, trouble: str = "") -> Report:
    """Reads the run once, as a stream, without texts and ids; these only of a few examples."""
    tally = _Tally(rules)
    for brief in dataset.current(folder.data):
        tally.add(brief)
    ended = sum(tally.verdicts.values())
    accepted = tally.verdicts[Verdict.ACCEPTED]
    command = f"tokenmill export {folder.path} messages OUT"
    if trouble:
        verdict = f"Stopped: {trouble.splitlines()[0]}"
    elif ended < total or not total:
        verdict = f"Unfinished: {ended:,} of {total:,} completions have a record."
        command = f"tokenmill run CONFIG   goes on\n{command}"
    else:
        verdict = f"Done: {accepted:,} of {total:,} completions are accepted, {_percent(accepted, total)}."
    rows = settings.read(folder.data)
    return Report(
        run=folder.path.name,
        date=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
        verdict=verdict,
        good=not trouble and 0 < total <= ended,
        numbers=tally.numbers(total),
        labels=[(name, count, _percent(count, ended)) for name, count in tally.labels.most_common()],
        histograms=[
            histogram("Tokens of the thought", tally.thought_tokens),
            histogram("Tokens of the output (what a loss mask covers)", tally.output_tokens),
        ],
        servers=sorted(tally.servers.values(), key=lambda row: row.name),
        findings=_findings(folder),
        warnings=_warnings(folder),
        examples=_examples(folder, rules),
        settings=msgspec.json.format(msgspec.json.encode(rows), indent=1).decode(),
        config=folder.config.read_text(encoding="utf-8") if folder.config.exists() else "",
        next=command,
    )


class _Tally:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.verdicts: Counter[Verdict] = Counter()
        self.labels: Counter[str] = Counter()
        self.finish: Counter[str] = Counter()
        self.servers: dict[str, ServerRow] = {}
        self.thought_tokens = array("I")
        self.output_tokens = array("I")
        self.first, self.last = float("inf"), 0.0

    def add(self, brief: Brief) -> None:
        verdict, labels = judge.judged(brief, self.rules)
        self.verdicts[verdict] += 1
        self.labels.update(labels)
        if verdict is Verdict.FAILED:
            return
        self.finish[brief.finish_reason] += 1
        self.output_tokens.append(brief.output_tokens)
        if brief.thinking:
            self.thought_tokens.append(brief.reasoning_tokens)
        self.first, self.last = min(self.first, brief.started), max(self.last, brief.started + brief.seconds)
        row = self.servers.setdefault(brief.server, ServerRow(brief.server))
        row.completions += 1
        row.tokens += brief.output_tokens
        row.seconds += brief.seconds
        row.rejected += verdict is Verdict.REJECTED

    def numbers(self, total: int) -> list[tuple[str, str]]:
        ended = sum(self.verdicts.values())
        tokens = sum(self.output_tokens)
        seconds = max(self.last - self.first, 0.001)
        rows = [
            ("completions asked for", f"{total:,}"),
            ("accepted", f"{self.verdicts[Verdict.ACCEPTED]:,} ({_percent(self.verdicts[Verdict.ACCEPTED], ended)})"),
            ("rejected", f"{self.verdicts[Verdict.REJECTED]:,} ({_percent(self.verdicts[Verdict.REJECTED], ended)})"),
            ("failed", f"{self.verdicts[Verdict.FAILED]:,} ({_percent(self.verdicts[Verdict.FAILED], ended)})"),
            ("output tokens", f"{tokens:,}"),
        ]
        if self.output_tokens:
            rows += [
                ("from the first request to the last answer", f"{duration(seconds)}, {tokens / seconds:,.0f} tokens/s"),
                ("tokens of an output, p1 / p50 / p99", " / ".join(f"{q:,}" for q in quantiles(self.output_tokens))),
                ("finish reasons", ", ".join(f"{name} {count:,}" for name, count in self.finish.most_common())),
            ]
        return rows


def quantiles(values: Sequence[int]) -> list[int]:
    """p1, p50 and p99."""
    return [int(q) for q in np.percentile(np.array(values), [1, 50, 99])]


def histogram(title: str, values: Sequence[int]) -> Histogram:
    """Counts in bins whose bounds double: lengths of completions spread over orders of magnitude."""
    bounds = [0, 16]
    while len(values) and bounds[-1] <= max(values):
        bounds.append(bounds[-1] * 2)
    counts = np.histogram(np.array(values), bounds)[0].tolist()
    top = max(counts, default=0) or 1
    bins = zip(pairwise(bounds), counts, strict=True)
    return Histogram(
        title, [Bin(f"{low:,} – {high - 1:,}", count, round(100 * count / top, 1)) for (low, high), count in bins]
    )


def _examples(folder: RunFolder, rules: Rules) -> list[Example]:
    """The first few accepted and the first few other records."""
    good: list[Example] = []
    bad: list[Example] = []
    for record in islice(dataset.records(folder.data), EXAMPLES_FROM):
        verdict, _ = judge.judged(record, rules)
        chosen = good if verdict is Verdict.ACCEPTED else bad
        if len(chosen) < EXAMPLES:
            chosen.append(_example(record))
        if len(good) == len(bad) == EXAMPLES:
            break
    return [*bad, *good]


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _findings(folder: RunFolder) -> list[FindingRow]:
    """What was told of each server, with its end where it has one: a finding is a pair of events."""
    rows: list[FindingRow] = []
    for event, _ in events.read(folder.events):
        if event.kind not in FINDINGS:
            continue
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.t))
        if event.level == "warn":
            rows.append(FindingRow(event.kind, event.server, event.text, event.fix, when))
            continue
        for row in rows:
            if (row.kind, row.server, row.ended) == (event.kind, event.server, ""):
                row.ended = when
    return rows[-WARNINGS:]


def _warnings(folder: RunFolder) -> list[str]:
    told = (event for event, _ in events.read(folder.events) if event.kind not in FINDINGS)
    found = [event for event in told if event.level in ("warn", "error")]
    return [f"{time.strftime('%m-%d %H:%M:%S', time.localtime(event.t))} {event.text}" for event in found[-WARNINGS:]]


def _example(record: Record) -> Example:
    messages: Any = msgspec.json.decode(record.messages)
    prompt = "" if not messages else "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages[-2:])
    return Example(
        key=record.key,
        labels=list(record.labels),
        prompt=_cut(prompt),
        reasoning=_cut(record.reasoning),
        answer=_cut(record.answer),
        error=record.error,
    )


def _cut(text: str) -> str:
    return text if len(text) <= EXAMPLE_CHARS else f"{text[:EXAMPLE_CHARS]} … ({len(text):,} characters)"

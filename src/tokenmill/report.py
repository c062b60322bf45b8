"""report.html and report.json: what a run made and how it went, for someone who was not there (docs/report.md).

Everything is read from the run folder, so that the report of any run can be written anew, while it goes on or after it
was damaged: what is missing is told on the page.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill import __version__
from tokenmill.core.judge import TRUNCATED
from tokenmill.core.records import PROMPT_FAULTS
from tokenmill.core.status import ENDED
from tokenmill.errors import StoreError
from tokenmill.explain import NEVERTHELESS
from tokenmill.folder import RunFolder, write_aside
from tokenmill.reporting import captions, course, examples, figures
from tokenmill.reporting.answer import Report, Step
from tokenmill.reporting.clock import Clock
from tokenmill.reporting.columns import FAILED
from tokenmill.reporting.course import Course
from tokenmill.reporting.figures import Counts, LabelCount, Masks, Outlier, ServerFigures
from tokenmill.reporting.gather import Gathered, gather
from tokenmill.reporting.page import render
from tokenmill.steps import Tell

LITTLE = 0.005
"""A share of bad completions below this is no news."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run stands: its state, the completions asked for (None where nobody knows), what ended it in its own words,
    and the command that goes on."""

    state: str
    total: int | None
    trouble: str = ""
    command: str = "tokenmill run CONFIG"


def write(folder: RunFolder, ending: Ending, tell: Tell = lambda text: None) -> Path:
    """Writes both files; returns the page. Raises StoreError where they cannot be written."""
    path = folder.path / "report.html"
    report, clock = build(folder, ending, tell)
    try:
        write_aside(path.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(report), indent=1))
        write_aside(path, render(report, clock).encode("utf-8", "replace"))
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error.strerror}", fix=f"df -h {path.parent}") from error
    return path


def build(folder: RunFolder, ending: Ending, tell: Tell = lambda text: None) -> tuple[Report, Clock]:
    """Reads the records once, as a stream, without texts and ids; these only of a few examples."""
    found = gather(folder, tell)
    clock = found.clock()
    rows = found.columns
    counts = figures.counts(rows)
    answered = rows.answered
    names = [rows.servers[number] for number in figures.server_order(rows)]
    went = course.course(rows, clock, names, found.history(), found.happened, found.signs())
    labels = figures.labels(rows, found.rules.reject)
    fleet = figures.servers(rows, clock.on_s)
    machines = figures.nodes(fleet, found.environments)
    outliers = figures.outliers(labels, fleet)
    masks = figures.masks(rows)
    kinds, has_ids = examples.kinds(found)
    if ending.total is None:
        found.unknown["status.json is missing or damaged: how many completions were asked for is not known"] = None
    timed = rows.began > 0
    thinking = answered & rows.thinking
    known = bool(timed.any())
    report = Report(
        run=folder.path.name,
        written=round(time.time(), 1),
        tokenmill=__version__,
        state=ending.state,
        verdict=verdict(ending, counts),
        good=not ending.trouble and ending.state == "done" and 0 < (ending.total or 0) <= _ended(counts),
        trouble=ending.trouble,
        notable=[*_notable(counts, labels, outliers, masks, went, fleet), *captions.unlike(machines)],
        unknown=list(found.unknown),
        next=_next(found, ending, counts, has_ids),
        asked=ending.total,
        counts=counts,
        began=float(rows.began[timed].min()) if known else None,
        ended=float(rows.ended[timed].max()) if known else None,
        on_s=round(clock.on_s, 1) if known else 0.0,
        output_tokens=int(rows.output[answered].sum(dtype="int64")),
        thought_tokens=int(rows.thought[thinking].sum(dtype="int64")),
        finish_reasons=figures.finish_reasons(rows),
        thought=figures.spread(rows.thought[thinking]),
        answer=figures.spread((rows.output - rows.thought.clip(max=rows.output))[answered]),
        prompt=figures.spread(rows.prompt[rows.verdict != FAILED]),
        masks=masks,
        labels=labels,
        nodes=machines,
        servers=fleet,
        outliers=outliers,
        limits=_limits(found),
        course=went,
        efficiency=last.efficiency if (last := folder.status()) is not None else None,
        findings=found.notices.findings,
        warnings=found.notices.rows,
        warnings_left_out=found.notices.left_out,
        examples=kinds,
        environment=found.environments,
        settings=found.settings,
        config=found.config_text,
    )
    return report, clock


def _ended(counts: Counts) -> int:
    return counts.accepted + counts.rejected + counts.failed


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def verdict(ending: Ending, counts: Counts) -> str:
    """The run in one sentence."""
    ended, total = _ended(counts), ending.total
    of = f"{ended:,} of {total:,} completions" if total is not None else f"{ended:,} completions"
    accepted = f"{counts.accepted:,} of them accepted"
    if ending.trouble:
        return f"Stopped: {ending.trouble.splitlines()[0].removesuffix('.')}."
    if not total and not ended:
        return f"Empty ({ending.state}): no completion has been asked for."
    if ending.state not in (*ENDED, "killed"):
        return f"Going on ({ending.state}): {of} have ended so far, {accepted}."
    if total is None:
        return f"Of an unknown number, {of} have ended, {accepted}."
    if ended < total:
        how = "Killed" if ending.state == "killed" else "Unfinished"
        return f"{how}: {of} have ended, {accepted}; {total - ended:,} are still to be asked for."
    return f"Done: {counts.accepted:,} of {total:,} completions are accepted, {_percent(counts.accepted, total)}."


def _notable(
    counts: Counts,
    labels: Sequence[LabelCount],
    outliers: Sequence[Outlier],
    masks: Masks,
    went: Course,
    fleet: Sequence[ServerFigures],
) -> list[str]:
    """What a reader should know beside the verdict, a sentence each."""
    ended = _ended(counts)
    found = []
    rejecting = [row for row in labels if row.rejects]
    if counts.rejected:
        most = f", mostly {rejecting[0].label} ({rejecting[0].count:,})" if rejecting else ""
        found.append(f"Rejected: {counts.rejected:,}, {_percent(counts.rejected, ended)}{most}.")
    cut = sum(row.count for row in labels if row.label in TRUNCATED)
    if cut > LITTLE * ended:
        rejects = any(row.label in TRUNCATED for row in rejecting)
        counted = "which rejects them" if rejects else "and accepted all the same"
        found.append(f"Cut off at their length, {counted}: {cut:,}, {_percent(cut, ended)}.")
    if counts.failed:
        prompts = ", ".join(f"{r.label} {r.count:,}" for r in labels if r.label in PROMPT_FAULTS)
        sake = f"; by their prompts' fault: {prompts}" if prompts else ""
        found.append(f"Failed: {counts.failed:,}, {_percent(counts.failed, ended)}{sake}.")
    found += captions.outlying(outliers)
    if went.losses:
        found.append(captions.lost(went.losses, len(fleet)))
    if any(clip.share >= LITTLE for clip in masks.clips):
        found.append(captions.clipped(masks.clips))
    return found


def _limits(found: Gathered) -> dict[str, float]:
    """What the gate allows of a cohort, by the words of the charts."""
    if found.config is None:
        return {}
    gate = found.config.gate
    return {"rejected": gate.max_rejected, "cut off": gate.max_truncated, "failed": gate.max_failed}


def _next(found: Gathered, ending: Ending, counts: Counts, has_ids: bool | None) -> list[Step]:
    """What to do with the run as it stands; the format is the one that the purpose wants and the records allow."""
    run = shlex.quote(str(found.folder.path))
    steps = []
    if ending.state not in (*ENDED, "killed"):
        steps.append(Step(f"tokenmill watch {run}", "follows it"))
    elif ending.trouble or ending.total is None or _ended(counts) < ending.total:
        _, told, command = ending.trouble.rpartition(NEVERTHELESS)
        why = "goes on nevertheless, and asks for nothing twice" if told else "goes on where it stands"
        steps.append(Step(command.strip() if told else ending.command, why))
    if not counts.accepted:
        return steps
    steps.append(Step(f"tokenmill inspect {run}", "looks at every record as a trainer would"))
    sft = found.config is not None and found.config.judge.purpose == "sft"
    if sft:
        steps.append(Step(f"tokenmill export {run} messages OUT", "the accepted ones for fine-tuning: TRL, Axolotl"))
    elif has_ids is False:
        why = "the accepted ones for SpecForge's own templates: the engine gave no token ids"
        steps.append(Step(f"tokenmill export {run} specforge-chat OUT", why))
    else:
        why = "the accepted ones as token ids and loss mask, for a drafter"
        steps.append(Step(f"tokenmill export {run} specforge OUT", why))
    return steps
